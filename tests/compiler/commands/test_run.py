"""`octavo run`: the answer of the library, streamed; dialogues, batches, interrupts."""

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.compiler import cli
from octavo.runtime.engine import Engine

Run = Callable[..., tuple[int, str, str]]


def test_run_streams_a_chat_answer(chat_artifact: Path, run: Run) -> None:
    compiled = octavo.load(chat_artifact)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    expected = compiled.chat(messages, octavo.SamplingParams(max_tokens=8)).text
    options = ("--system", "Be brief.", "--max-tokens", 8)
    assert run("run", chat_artifact, "Why?", *options) == (0, f"{expected}\n", "")
    assert run("run", chat_artifact, *options, stdin="Why?\n") == (0, f"{expected}\n", "")
    assert run("run", chat_artifact, "-", *options, stdin="Why?\n") == (0, f"{expected}\n", "")


def test_run_raw_and_sampled(chat_artifact: Path, run: Run) -> None:
    params = octavo.SamplingParams(8, temperature=1.5, top_k=50, top_p=0.9, min_p=0.01, seed=7)
    expected = octavo.load(chat_artifact).generate("Why?", params)[0].text
    options = ("--temperature", 1.5, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01, "--seed", 7)
    code, out, err = run("run", chat_artifact, "Why?", "--raw", "--max-tokens", 8, *options, "--stats")
    assert (code, out) == (0, f"{expected}\n")
    assert "4 prompt tokens" in err and "tokens/s" in err and err.startswith("load ")


def test_run_stops(chat_artifact: Path, run: Run) -> None:
    text = run("run", chat_artifact, "Why?", "--raw", "--max-tokens", 12)[1]
    first, cut = text[2], text[:2]
    out = run(
        "run", chat_artifact, "Why?", "--raw", "--max-tokens", 12, "--stop", "nowhere", "--stop", first
    )[1]
    assert cut.startswith(out.removesuffix("\n")) and first not in out


def test_run_answers_in_the_form_asked_for(chat_artifact: Path, run: Run, tmp_path: Path) -> None:
    ask = ("run", chat_artifact, "Why?", "--raw", "--max-tokens", 40)
    assert re.fullmatch("(yes|no){3}\n", run(*ask, "--regex", "(yes|no){3}")[1])
    (tmp_path / "schema").write_text('{"enum": [{"a": [1, 2]}, {"b": null}]}')
    schema = ("--json-schema", tmp_path / "schema")
    assert json.loads(run(*ask, *schema, "--temperature", 5, "--seed", 3)[1]) in ({"a": [1, 2]}, {"b": None})
    for options, said in (
        ((*schema, "--regex", "a"), "expected --json-schema or --regex, got both"),
        (("--json-schema", tmp_path / "none"), "none cannot be read"),
        (("--regex", "(a"), "unclosed group"),
    ):
        code, out, err = run(*ask, *options)
        assert (code, out) == (2, "") and said in err


def test_a_repetition_penalty_changes_the_answer(chat_artifact: Path, run: Run) -> None:
    params = octavo.SamplingParams(max_tokens=12, repetition_penalty=5.0)
    expected = octavo.load(chat_artifact).generate("Why?", params)[0].text
    options = ("--raw", "--max-tokens", 12)
    assert run("run", chat_artifact, "Why?", *options, "--repetition-penalty", 5)[1] == f"{expected}\n"
    assert run("run", chat_artifact, "Why?", *options)[1] != f"{expected}\n"


def test_several_answers(chat_artifact: Path, run: Run, tmp_path: Path) -> None:
    ask = ("run", chat_artifact, "--raw", "--max-tokens", 5)
    params = octavo.SamplingParams(5, temperature=2.0, seed=3, n=3)
    (completion,) = octavo.load(chat_artifact).generate(["Why?"], params)
    shown = "".join(f"[{i}/3] {answer.text}\n" for i, answer in enumerate(completion.answers, 1))
    sampled = ("--n", 3, "--temperature", 2, "--seed", 3)
    assert run(*ask[:2], "Why?", *ask[2:], *sampled) == (0, shown, "")
    (tmp_path / "prompts").write_text("Why?\n")
    record = json.loads(run(*ask, "--prompts-file", tmp_path / "prompts", *sampled)[1])
    assert [own["token_ids"] for own in record["answers"]] == [list(a.token_ids) for a in completion.answers]
    beams = octavo.SamplingParams(5, beam_width=4, n=2)
    (completion,) = octavo.load(chat_artifact).generate(["Why?"], beams)
    out = run(*ask[:2], "Why?", *ask[2:], "--n", 2, "--beam-width", 4)[1]
    assert out == "".join(f"[{i}/2] {answer.text}\n" for i, answer in enumerate(completion.answers, 1))


