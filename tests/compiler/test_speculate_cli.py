"""`octavo run --speculate`, `octavo tune` on a processor, and drafts that do not go with their target."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from models import llama
from tiny_llama import build

import octavo
from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import OptionError
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.options import Speculate, speculate_of

Run = Callable[..., tuple[int, str, str]]
PROMPT = "5 6 7 8 5 6 7 8 5 6"


@pytest.mark.parametrize("how", ["ngram", "suffix", "draft={}", "self={}"])
def test_greedy_answers_are_the_same_with_and_without(run: Run, id_artifact: Path, how: str) -> None:
    plain = run("run", id_artifact, PROMPT, "--max-tokens", 30)
    drafted = run("run", id_artifact, PROMPT, "--max-tokens", 30, "--speculate", how.format(id_artifact))
    assert plain[0] == drafted[0] == 0 and plain[1] == drafted[1]


def test_stats_tell_what_drafts_brought(run: Run, id_artifact: Path) -> None:
    arguments = ("--max-tokens", 20, "--speculate", f"self={id_artifact}", "--draft-length", 4, "--stats")
    code, _, err = run("run", id_artifact, PROMPT, *arguments)
    assert code == 0
    # 19 tokens behind the first: three rounds of 5 and one of 4
    assert "speculation (self): 4.75 tokens a round (4 rounds), 100% of 15 drafted" in err
    assert "accepted by depth, behind accepted ones: ████ 100% 100% 100% 100%" in err
    assert "drafting" in err and "no step ran without drafts" in err


def test_seeded_answers_do_not_depend_on_drafts(id_artifact: Path) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    answers = set()
    for how in (
        None,
        Speculate("ngram", length=5),
        Speculate("draft", id_artifact),
        Speculate("self", id_artifact, 3),
    ):
        engine = Engine.from_artifact(id_artifact, speculate=how, use_tokenizer=False)
        answers.add(engine.generate([5, 6, 7], params)[0].token_ids)
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle", "expected ngram, suffix, draft=ARTIFACT or self=ARTIFACT, got 'eagle'"),
        ("draft", "got draft alone"),
        ("draft=", "got 'draft='"),
        ("ngram=x", "got ngram with x"),
    ],
)
def test_what_is_no_way_to_speculate_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        speculate_of(text)


def test_lengths_are_bounded(run: Run, id_artifact: Path) -> None:
    with pytest.raises(OptionError, match="expected 1 to 32 drafted tokens, got 33"):
        Speculate("ngram", length=33)
    code, _, err = run("run", id_artifact, PROMPT, "--draft-length", 3)
    assert code == 2 and "expected --speculate beside it" in err


def test_drafts_that_do_not_fit_are_refused(id_artifact: Path, tmp_path: Path) -> None:
    page_size = Artifact.open(id_artifact).program.page_size
    octavo.compile(build(), verify="off", output=tmp_path / "pages", page_size=page_size * 2)
    octavo.compile(llama(vocab_size=40), verify="off", output=tmp_path / "words", page_size=page_size)
    octavo.compile(build(), verify="off", output=tmp_path / "bf16", dtype="bf16", page_size=page_size)
    for how, message in (
        (Speculate("draft", tmp_path / "pages"), f"expected a draft with pages of {page_size} tokens"),
        (Speculate("draft", tmp_path / "words"), "expected a draft of the target's .* tokens, got 40"),
        (Speculate("self", tmp_path / "words"), "expected the target itself"),
        (Speculate("self", tmp_path / "bf16"), r"k_cache_0 bf16 .* is not as k_cache_0 fp32"),
    ):
        with pytest.raises(OptionError, match=message):
            Engine.from_artifact(id_artifact, speculate=how, use_tokenizer=False)


def test_tune_times_the_steps_of_a_processor(run: Run, tmp_path: Path) -> None:
    octavo.compile(build(), verify="off", output=tmp_path / "a")
    code, out, _ = run("tune", tmp_path / "a", "--json")
    table = json.loads(out)
    assert code == 0 and table["tokens"][:4] == [1, 2, 3, 4]
    assert json.loads(Artifact.open(tmp_path / "a").read("step_times.json")) == table
    code, out, _ = run("run", tmp_path / "a", PROMPT, "--max-tokens", 8, "--speculate", "ngram")
    assert code == 0 and len(out.split()) == 8
