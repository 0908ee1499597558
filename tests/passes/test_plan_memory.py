"""The memory plan: nothing that lives overlaps, aliases share a place, and it never costs more."""

import operator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lowered import LoweredGraph
from torch import fx

from octavo.compiler.dims import dim_names, is_view, leaves_graph, to_dim
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.expression import evaluate
from octavo.passes.plan_memory import (
    ALIGNMENT,
    IN_PLACE,
    MemoryReport,
    Placement,
    Size,
    _place,
    _Value,
    plan_memory,
)

WIDTHS = (16, 40, 96)
LENGTHS = (1, 37)


def placements(node: fx.Node) -> tuple[Placement, ...]:
    found = node.meta.get("buffer", ())
    return found if isinstance(found, tuple) else (found,)


def at(size: Size, num_tokens: int) -> int:
    return evaluate(size.text, {"T": num_tokens})


def lines(place: Placement, num_tokens: int) -> range:
    """Where the 64 bytes begin that the value has in a step of so many tokens."""
    start = at(place.offset, num_tokens)
    return range(start, start + at(place.width, num_tokens), ALIGNMENT)


def clashes(graph: fx.Graph, num_tokens: int = 1) -> list[str]:
    """Brute force: run the step on a memory that remembers who wrote each 64 bytes last.

    Every reader must find what its argument's node wrote, and an op overwrites an argument only in place.
    """
    writer: dict[int, str] = {}
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
            continue
        for source in node.all_input_nodes:
            for place in placements(source):
                for line in lines(place, num_tokens):
                    if writer.get(line) != place.name:
                        found.append(f"{node.name} reads {place.name}, finds {writer.get(line)}")
        own = [(place, line) for place in placements(node) for line in lines(place, num_tokens)]
        if len({line for _, line in own}) != len(own):
            found.append(f"results of {node.name} overlap")
        allowed = (
            {
                place.name
                for result, arguments in IN_PLACE.get(node.target, {}).items()
                for position in arguments
                for place in placements(node.args[position])
                if (place.offset, place.width)
                == (placements(node)[result].offset, placements(node)[result].width)
            }
            if placements(node)
            else set()
        )
        read = {place.name for source in node.all_input_nodes for place in placements(source)}
        for place, line in own:
            if writer.get(line) in read - allowed:
                found.append(f"{node.name} overwrites its argument {writer[line]}")
            writer[line] = place.name
    return found


def quantized(g: LoweredGraph, x: fx.Node, norm: fx.Node, variant: int) -> list[fx.Node]:
    """Codes and scales of x, with outer scales of its rows or without; of a norm the sum, too."""
    outer = None if variant % 2 else g.weight("outer", torch.ones(1))
    if variant % 4 < 2:
        parts = g.call("quantize", x, outer, "nvfp4", "swizzled_128x4")
    else:
        parts = g.call("add_rms_norm_quantize", x, x, norm, 1e-5, 0.0, outer, "nvfp4", "swizzled_128x4")
    return [g.function(operator.getitem, parts, i) for i in range(len(parts.meta["val"]))]


