"""Which formats are chosen under a budget of bits or of KL, and that the KL of all together is kept."""

import itertools
import math
from typing import Any

import pytest
from calibrated import lowered, observed, quantizer, sequences
from stages import SETTINGS

from octavo.compiler.choose_formats import Chosen, average_bits, choose_formats, within_bits, within_kl
from octavo.compiler.errors import OptionError
from octavo.compiler.options import QuantConfig
from octavo.compiler.precision import Format, PrecisionPlan
from octavo.compiler.quality import Distribution, held_out, judge
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.compiler.replay import Replay
from octavo.compiler.sensitivity import Sensitivity
from octavo.passes.assign_precision import Choice

FORMATS: tuple[Format, ...] = ("nvfp4", "fp8", "bf16")


def row(name: str, elements: int, nvfp4: float | None, fp8: float, input: str = "") -> Sensitivity:
    kl: dict[Format, float] = {"fp8": fp8} if nvfp4 is None else {"nvfp4": nvfp4, "fp8": fp8}
    return Sensitivity(name, name, elements, input or name, kl=kl)


ROWS = [
    row("a", 100, 0.8, 0.01),
    row("b", 300, 0.9, 0.02),
    row("c", 200, 0.05, 0.001),
    row("d", 50, 0.3, 0.25),
]


def kl_of(formats: dict[str, Format], rows: list[Sensitivity] = ROWS) -> float:
    return sum(one.kl.get(formats[one.name], 0.0) for one in rows)


def best(bits: float, rows: list[Sensitivity] = ROWS) -> float:
    """The least KL of all ways within the bits."""
    ways = (dict(zip("abcd", way, strict=True)) for way in itertools.product(FORMATS, repeat=4))
    return min(kl_of(way, rows) for way in ways if average_bits(rows, way) <= bits)


@pytest.mark.parametrize("bits", [4.5, 5.0, 5.4, 6.0, 8.0, 10.0, 15.9, 16.0])
def test_bits_are_kept(bits: float) -> None:
    formats = within_bits(ROWS, bits)
    assert average_bits(ROWS, formats) <= bits
    room = (bits - average_bits(ROWS, formats)) * 650
    cheapest = [3.5 * one.elements for one in ROWS if formats[one.name] == "nvfp4"]
    assert not cheapest or room < max(cheapest)


@pytest.mark.parametrize("kl", [2.0, 1.3, 1.0, 0.5, 0.2, 0.05, 0.02, 0.005, 0.0])
def test_no_other_way_of_as_many_bits_loses_less(kl: float) -> None:
    formats = within_kl(ROWS, kl)
    bits = average_bits(ROWS, formats)
    assert kl_of(formats) <= kl + 1e-12 or kl_of(formats) == 0.0
    assert kl_of(formats) == pytest.approx(best(bits), abs=1e-12)
    assert within_bits(ROWS, bits + 1e-9) == formats


def test_the_raise_that_saves_most_a_bit_comes_first() -> None:
    assert within_bits(ROWS, 4.5) == dict.fromkeys("abcd", "nvfp4")
    assert within_bits(ROWS, 5.1) == {"a": "fp8", "b": "nvfp4", "c": "nvfp4", "d": "nvfp4"}
    # d gains little by FP8, so it goes from NVFP4 to BF16 at once
    formats = within_bits(ROWS, 7.6)
    assert (formats["a"], formats["b"], formats["d"]) == ("fp8", "fp8", "bf16")
    assert within_bits(ROWS, 16.0) == dict.fromkeys("abcd", "bf16")


def test_equal_products_are_raised_in_order() -> None:
    twins = [row(name, 10, 0.1, 0.001) for name in "abcd"]
    assert within_bits(twins, 4.5 + 3.5 / 2) == {"a": "fp8", "b": "fp8", "c": "nvfp4", "d": "nvfp4"}


