import math
from typing import Any

import pytest

from octavo.compiler.errors import RequestError
from octavo.runtime.sampling_params import SamplingParams, Structured


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", 0, "a whole number of 1 or more"),
        ("max_tokens", 1.5, "a whole number of 1 or more"),
        ("max_tokens", True, "a whole number of 1 or more"),
        ("temperature", -0.1, "a number of 0 or more"),
        ("temperature", math.nan, "a number of 0 or more"),
        ("temperature", math.inf, "a number of 0 or more"),
        ("temperature", "hot", "a number of 0 or more"),
        ("top_k", -1, "a whole number of 0 or more"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "a number of 0 to 1"),
        ("min_p", -0.5, "a number of 0 to 1"),
        ("min_p", math.nan, "a number of 0 to 1"),
        ("seed", -1, r"a whole number of 0 to 18446744073709551615"),
        ("seed", 2**64, r"a whole number of 0 to 18446744073709551615"),
        ("stop_token_ids", (-1,), "a whole number of 0 or more"),
        ("stop", ("",), "strings of 1 to 1024 characters"),
        ("stop", (3,), "strings of 1 to 1024 characters"),
        ("stop", ("x",) * 65, "at most 64 strings, got 65"),
        ("n", 0, "a whole number of 1 or more"),
        ("best_of", 0, "None or a whole number of n=1 or more, got 0"),
        ("beam_width", 2.0, "None or a whole number of n=1 or more, got 2.0"),
        ("length_penalty", math.inf, "a number of any finite size"),
        ("length_penalty", 2, "its default without beam search; set beam_width"),
        ("early_stopping", "often", "False, True or \"never\", got 'often'"),
        ("early_stopping", "never", "its default without beam search; set beam_width"),
        ("min_tokens", -1, "a whole number of 0 or more"),
        ("presence_penalty", 2.1, "a number of -2 to 2"),
        ("frequency_penalty", -2.1, "a number of -2 to 2"),
        ("repetition_penalty", 0, "above 0, got 0"),
        ("repetition_penalty", -1, "a number of 0 or more"),
        ("repetition_penalty", math.inf, "a number of 0 or more"),
        ("logit_bias", {-1: 0}, "a whole number of 0 or more, got -1"),
        ("logit_bias", {"1": 0}, "a whole number of 0 or more, got '1'"),
        ("logit_bias", 3, "a mapping of token id to number, got 3"),
        ("logit_bias", ((1, 2), (1, 3)), "each token id once"),
        ("logprobs", 21, "a whole number of 0 to 20"),
        ("logprobs", True, "a whole number of 0 to 20"),
        ("prompt_logprobs", -1, "a whole number of 0 to 20"),
        ("structured", {"type": "object"}, "a Structured, got"),
    ],
)
def test_values_out_of_range_are_refused_with_the_field_s_name(field: str, value: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=f"{field}: expected {expected}"):
        SamplingParams(**{field: value})


def test_a_stop_string_may_be_given_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert hash(SamplingParams(stop_token_ids=[3])) == hash(SamplingParams(stop_token_ids=(3,)))  # type: ignore[arg-type]


def test_a_bias_is_kept_as_sorted_pairs_so_that_parameters_stay_hashable() -> None:
    params = SamplingParams(logit_bias={7: -100, 2: 0.5})
    assert params.logit_bias == ((2, 0.5), (7, -100.0))
    assert hash(params) == hash(SamplingParams(logit_bias=((7, -100.0), (2, 0.5))))
    with pytest.raises(
        RequestError, match="logit_bias of token 7: expected a number of -100 to 100, got 101"
    ):
        SamplingParams(logit_bias={7: 101})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 2}, "n: expected 1 with temperature=0.*got 2; set temperature above 0, or beam_width"),
        ({"best_of": 3}, "best_of: expected 1 with temperature=0.*got 3"),
        (
            {"n": 3, "best_of": 2, "temperature": 1},
            "best_of: expected None or a whole number of n=3 or more, got 2",
        ),
        ({"n": 3, "beam_width": 2}, "beam_width: expected None or a whole number of n=3 or more, got 2"),
        ({"best_of": 2, "beam_width": 2}, "best_of: expected None with beam_width"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens: expected a whole number of 0 to 3, got 4"),
        ({"structured": Structured.json(), "min_tokens": 4}, "min_tokens: expected 0 with structured, got 4"),
        ({"structured": Structured.json(), "ignore_eos": True}, "ignore_eos: expected False with structured"),
    ],
)
def test_what_makes_no_sense_together_is_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        SamplingParams(**fields)


def test_branches_are_beams_or_samples_or_answers() -> None:
    assert SamplingParams().num_branches == 1
    assert SamplingParams(n=2, temperature=1).num_branches == 2
    assert SamplingParams(n=2, best_of=5, temperature=1).num_branches == 5
    assert SamplingParams(n=2, beam_width=4).num_branches == 4
    beams = SamplingParams(n=2, beam_width=4, temperature=1, length_penalty=-0.5, early_stopping="never")
    assert beams.num_branches == 4


def test_what_a_text_must_be_is_checked_for_form() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    assert Structured.json_schema(schema) == Structured.json_schema(
        '{"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}'
    )
    assert hash(SamplingParams(structured=Structured.regex("a+"))) == hash(
        SamplingParams(structured=Structured("regex", "a+"))
    )
    with pytest.raises(RequestError, match=r"expected a schema that is JSON, got: .*set is not JSON"):
        Structured.json_schema({"enum": {1}})
    with pytest.raises(RequestError, match="expected a text for all kinds but json"):
        Structured.regex("")
    with pytest.raises(RequestError, match="expected a text of at most 1048576 characters, got 1048577"):
        Structured.grammar("x" * 1048577)
    with pytest.raises(
        RequestError, match="expected the kind json, json_schema, regex or grammar, got 'xml'"
    ):
        Structured("xml")  # type: ignore[arg-type]


def test_ids_that_the_model_does_not_have_are_refused() -> None:
    SamplingParams(stop_token_ids=(9,), logit_bias={9: 1}).check_ids(10)
    with pytest.raises(RequestError, match="stop_token_ids: expected ids below 10, got 10"):
        SamplingParams(stop_token_ids=(9, 10)).check_ids(10)
    with pytest.raises(RequestError, match="logit_bias: expected ids below 10, got 11"):
        SamplingParams(logit_bias={9: 1, 11: 1}).check_ids(10)