def build(choices: list[tuple[int, int, int]]) -> fx.Graph:
    """A random graph: (kind, which value, which other value) per op."""
    g = LoweredGraph()
    ids = g.input("input_ids")
    g.input("logit_rows")
    values = [g.call("embedding", ids, g.weight(f"table_{w}", torch.zeros(3, w))) for w in WIDTHS]
    norms = {w: g.weight(f"norm_{w}", torch.zeros(w)) for w in WIDTHS}
    pairs: list[list[fx.Node]] = []

    def width(node: fx.Node) -> int:
        return int(node.meta["val"].shape[-1])

    for kind, first, second in choices:
        x = values[first % len(values)]
        alike = [v for v in values if v.meta["val"].shape == x.meta["val"].shape]
        y = alike[second % len(alike)]
        if kind == 0:
            values.append(g.call("add", x, y))
        elif kind == 1:
            both = g.call("add_rms_norm", x, y, norms[width(x)], 1e-5)
            values += [g.function(operator.getitem, both, i) for i in range(1 + second % 2)]
        elif kind == 2:
            values.append(g.function(torch.ops.aten.view.default, x, [1, -1, width(x)]))
        elif kind == 4 and width(x) % 16 == 0:
            parts = quantized(g, x, norms[width(x)], second)
            pairs.append(parts[:2])
            values += parts[2:] if second % 4 == 2 else []
        elif kind == 5 and pairs:
            codes, scales = pairs[first % len(pairs)]
            k = 2 * width(codes)
            tensors = [torch.zeros(40, k // 2, dtype=torch.uint8), torch.zeros(512 * -(-k // 64)).float()]
            weight, weight_scale = (g.weight(f"q{i}_{k}", tensor) for i, tensor in enumerate(tensors))
            alpha = g.weight("alpha", torch.ones(1))
            product = (codes, scales, weight, weight_scale, alpha, None, None, "fp32", "swizzled_128x4")
            values.append(g.call("nvfp4_linear", *product))
        else:
            wide = WIDTHS[second % len(WIDTHS)]
            values.append(g.call("linear", x, g.weight(f"w_{width(x)}_{wide}", torch.zeros(wide, width(x)))))
    picked = g.call("gather_logits", values[-1], g.graph.find_nodes(op="placeholder", target="logit_rows")[0])
    return g.finish(g.call("linear", picked, g.weight("head", torch.zeros(7, width(picked))))).graph


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(0, 30)), max_size=14))
def test_nothing_that_lives_is_overwritten(choices: list[tuple[int, int, int]]) -> None:
    graph = build(choices)
    report = plan_memory(graph)
    for num_tokens in LENGTHS:
        assert clashes(graph, num_tokens) == []
    assert report.peak <= report.naive
    places = [place for node in graph.nodes for place in placements(node)]
    ends = [place.offset + place.width for place in places]
    assert report.workspace == Size(max(end.per_token for end in ends), max(end.fixed for end in ends))
    numbers = [number for place in places for size in (place.offset, place.width) for number in size.order]
    assert all(number >= 0 and number % ALIGNMENT == 0 for number in numbers)


WIDE = st.builds(lambda tokens, rows: Size(64 * tokens, 64 * rows), st.integers(1, 4), st.integers(0, 3))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(WIDE, st.integers(0, 9), st.integers(0, 3)), max_size=12))
# what lies behind the gap in the order of offsets reaches below it in steps of no token
@example(
    [
        (Size(128, 64), 0, 4),
        (Size(256, 320), 3, 0),
        (Size(384), 6, 4),
        (Size(64, 192), 4, 1),
        (Size(192), 5, 3),
        (Size(256, 320), 0, 0),
    ]
)
def test_values_that_live_at_once_are_apart_for_every_number_of_tokens(
    choices: list[tuple[Size, int, int]],
) -> None:
    values = [_Value(f"v{i}", width, first, first + life) for i, (width, first, life) in enumerate(choices)]
    peak = _place(values)
    for index, value in enumerate(values):
        assert peak.has_room_for(value.end)
        for other in values[:index]:
            is_apart = value.offset.has_room_for(other.end) or other.offset.has_room_for(value.end)
            assert is_apart or not value.overlaps(other), (value, other)


def test_the_check_sees_a_clash() -> None:
    graph = build([(3, 0, 1), (0, 0, 0)])
    plan_memory(graph)
    node = next(node for node in graph.nodes if node.target == torch.ops.octavo.linear.default)
    victim = graph.find_nodes(op="call_function", target=torch.ops.octavo.embedding.default)[0].meta["buffer"]
    node.meta["buffer"] = Placement(node.name, victim.offset, victim.width)
    assert clashes(graph)