def test_run_with_token_ids(id_artifact: Path, run: Run) -> None:
    expected = octavo.load(id_artifact).generate([3, 4, 5], octavo.SamplingParams(max_tokens=4))[0].token_ids
    assert run("run", id_artifact, "3 4, 5", "--max-tokens", 4)[1].split() == [str(i) for i in expected]
    code, out, err = run("run", id_artifact, "hello")
    assert (code, out) == (2, "") and "expected token ids such as '12 7 99'" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("", ""), "expected some text"),
        ((), "expected some text"),
        (("x" * 100,), "expected"),
        (("a", "--prompts-file", "nix"), "expected PROMPT or --prompts-file, got both"),
        (("--prompts-file", "nix"), "nix cannot be read"),
        (("a", "--raw", "--system", "b"), "expected a chat, got --raw"),
    ],
)
def test_run_refuses(arguments: tuple[str, ...], said: str, chat_artifact: Path, run: Run) -> None:
    if arguments == ("", ""):
        arguments = ("",)
    code, out, err = run("run", chat_artifact, *arguments)
    assert (code, out) == (2, "") and said in err


def test_run_refuses_a_chat_without_a_template(id_artifact: Path, run: Run) -> None:
    code, _, err = run("run", id_artifact, "1 2", "--chat")
    assert code == 2 and "expected an artifact with a chat template" in err


def test_prompts_file(chat_artifact: Path, run: Run, tmp_path: Path) -> None:
    lines = ["Why?", "What is 2 + 2?", "é"]
    (tmp_path / "prompts").write_text("\n\n".join(lines) + "\n")
    code, out, err = run("run", chat_artifact, "--prompts-file", tmp_path / "prompts", "--max-tokens", 6)
    assert (code, err) == (0, "")
    records = [json.loads(line) for line in out.splitlines()]
    compiled = octavo.load(chat_artifact)
    for line, record in zip(lines, records, strict=True):
        answer = compiled.chat([{"role": "user", "content": line}], octavo.SamplingParams(max_tokens=6))
        assert record == {
            "prompt": line, "text": answer.text, "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason,
        }  # fmt: skip
    (tmp_path / "empty").write_text("\n")
    assert run("run", chat_artifact, "--prompts-file", tmp_path / "empty")[0] == 2


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_dialogue_keeps_what_was_said(
    chat_artifact: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Keyboard("Hi\n\nWhy?\n"))
    typed = iter(["Hi", "", "Why?"])

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(SystemExit) as end:
        cli.main(["run", str(chat_artifact), "--max-tokens", "4"])
    out, err = capsys.readouterr()
    assert (end.value.code or 0) == 0 and "Ctrl-D" in err
    compiled, params = octavo.load(chat_artifact), octavo.SamplingParams(max_tokens=4)
    said = [{"role": "user", "content": "Hi"}]
    first = compiled.chat(said, params).text
    said += [{"role": "assistant", "content": str(first)}, {"role": "user", "content": "Why?"}]
    assert out == f"{first}\n{compiled.chat(said, params).text}\n\n"


def test_interrupt_keeps_the_partial_answer(
    chat_artifact: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Engine.stream

    def interrupted(self: Engine, *arguments: Any) -> Iterator[Any]:
        for index, token in enumerate(stream(self, *arguments)):
            if index == 3:
                raise KeyboardInterrupt
            yield token

    whole = run("run", chat_artifact, "Why?", "--raw", "--max-tokens", 12)[1]
    monkeypatch.setattr(Engine, "stream", interrupted)
    code, out, err = run("run", chat_artifact, "Why?", "--raw", "--max-tokens", 12)
    assert code == 130 and err == "octavo: interrupted\n"
    assert out.endswith("\n") and whole.startswith(out[:-1]) and len(out) < len(whole)
