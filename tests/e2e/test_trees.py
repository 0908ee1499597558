"""Trees of drafts: what a step with one computes is what plain decoding does, bit for bit on a processor."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scripted import Scripted
from zoo import build

import octavo
from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import OptionError
from octavo.compiler.options import Parallel
from octavo.runtime.engine import Engine
from octavo.runtime.model_runner import NativeRunner
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.draft import NO_DRAFT, ROOT, Draft
from octavo.runtime.speculative.policy import FixedLength
from octavo.runtime.speculative.proposer import Asked
from octavo.runtime.speculative.speculator import Speculator

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def answers(artifact: Artifact, speculator: Speculator | None) -> list[tuple[int, ...]]:
    engine = Engine(NativeRunner(artifact, 80), artifact.model, speculator=speculator)
    return [answer.token_ids for answer in engine.generate(PROMPTS, PARAMS)]


def second_is_right(plain: Sequence[tuple[int, ...]]) -> Scripted:
    """Trees of three paths, of which the right one is second at every depth."""

    def script(asked: Asked) -> Draft:
        place = [list(prompt) for prompt in PROMPTS].index(asked.branch.tokens[: asked.request.prompt_len])
        known = len(asked.branch.tokens) - asked.request.prompt_len
        right = plain[place][known : known + 3]
        if asked.most < 7 or len(right) < 3:
            return NO_DRAFT
        wrong = [(token + 1) % 128 for token in right]
        tokens = (wrong[0], right[0], wrong[1], right[1], wrong[2], right[2], wrong[0])
        return Draft(tokens, (ROOT, ROOT, 1, 1, 3, 3, 0), (None,) * 7)

    return Scripted(script)


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "bloom"])
def test_trees_change_nothing_but_the_number_of_steps(name: str, tmp_path: Path) -> None:
    artifact = octavo.compile(build(name), output=tmp_path / name, trees=True).artifact
    plain = answers(artifact, None)
    speculator = Speculator(second_is_right(plain), FixedLength(7))
    assert answers(artifact, speculator) == plain
    assert speculator.figures.mean_emitted > 3.5


def test_logits_of_a_tree_are_those_of_its_paths_bit_for_bit(tmp_path: Path) -> None:
    """In bf16, where any other order of sums would show."""
    artifact = octavo.compile(
        build("llama"), output=tmp_path / "a", trees=True, dtype="bf16", verify="off"
    ).artifact
    plain = answers(artifact, None)
    assert answers(artifact, Speculator(second_is_right(plain), FixedLength(7))) == plain
    rows = []
    for speculator in (None, Speculator(second_is_right(plain), FixedLength(7))):
        engine = Engine(NativeRunner(artifact, 80), artifact.model, speculator=speculator)
        params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=5)
        rows.append([answer.answers[0].logprobs for answer in engine.generate(PROMPTS, params)])
    assert rows[0] == rows[1]
    assert len(np.unique([one.logprob for own in rows[0] for one in own or ()])) > 50


def test_where_trees_are_not_served_they_are_refused() -> None:
    with pytest.raises(OptionError, match="trees: expected one rank"):
        octavo.compile(build("llama"), trees=True, parallel=Parallel(tp=2))
    with pytest.raises(OptionError, match="deterministic=True"):
        octavo.compile(build("llama"), "b200", trees=True, deterministic=True)