def test_views_and_items_share_memory() -> None:
    g = LoweredGraph()
    ids = g.input("input_ids")
    x = g.call("embedding", ids, g.weight("table", torch.zeros(3, 96)))
    seen = g.function(torch.ops.aten.view.default, x, [1, -1, 6, 16])
    again = g.function(torch.ops.aten.reshape.default, seen, [1, -1, 96])
    both = g.call("add_rms_norm", again, again, g.weight("norm", torch.zeros(96)), 1e-5)
    items = [g.function(operator.getitem, both, i) for i in range(2)]
    logits = g.call("linear", g.call("add", *items), g.weight("head", torch.zeros(7, 96)))
    shown = g.function(torch.ops.aten.view.default, logits, [1, -1, 7])
    plan_memory(g.finish(shown).graph)
    assert x.meta["buffer"] == seen.meta["buffer"] == again.meta["buffer"]
    assert tuple(item.meta["buffer"] for item in items) == both.meta["buffer"]
    assert leaves_graph(logits) and "buffer" not in logits.meta and "buffer" not in shown.meta


def test_numbers_of_experts_are_there_until_the_next_collective() -> None:
    g = LoweredGraph()
    x = g.call("embedding", g.input("input_ids"), g.weight("table", torch.zeros(3, 96)))
    routed = g.call(
        "router",
        g.call("linear", x, g.weight("gate", torch.zeros(8, 96))),
        None,
        6,
        "softmax",
        False,
        1,
        1,
        "max",
        1.0,
    )
    weights, experts = (g.function(operator.getitem, routed, i) for i in range(2))
    local = g.call("map_experts", experts, g.weight("places", torch.zeros(8, dtype=torch.int64)))
    given = [g.weight("up", torch.zeros(4, 64, 96)), None, g.weight("down", torch.zeros(4, 96, 32)), None]
    part = g.call("moe", x, local, weights, *given, "silu", 0.0, 0.0)
    later = [g.call("linear", part, g.weight(f"w{i}", torch.zeros(12, 96))) for i in range(12)]
    total = later[0]
    for each in later[1:]:  # all of them live at once, each as large as the numbers
        total = g.call("add", total, each)
    whole = g.call("all_reduce", total, "ep")
    plan_memory(g.finish(g.call("linear", whole, g.weight("head", torch.zeros(7, 12)))).graph)
    for node in later:
        assert set(lines(placements(local)[0], 3)).isdisjoint(lines(placements(node)[0], 3)), node


def layers(count: int) -> fx.Graph:
    """Residual blocks: their memory must not grow with their number."""
    g = LoweredGraph()
    total = x = g.call("embedding", g.input("input_ids"), g.weight("table", torch.zeros(3, 96)))
    for i in range(count):
        wide = g.call("linear", x, g.weight(f"up_{i}", torch.zeros(320, 96)))
        x = g.call("linear", g.call("act_mul", wide, "silu"), g.weight(f"down_{i}", torch.zeros(96, 160)))
        both = g.call("add_rms_norm", x, total, g.weight(f"norm_{i}", torch.zeros(96)), 1e-5)
        x, total = (g.function(operator.getitem, both, i) for i in range(2))
    return g.finish(g.call("linear", x, g.weight("head", torch.zeros(7, 96)))).graph


def test_memory_does_not_grow_with_layers() -> None:
    few, many = plan_memory(layers(2)), plan_memory(layers(9))
    assert few.peak == many.peak < few.naive < many.naive
    # The widest moment: the residual stream, gate and up, and their product.
    assert many.peak == 4 * (96 + 320 + 160)


def test_residual_stream_stays_in_place() -> None:
    graph = layers(3)
    report = plan_memory(graph)
    sums = [placements(n)[1] for n in graph.nodes if n.target == torch.ops.octavo.add_rms_norm.default]
    assert report.in_place == len(sums) == 3
    assert isinstance(report, MemoryReport) and report.values == 1 + 3 * 5


def test_where_everything_is_sized_by_tokens_the_plan_is_one_of_whole_numbers() -> None:
    graph = layers(2)
    report = plan_memory(graph)
    assert (report.peak, report.naive, report.fixed) == (2304, 6528, 0)
    found = {place.name: place.offset.text for node in graph.nodes for place in placements(node)}
    assert list(found.values()) == [
        "1920 * T", "0 * T", "1280 * T", "0 * T", "1280 * T", "1920 * T", "0 * T", "1280 * T", "0 * T", "384 * T",
        "1920 * T",
    ]  # fmt: skip


