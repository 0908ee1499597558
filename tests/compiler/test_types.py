"""What becomes of a type when its value is reshaped, cut, joined, sharded or turned, and what is refused."""

from dataclasses import replace

import pytest

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.types import (
    FP8,
    NVFP4,
    Part,
    Plain,
    concat,
    cut,
    part_from_text,
    reshape,
    shard,
    transpose,
)

WEIGHT = NVFP4((1856, 2880), e4m3_max=256.0)
SWIZZLED = replace(WEIGHT, layout="swizzled_128x4")
BY_ROW = replace(WEIGHT, outer="row")


def refused(said: str):  # type: ignore[no-untyped-def]
    return pytest.raises(IllegalGraphError, match=said)


def test_reshape_keeps_blocks_whole() -> None:
    assert reshape(NVFP4((7, 64)), (7, 2, 32)) == NVFP4((7, 2, 32))
    assert reshape(NVFP4((1, 7, 2, 32), outer="row"), (7, 2, 32)) == NVFP4((7, 2, 32), outer="row")
    assert reshape(FP8((7, 64)), (7, 8, 8)) == FP8((7, 8, 8))
    assert reshape(Plain("bf16", (7, 64)), (7, 8, 8)) == Plain("bf16", (7, 8, 8))
    with refused("a last axis of 8 cuts blocks of 16"):
        reshape(NVFP4((7, 64)), (7, 8, 8))
    with refused(r"nvfp4\[7, 64\] .* cannot become \[7, 2, 32\]: its rows have outer scales of their own"):
        reshape(NVFP4((7, 64), outer="row"), (7, 2, 32))
    with refused("outer scales of their own"):
        reshape(FP8((7, 64), "token"), (7, 2, 32))
    with refused("swizzled scales cannot be reshaped"):
        reshape(NVFP4((7, 64), layout="swizzled_128x4"), (7, 2, 32))
    with refused("turn its blocks to the last axis first"):
        reshape(NVFP4((64, 7), axis=-2), (2, 32, 7))


def test_rows_of_swizzled_scales_may_be_counted_otherwise() -> None:
    assert reshape(replace(SWIZZLED, shape=(1, 7, 64)), (7, 64)).shape == (7, 64)


@pytest.mark.parametrize(
    ("kind", "axis", "start", "stop", "edge"),
    [
        (WEIGHT, -1, 0, 232, "232 .*multiple of 16"), (WEIGHT, -1, 8, 32, "8 .*multiple of 16"),
        (SWIZZLED, -2, 0, 64, "64 .*multiple of 128"), (SWIZZLED, -1, 0, 16, "16 .*multiple of 64"),
    ],
)  # fmt: skip
def test_cuts_between_edges_are_refused(kind: NVFP4, axis: int, start: int, stop: int, edge: str) -> None:
    with refused(f"cut at {edge}"):
        cut(kind, axis, start, stop)


def test_cuts_on_edges() -> None:
    assert cut(WEIGHT, -1, 16, 48).shape == (1856, 32)
    assert cut(WEIGHT, -2, 3, 5).shape == (2, 2880)
    assert cut(SWIZZLED, -2, 128, 1856).shape == (1728, 2880)  # the end of an axis is an edge
    assert cut(FP8((8, 8), "row"), -1, 1, 3) == FP8((8, 2), "row")


def test_joins_want_one_format() -> None:
    assert concat([WEIGHT, WEIGHT], -2, same_outer=True) == replace(WEIGHT, shape=(3712, 2880))
    assert concat([WEIGHT, BY_ROW], -2, same_outer=False) == replace(BY_ROW, shape=(3712, 2880))
    assert concat([FP8((2, 16)), FP8((3, 16))], -2, same_outer=False) == FP8((5, 16), "row")
    for other in (
        replace(WEIGHT, recipe="modelopt"), replace(WEIGHT, e4m3_max=448.0), SWIZZLED, FP8((1856, 2880)),
        replace(WEIGHT, axis=-2),
    ):  # fmt: skip
        with refused("cannot be joined: expected one format on all"):
            concat([WEIGHT, other], -2, same_outer=True)
    with refused("a sum over it has one alpha a row"):
        concat([WEIGHT, WEIGHT], -1, same_outer=False)
    with refused("followed by another: expected a multiple of 128"):
        concat([replace(SWIZZLED, shape=(64, 2880)), SWIZZLED], -2, same_outer=True)


def test_shards_end_at_blocks() -> None:
    assert shard(WEIGHT, -2, 8).shape == (232, 2880)  # rows have no blocks
    assert shard(WEIGHT, -1, 4).shape == (1856, 720)
    narrow = NVFP4((2880, 1856))
    with refused(
        r"8 ways along axis -1: 1856 / 8 = 232, expected a multiple of 16; shard over 4, or pad the axis to 1920"
    ):
        shard(narrow, -1, 8)
    assert shard(narrow, -1, 4).shape == (2880, 464)
    with refused("1856 / 4 = 464, expected a multiple of 64; shard over 1, or pad the axis to 2048"):
        shard(replace(narrow, layout="swizzled_128x4"), -1, 4)
    with refused("232, expected a multiple of 128"):
        shard(SWIZZLED, -2, 8)


def test_turning_moves_blocks_and_outer_scales() -> None:
    turned = transpose(BY_ROW, -2, -1)
    assert turned == replace(BY_ROW, shape=(2880, 1856), axis=-2, outer="column")
    assert transpose(turned, -1, -2) == BY_ROW
    assert transpose(NVFP4((2, 3, 16)), -3, -2) == NVFP4((3, 2, 16))
    assert transpose(FP8((2, 3)), -1, -2) == FP8((3, 2))
    with refused("scales are swizzled"):
        transpose(SWIZZLED, -1, -2)
    with refused("outer scales belong to rows"):
        transpose(FP8((2, 3), "row"), -1, -2)
    with refused("between the last two axes only"):
        transpose(NVFP4((2, 3, 16)), -3, -1)


@pytest.mark.parametrize(
    "part",
    [
        Part(replace(WEIGHT, layout="swizzled_128x4", outer="row"), "codes", "model.layers.0.qkv"),
        Part(replace(WEIGHT, recipe="modelopt", axis=-2), "alpha", "a.b", "input_scales.s0"),
        Part(FP8((4, 16), "row"), "outer", "pages 3"),
    ],
)
def test_text_of_a_part_is_read_back(part: Part) -> None:
    assert part_from_text(str(part)) == part


def test_other_text_is_refused() -> None:
    with refused("is no part of a quantised value such as"):
        part_from_text("codes of a: nvfp5[4, 16]")
