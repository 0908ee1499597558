"""The memory plan: nothing that lives overlaps, aliases share a place, and it never costs more."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import LoweredGraph
from torch import fx

from octavo.compiler.dims import is_view, leaves_graph
from octavo.compiler.errors import IllegalGraphError
from octavo.passes.plan_memory import ALIGNMENT, IN_PLACE, MemoryReport, Placement, plan_memory

WIDTHS = (16, 40, 96)


def placements(node: fx.Node) -> tuple[Placement, ...]:
    found = node.meta.get("buffer", ())
    return found if isinstance(found, tuple) else (found,)


def clashes(graph: fx.Graph) -> list[str]:
    """Brute force: run the step on a memory that remembers who wrote each 64 bytes per token last.

    Every reader must find what its argument's node wrote, and an op overwrites an argument only in place.
    """
    writer: dict[int, str] = {}
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
            continue
        for source in node.all_input_nodes:
            for place in placements(source):
                for line in range(place.offset, place.offset + place.width, ALIGNMENT):
                    if writer.get(line) != place.name:
                        found.append(f"{node.name} reads {place.name}, finds {writer.get(line)}")
        own = [
            (place, line)
            for place in placements(node)
            for line in range(place.offset, place.offset + place.width, ALIGNMENT)
        ]
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


def build(choices: list[tuple[int, int, int]]) -> fx.Graph:
    """A random graph: (kind, which value, which other value) per op."""
    g = LoweredGraph()
    ids = g.input("input_ids")
    g.input("logit_rows")
    values = [g.call("embedding", ids, g.weight(f"table_{w}", torch.zeros(3, w))) for w in WIDTHS]
    norms = {w: g.weight(f"norm_{w}", torch.zeros(w)) for w in WIDTHS}

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
        else:
            wide = WIDTHS[second % len(WIDTHS)]
            values.append(g.call("linear", x, g.weight(f"w_{width(x)}_{wide}", torch.zeros(wide, width(x)))))
    picked = g.call("gather_logits", values[-1], g.graph.find_nodes(op="placeholder", target="logit_rows")[0])
    return g.finish(g.call("linear", picked, g.weight("head", torch.zeros(7, width(picked))))).graph


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 30)), max_size=14))
def test_nothing_that_lives_is_overwritten(choices: list[tuple[int, int, int]]) -> None:
    graph = build(choices)
    report = plan_memory(graph)
    assert clashes(graph) == []
    assert report.peak <= report.naive
    ends = [place.offset + place.width for node in graph.nodes for place in placements(node)]
    assert report.peak == max(ends)
    assert all(
        p.offset % ALIGNMENT == p.width % ALIGNMENT == 0 for node in graph.nodes for p in placements(node)
    )


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


def test_rounds_up_to_lines_and_counts_bf16_as_two_bytes() -> None:
    g = LoweredGraph()
    x = g.call("embedding", g.input("input_ids"), g.weight("table", torch.zeros(3, 33, dtype=torch.bfloat16)))
    graph = g.finish(g.call("linear", x, g.weight("head", torch.zeros(7, 33, dtype=torch.bfloat16)))).graph
    assert plan_memory(graph).peak == 128
    assert x.meta["buffer"].width == 128


def test_refuses_a_value_that_does_not_scale_with_tokens() -> None:
    g = LoweredGraph()
    g.input("input_ids")
    caches = [g.cache(name, 1, 16, 8, torch.float32) for name in ("k_cache_0", "v_cache_0")]
    graph = g.finish(g.call("add", g.call("add", *caches), caches[0])).graph
    with pytest.raises(
        IllegalGraphError, match="plan_memory: a value must hold a fixed number of elements per token"
    ):
        plan_memory(graph)
