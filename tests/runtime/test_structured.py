import json
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from json_tokenizer import tokenizer
from tokenizers import Tokenizer, models

from octavo.compiler.artifact import ModelInfo
from octavo.compiler.errors import ExecutionError, MissingDependencyError, RequestError
from octavo.runtime import structured
from octavo.runtime.sampler import RandomKey, Row, Sampled, sample
from octavo.runtime.sampling_params import SamplingParams, Structured
from octavo.runtime.structured import Grammars
from octavo.runtime.token_state import new_token_state
from octavo.runtime.tokenizer import FileTokenizer

END = 0
PADDING = 7  # rows of a model's logits that are no tokens


@cache
def grammars(num_merges: int = 150) -> Grammars:
    return Grammars(tokenizer(num_merges), model(num_merges))


def model(num_merges: int = 150, eos_token_ids: tuple[int, ...] = (END,)) -> ModelInfo:
    return ModelInfo("m", 257 + num_merges + PADDING, 1, 1024, 64, eos_token_ids)


def generate(what: Structured, seed: int, temperature: float = 1.0, num_merges: int = 150) -> str:
    """A text by random logits, which favour tokens that no grammar asks for."""
    rng = np.random.default_rng(seed)
    vocab_size = model(num_merges).vocab_size
    params = SamplingParams(temperature=temperature, structured=what)
    tokens = [5, 6]
    state = new_token_state(params, 2, {END}, grammars(num_merges).matcher(what))
    assert state is not None
    while len(tokens) < 600:
        state.sync(tokens)
        logits = rng.standard_normal((1, vocab_size)).astype(np.float32) * 3
        logits[0, -PADDING:] += 30
        [chosen] = sample(logits, [Row(params, RandomKey(seed, 0), len(tokens), state)])
        assert isinstance(chosen, Sampled), chosen
        if chosen.token_id == END:
            return tokenizer(num_merges).decode(tokens[2:])
        tokens.append(chosen.token_id)
    raise AssertionError(f"no end: {tokenizer(num_merges).decode(tokens[2:])}")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "über"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    tags = value.get("tags", ["a"])
    return (
        {"name", "age"} <= set(value) <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and type(value["age"]) is int
        and 0 <= value["age"] <= 130
        and 1 <= len(tags) <= 3
        and set(tags) <= {"a", "b", "über"}
    )


def balanced(text: str) -> bool:
    while "()" in text or "[]" in text:
        text = text.replace("()", "").replace("[]", "")
    return text == ""


