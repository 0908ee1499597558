from pathlib import Path

import pytest
from tiny_llama import build, build_tokenizer

import octavo
from octavo.compiler.compiled import Compiled
from octavo.compiler.draft_training.prompts import default_prompts, encode_prompts, is_held_out, read_prompts
from octavo.compiler.errors import OptionError


def test_prompts_come_with_octavo() -> None:
    prompts = read_prompts(None)
    assert prompts == default_prompts()
    assert len(prompts) == len(set(prompts)) == 189
    assert all(prompt == prompt.strip() and len(prompt) > 10 for prompt in prompts)
    held_out = sum(map(is_held_out, range(len(prompts))))
    assert 15 < held_out < 25


def test_a_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n\n  \ntwo words\n")
    assert read_prompts(path) == ["one", "two words"]
    path.write_text("one\n")
    with pytest.raises(OptionError, match="expected 2 lines or more"):
        read_prompts(path)
    with pytest.raises(OptionError, match="cannot be read"):
        read_prompts(tmp_path / "none")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    output = tmp_path_factory.mktemp("prompts") / "a.octavo"
    return octavo.compile(build(), tokenizer=build_tokenizer(), output=output, verify="off")


def test_prompts_become_what_the_model_was_trained_on(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = compiled.tokenizer
    assert tokenizer is not None
    [chat] = encode_prompts(compiled, ["hi"])
    assert tokenizer.decode(chat).endswith("user: hi\nassistant: ")
    monkeypatch.setattr("octavo.compiler.draft_training.prompts.load_chat_template", lambda _: None)
    assert encode_prompts(compiled, ["hi"]) == [tokenizer.encode("hi")]
    monkeypatch.setitem(compiled.__dict__, "tokenizer", None)
    assert encode_prompts(compiled, ["5, 6 7"]) == [[5, 6, 7]]
    with pytest.raises(OptionError, match="expected token ids such as"):
        encode_prompts(compiled, ["hi"])