def test_products_of_one_input_share_a_format() -> None:
    pair = [row("q", 10, 0.9, 0.01, "x"), row("k", 10, 0.0, 0.0, "x"), row("o", 10, 0.2, 0.01, "y")]
    assert within_bits(pair, 7.0) == {"q": "fp8", "k": "fp8", "o": "nvfp4"}
    assert within_bits([row("q", 10, None, 0.01, "x"), row("k", 10, 0.1, 0.0, "x")], 8.0) == {
        "q": "fp8",
        "k": "fp8",
    }


def test_too_few_bits_say_the_least() -> None:
    with pytest.raises(OptionError, match=r"bits: expected at least 4\.50, .* got 4"):
        within_bits(ROWS, 4.0)
    with pytest.raises(OptionError, match=r"expected at least 6\.25"):
        within_bits([row("a", 10, None, 0.01), row("b", 10, 0.1, 0.01)], 5.0)


def chosen(**options: Any) -> Chosen:
    config = QuantConfig(**{"mode": "auto", **options})
    return choose_formats(lowered(), config, observed(), quantizer, sequences(), SETTINGS.page_size)


def test_a_budget_of_bits_needs_no_trial() -> None:
    found = chosen(bits=6.0)
    assert found.bits == average_bits(found.rows, {n: c.format for n, c in found.choices.items()}) <= 6.0
    assert found.tries == () and len(found.choices) == 8
    assert {choice.format for choice in found.choices.values()} == {"nvfp4", "fp8"}
    assert all(choice.reason.startswith("auto: alone costs ") for choice in found.choices.values())


def test_inputs_may_stay_as_they_are() -> None:
    """At the same bits that is closer to the model: by the sum of what was measured of each product."""
    both, weights = chosen(bits=6.0), chosen(mode="auto_weight_only", bits=6.0)
    assert {choice.format for choice in weights.choices.values()} == {"nvfp4_weight_only", "fp8"}
    lost = [sum(row.kl[found.choices[row.name].format] for row in found.rows) for found in (both, weights)]
    assert lost[1] < 0.8 * lost[0] and weights.bits <= 6.0
    exact = [row.sqnr_input["nvfp4_weight_only"] for row in weights.rows]
    assert exact == [math.inf] * len(exact)


def test_formats_are_raised_until_the_measured_kl_is_within_the_budget() -> None:
    most = choose_formats_kl(dict.fromkeys(chosen().choices, "nvfp4"))
    found = chosen(kl=0.3 * most)
    assert found.tries[-1] <= 0.3 * most
    assert found.tries[-1] == pytest.approx(
        choose_formats_kl({n: c.format for n, c in found.choices.items()}), rel=1e-2
    )
    assert 4.5 < found.bits < 12
    assert all(kl > 0.29 * most for kl in found.tries[:-1])


def choose_formats_kl(formats: dict[str, Format], kv: Any = "bf16") -> float:
    """Of the graph that the passes make, on held-out tokens."""
    graph_module = lowered()
    pieces = held_out(sequences())
    reference = Distribution(Replay(graph_module, pieces, SETTINGS.page_size).reference())
    choices = {name: Choice(format, "") for name, format in formats.items()}
    settings = QuantSettings(
        PrecisionPlan(),
        quantizer,
        "linear",
        config=QuantConfig("auto", kv=kv),
        observed=observed(),
        choices=choices,
    )
    quantize(graph_module, settings)
    return judge(reference, graph_module, pieces, SETTINGS.page_size).kl


@pytest.mark.parametrize("kv", ["fp8", "nvfp4"])
def test_pages_count_and_an_error_says_how_far_it_got(kv: Any) -> None:
    alone = choose_formats_kl(dict.fromkeys(chosen().choices, "bf16"), kv)
    assert alone > 1e-6
    with pytest.raises(OptionError, match=rf"got {alone:.3g} with 16\.00 bits.*kv=\"bf16\""):
        chosen(kl=0.5 * alone, kv=kv)
    assert chosen(kl=1.5 * alone + 1e-3, kv=kv).tries