@pytest.mark.parametrize("rows", ["T", "L"])
def test_scales_in_tiles_have_the_memory_that_their_last_tile_needs(rows: str) -> None:
    """40 blocks of a row lie in 10 tiles across; every 128 rows have 5120 bytes."""
    g = LoweredGraph()
    ids, picked = g.input("input_ids"), g.input("logit_rows")
    x = g.call("embedding", ids, g.weight("table", torch.zeros(3, 640)))
    x = x if rows == "T" else g.call("gather_logits", x, picked)
    parts = g.call("quantize", x, None, "nvfp4", "swizzled_128x4")
    g.finish(g.call("add", *[g.function(operator.getitem, parts, 2)] * 2))
    report = plan_memory(g.graph)
    codes, scales, outer = placements(parts)
    assert (codes.width, outer.width) == (Size(320), Size(64))
    assert scales.width == Size(64, 5120), "40 bytes a row, and those of 127 rows, both in whole lines"
    (size,) = parts.meta["val"][1].shape
    for count in (*range(1, 300), 1024, 1025):
        written = evaluate(to_dim(size, dim_names(g.graph)), {rows: count})
        assert written == -(-count // 128) * 5120 <= at(scales.width, count)
    assert report.workspace == Size(report.peak, 5120)
    assert all(clashes(g.graph, num_tokens) == [] for num_tokens in LENGTHS)


def test_a_value_lies_above_another_in_steps_of_any_size() -> None:
    """Neither of two offsets need be the lower one in all steps: 64 * T + 5120 and 320 * T, say."""
    assert not Size(64, 5120).has_room_for(Size(320)) and not Size(320).has_room_for(Size(64, 5120))
    assert Size(320, 5120).has_room_for(Size(320)) and Size(320).has_room_for(Size(320))
    assert (Size(64).text, Size(64, 5120).text) == ("64 * T", "64 * T + 5120")


def test_the_sum_that_a_quantising_norm_makes_stays_in_place() -> None:
    for outer in (True, False):
        g = LoweredGraph()
        total = x = g.call("embedding", g.input("input_ids"), g.weight("table", torch.zeros(3, 64)))
        for i in range(3):
            scale = g.weight("outer", torch.ones(1)) if outer else None
            norm = (g.weight(f"norm_{i}", torch.zeros(64)), 1e-5, 0.0, scale, "nvfp4", "swizzled_128x4")
            parts = g.call("add_rms_norm_quantize", x, total, *norm)
            *_, total = (g.function(operator.getitem, parts, i) for i in range(3 if outer else 4))
            x = g.call("linear", total, g.weight(f"w_{i}", torch.zeros(64, 64)))
        graph = g.finish(g.call("linear", x, g.weight("head", torch.zeros(7, 64)))).graph
        assert plan_memory(graph).in_place == 3
        assert all(clashes(graph, num_tokens) == [] for num_tokens in LENGTHS)


def test_rounds_up_to_lines_and_counts_bf16_as_two_bytes() -> None:
    g = LoweredGraph()
    x = g.call("embedding", g.input("input_ids"), g.weight("table", torch.zeros(3, 33, dtype=torch.bfloat16)))
    graph = g.finish(g.call("linear", x, g.weight("head", torch.zeros(7, 33, dtype=torch.bfloat16)))).graph
    assert plan_memory(graph).peak == 128
    assert x.meta["buffer"].width == Size(128)


def test_refuses_a_value_that_does_not_scale_with_tokens() -> None:
    g = LoweredGraph()
    g.input("input_ids")
    caches = [g.cache(name, 1, 16, 8, torch.float32) for name in ("k_cache_0", "v_cache_0")]
    graph = g.finish(g.call("add", g.call("add", *caches), caches[0])).graph
    with pytest.raises(
        IllegalGraphError, match="plan_memory: a value must hold a fixed number of elements per token"
    ):
        plan_memory(graph)