@pytest.mark.parametrize(
    ("what", "is_right"),
    [
        (Structured.json_schema(PERSON), lambda text: is_person(json.loads(text))),
        (
            Structured.json_schema('{"type": ["boolean", "null"]}'),
            lambda text: json.loads(text) in (True, False, None),
        ),
        (
            Structured.regex(r"(yes|no|né+)( [0-9]{2})?"),
            lambda text: re.fullmatch(r"(yes|no|né+)( [0-9]{2})?", text),
        ),
        (
            Structured.grammar('start: pair pair?\npair: "(" pair? ")" | "[" pair? "]"'),
            lambda text: text and balanced(text),
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_merges", [0, 150])
def test_whatever_the_logits_the_text_is_what_was_asked_for(
    what: Structured, is_right: Callable[[str], object], temperature: float, num_merges: int
) -> None:
    texts = {generate(what, seed, temperature, num_merges) for seed in range(6)}
    assert len(texts) > 1
    assert [text for text in texts if not is_right(text)] == []


def test_any_json_is_json() -> None:
    kinds = {type(json.loads(generate(Structured.json(), seed, 2.0))) for seed in range(12)}
    assert len(kinds) > 1


def allowed(what: Structured, text: str) -> set[str]:
    """What may follow a text, token by token; "" is the end."""
    matcher = grammars().matcher(what)
    matcher.accept(tokenizer().encode(text))
    ids = np.flatnonzero(matcher.allowed(model().vocab_size)).tolist()
    return {tokenizer().decode([each]) for each in ids}


def test_the_end_may_follow_exactly_where_the_grammar_can_end() -> None:
    what = Structured.regex("ab?|abcd")
    assert allowed(what, "") == {"a"}
    assert allowed(what, "a") == {"", "b"}
    assert allowed(what, "ab") == {"", "c"}
    assert allowed(what, "abc") == {"d"}
    assert allowed(what, "abcd") == {""}


def test_every_end_token_of_the_model_may_end_it_and_no_other_token_may() -> None:
    both = Grammars(tokenizer(), model(eos_token_ids=(END, 9)))
    matcher = both.matcher(Structured.regex("a"))
    matcher.accept(tokenizer().encode("a"))
    assert np.flatnonzero(matcher.allowed(model().vocab_size)).tolist() == [END, 9]


def test_white_space_has_an_end() -> None:
    what = Structured.json_schema(PERSON)
    blanks = " " * structured.MAX_BLANKS
    assert {" ", "\n", "\t"} <= allowed(what, "{")
    for text in ("{" + blanks[1:], "{\n" + blanks[1:], '{"name" : '):
        assert " " in allowed(what, text)
    for text in ("{" + blanks, "{\n" + blanks):
        assert not {following for following in allowed(what, text) if following.isspace()}
    assert "\n" not in allowed(what, "{\n")


def test_forks_and_rollbacks_follow_their_own_text() -> None:
    what = Structured.regex("(ab|ba)*")
    size = model().vocab_size
    [a], [b] = tokenizer().encode("a"), tokenizer().encode("b")
    matcher = grammars().matcher(what)
    matcher.accept([a])
    fork = matcher.fork()
    matcher.accept([b, a])
    fork.accept([b, b])
    assert np.flatnonzero(matcher.allowed(size)).tolist() == [b]
    assert np.flatnonzero(fork.allowed(size)).tolist() == [a]
    fork.rollback(1)
    assert {a, b, END} <= set(np.flatnonzero(fork.allowed(size)).tolist())
    fork.accept([END])
    fork.rollback(2)
    assert np.flatnonzero(fork.allowed(size)).tolist() == [b]
    fresh = grammars().matcher(what).allowed(size)
    assert fresh[[a, b, END]].all()


def test_a_text_that_left_its_grammar_is_an_error_of_its_row() -> None:
    params = SamplingParams(structured=Structured.regex("ab"))
    state = new_token_state(params, 1, {END}, grammars().matcher(Structured.regex("ab")))
    assert state is not None
    state.sync([4, *tokenizer().encode("z")])
    logits = np.zeros((2, model().vocab_size), np.float32)
    key = RandomKey(0, 0)
    broken, whole = sample(logits, [Row(params, key, 2, state), Row(SamplingParams(), key, 2)])
    assert whole == Sampled(0)
    assert isinstance(broken, ExecutionError)
    assert re.match("structured: the text cannot go on: .*doesn't satisfy the grammar", str(broken))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (Structured.json_schema('{"type":'), "schema that is JSON, got: Expecting value: line 1 column 9"),
        (Structured.json_schema("[1]"), r"schema that is a JSON object, got '\[1\]'"),
        (Structured.json_schema({"type": "objct"}), "json_schema that compiles, got: .*objct"),
        (
            Structured.json_schema({"not": {}}),
            r'json_schema that compiles, got: Unimplemented keys: \["not"\]',
        ),
        (Structured.json_schema({"enum": []}), "json_schema that compiles, got: Unsatisfiable schema"),
        (
            Structured.json_schema({"$ref": "http://a.b/c"}),
            "json_schema that compiles, got: Resource 'http://a.b/c'",
        ),
        (Structured.regex("(a"), r"regex that compiles, got: (.|\n)*unclosed group"),
        (Structured.regex("a(?=b)"), r"regex that compiles, got: (.|\n)*look-ahead"),
        (Structured.grammar("start: foo"), 'grammar that compiles, got: .*unknown name: "foo"'),
        (Structured.grammar('word: "a"'), "grammar that compiles, got: .*no start rule"),
    ],
)
def test_what_cannot_be_met_is_refused_with_what_is_wrong(what: Structured, expected: str) -> None:
    with pytest.raises(RequestError, match=f"structured: expected a {expected}"):
        grammars().matcher(what)


def test_a_grammar_is_compiled_once_and_the_least_used_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "MAX_GRAMMARS", 2)
    own = Grammars(tokenizer(), model())
    compiled: list[str] = []
    grammar = own._grammar

    def counted(what: Structured) -> str:
        compiled.append(what.text)
        return grammar(what)

    monkeypatch.setattr(own, "_grammar", counted)
    for text in "abaacab":
        own.matcher(Structured.regex(text))
    assert compiled == ["a", "b", "c", "b"]


def test_without_a_tokenizer_or_an_end_there_is_no_structure() -> None:
    with pytest.raises(RequestError, match=r"an engine with a tokenizer\.json, got NoneType"):
        Grammars(None, model())
    with pytest.raises(RequestError, match="a model with an end-of-sequence token, got none"):
        Grammars(tokenizer(), model(eos_token_ids=()))


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"'llguidance', .* pip install 'octavo\[structured\]'"):
        Grammars(tokenizer(), model())


def test_a_tokenizer_that_the_library_does_not_know_is_named() -> None:
    words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    with pytest.raises(RequestError, match="expected a tokenizer that llguidance knows, got: "):
        Grammars(FileTokenizer(words.to_str()), model())


def test_the_only_text_that_may_follow_is_known() -> None:
    matcher = grammars().matcher(Structured.json_schema(PERSON))
    forced = matcher.forced()
    assert tokenizer().decode(forced).replace(" ", "").startswith("{")
    matcher = grammars().matcher(Structured.regex("(yes|yellow) indeed"))
    assert tokenizer().decode(matcher.forced()) == "ye"
    matcher.accept(tokenizer().encode("yel"))
    rest = matcher.forced()
    assert tokenizer().decode(rest) == "low indeed"
    for token_id in rest:  # asking changes nothing
        assert matcher.allowed(model().vocab_size)[token_id]
        matcher.accept([token_id])
    assert matcher.forced() in ([], [END])
    state = new_token_state(SamplingParams(), 2, {END}, grammars().matcher(Structured.regex("yes")))
    assert state is not None and tokenizer().decode(state.forced()).startswith("y")
    assert new_token_state(SamplingParams(min_tokens=1), 2).forced() == []  # type: ignore[union-attr]
