import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.compiler.errors import ArtifactError, MissingDependencyError
from octavo.runtime.tokenizer import FileTokenizer, IncrementalDecoder, StopFinder

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_json() -> str:
    """A tokenizer whose tokens are single bytes, and one special token (id 256)."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return str(tokenizer.to_str())


TOKENIZER = FileTokenizer(byte_level_json())


def pieces(tokenizer: FileTokenizer, ids: Sequence[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer.decode)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def test_encode_and_decode() -> None:
    ids = TOKENIZER.encode("né 😀")
    assert len(ids) == 8 and TOKENIZER.decode(ids) == "né 😀"
    assert TOKENIZER.decode([*ids, 256]) == "né 😀", "special tokens are left out"


def test_a_character_appears_whole_or_not_at_all() -> None:
    assert pieces(TOKENIZER, TOKENIZER.encode("a😀é")) == ["a", "", "", "", "😀", "", "é", ""]


def test_what_never_becomes_a_character_comes_with_flush() -> None:
    ids = TOKENIZER.encode("a😀")[:3]
    assert pieces(TOKENIZER, ids) == ["a", "", "", TOKENIZER.decode(ids)[1:]]


def test_special_tokens_give_nothing() -> None:
    ids = [256, *TOKENIZER.encode("a"), 256, 256, *TOKENIZER.encode("b"), 256]
    assert pieces(TOKENIZER, ids) == ["", "a", "", "", "b", "", ""]


@settings(deadline=None)
@given(st.text(max_size=40))
def test_pieces_join_to_the_whole_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    shown = pieces(TOKENIZER, ids)
    assert "".join(shown) == text
    assert shown[-1] == ("" if not text.endswith("\ufffd") else shown[-1]), "nothing is kept back at the end"


@settings(deadline=None)
@given(st.lists(st.integers(0, 256), max_size=60))
def test_pieces_join_to_the_whole_even_for_bytes_that_are_no_text(ids: list[int]) -> None:
    assert "".join(pieces(TOKENIZER, ids)) == TOKENIZER.decode(ids)


def test_endless_bytes_without_text_keep_the_work_bounded() -> None:
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return TOKENIZER.decode(ids)

    lone = TOKENIZER.encode("é")[0]
    decoder = IncrementalDecoder(decode)
    text = "".join(decoder.push(lone) for _ in range(500)) + decoder.flush()
    assert text == TOKENIZER.decode([lone] * 500) and max(lengths) < 100


def test_a_decoder_that_drops_a_leading_space_keeps_the_inner_ones() -> None:
    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}
    inner = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    inner.decoder = decoders.Metaspace()
    tokenizer = FileTokenizer(inner.to_str())
    assert tokenizer.decode([1]) == "cat"
    assert pieces(tokenizer, [0, 1, 2, 0]) == ["the", " cat", "s", " the", ""]


def find(stop: Sequence[str], *text: str) -> tuple[list[str], bool]:
    finder = StopFinder(stop)
    shown = []
    for piece in text:
        out, is_stopped = finder.push(piece)
        shown.append(out)
        if is_stopped:
            return shown, True
    return [*shown, finder.flush()], False


def test_stop_strings_are_never_shown_not_even_in_part() -> None:
    assert find(["END"], "a E", "N", "D b") == (["a ", "", ""], True)
    assert find(["END"], "a E", "N", "x") == (["a ", "", "ENx", ""], False)
    assert find(["END"], "a EN") == (["a ", "EN"], False)
    assert find(["aab"], "aa", "ab") == (["", "a"], True)
    assert find([], "a", "b") == (["a", "b", ""], False)
    assert find(["abc", "b"], "xabc") == (["xa"], True)


@settings(deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.data())
def test_stopping_does_not_depend_on_the_pieces(text: str, stop: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, is_stopped = find(stop, text)
    shown, was_stopped = find(stop, *parts)
    assert ("".join(shown), was_stopped) == ("".join(whole), is_stopped)
    assert not any(string in "".join(shown) for string in stop)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        MissingDependencyError, match=r"'tokenizers', which is not installed; pip install .*token ids"
    ):
        FileTokenizer(byte_level_json())


def test_a_file_that_is_no_tokenizer_is_an_artifact_error() -> None:
    with pytest.raises(
        ArtifactError, match=r"tokenizer/tokenizer\.json: expected a tokenizer that loads, got"
    ):
        FileTokenizer('{"model": 3}')


def test_settings_of_training_neither_cut_nor_fill_up_a_prompt() -> None:
    library = Tokenizer.from_str(byte_level_json())
    library.enable_truncation(4)
    library.enable_padding(length=12)
    trained = FileTokenizer(str(library.to_str()))
    assert trained.encode("abcdefgh") == TOKENIZER.encode("abcdefgh")
    assert len(trained.encode("ab")) == 2
    assert FileTokenizer(trained.to_json()).encode("abcdefgh") == TOKENIZER.encode("abcdefgh")
