"""Fresh inputs: right shapes and ranges, rows that tell, and step inputs as the runtime would give them."""

import torch
from lowered import LoweredGraph
from stages import BF16, FP32
from torch import fx

from octavo.compiler.fresh_inputs import LARGE, Chunk, fresh_inputs, page_size_of, random_floats, step_inputs
from octavo.passes.pattern import aten

CHUNKS = [Chunk(0, 2, 3), Chunk(2, 0, 6)]


def inputs_of(graph: LoweredGraph, *results: fx.Node, tokens: int = 5) -> dict[str, torch.Tensor]:
    """Fresh inputs by name; weights are made inputs first, as in a site."""
    graph_module = graph.finish(*results)
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr":
            node.op, node.target = "placeholder", node.name
    names = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    values = fresh_inputs(graph_module, tuple(n.meta["val"] for n in names), tokens, 0)
    return {n.name: value for n, value in zip(names, values, strict=True)}


def test_a_step_belongs_together() -> None:
    step = step_inputs(CHUNKS, 4, 3, torch.Generator().manual_seed(0), 12)
    t = step.tensors
    assert t["positions"].tolist() == [[2, 3, 4, 0, 1, 2, 3, 4, 5]]
    assert (t["seq_lens"].tolist(), t["cu_seqlens_q"].tolist()) == ([5, 6], [0, 3, 9])
    assert t["logit_rows"].tolist() == [2, 8]
    pages, rows = t["slot_mapping"] // 4, t["slot_mapping"] % 4
    owner = [0, 0, 0, 1, 1, 1, 1, 1, 1]
    for token, position in enumerate(t["positions"][0].tolist()):
        assert pages[token] == t["page_table"][owner[token], position // 4]
        assert rows[token] == position % 4


def test_pages_are_nobody_elses_and_never_the_null_page() -> None:
    step = step_inputs([Chunk(i, 0, 4) for i in range(3)], 4, 3, torch.Generator().manual_seed(0), 12)
    pages = step.tensors["page_table"].flatten().tolist()
    assert sorted(pages) == list(range(1, 10))
    assert pages != sorted(pages)
    assert step.num_pages == 10


def test_groups_have_pages_of_their_own_but_for_those_behind_their_window() -> None:
    chunks = [Chunk(0, 9, 2), Chunk(1, 8, 1)]
    step = step_inputs(chunks, 4, 2, torch.Generator().manual_seed(0), 12, (None, 6, 5))
    tables = [step.tensors[name] for name in ("page_table", "page_table_1", "page_table_2")]
    pages = torch.cat([table.flatten() for table in tables])
    assert sorted(pages[pages > 0].tolist()) == sorted(set(pages[pages > 0].tolist()))
    # token 9 sees 4 to 9 or 5 to 9, token 8 sees 3 to 8 or 4 to 8
    empty = [(table == 0).tolist() for table in tables]
    assert empty[0] == [[False] * 3] * 2
    assert empty[1] == [[True, False, False], [False] * 3]
    assert empty[2] == [[True, False, False]] * 2
    assert step.num_pages == 19
    for table, name in zip(tables, ("slot_mapping", "slot_mapping_1", "slot_mapping_2"), strict=True):
        assert (step.tensors[name] // 4).tolist() == [table[0, 2], table[0, 2], table[1, 2]]


def test_floats_have_small_rows_and_weights_their_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    x = random_floats([1, 5, 64], BF16, generator)
    assert x.dtype is BF16
    assert x[0, 1].abs().max() < 1e-2 < x[0, 0].abs().max()
    assert 0.5 < random_floats([64, 256], FP32, generator).std() * 16 < 2


def test_equal_symbols_get_equal_sizes_and_caches_their_pages() -> None:
    g = LoweredGraph()
    x, y, slots = g.tokens("x", (8,), FP32), g.tokens("y", (8,), FP32), g.input("slot_mapping")
    cache = g.cache("k_cache_0", 2, 4, 16, FP32)
    values = inputs_of(g, x, y, slots, cache, tokens=11)
    assert values["x"].shape == values["y"].shape == (1, 11, 8)
    assert values["slot_mapping"].shape == (11,)
    assert values["slot_mapping"].max() < values["k_cache_0"].shape[0] * 4


def test_captured_positions_count_from_zero_and_ids_stay_in_their_table() -> None:
    g = LoweredGraph()
    positions = g.placeholder("position_ids", torch.zeros(1, 11, dtype=torch.int64), [1])
    ids = g.placeholder("ids", torch.zeros(1, 11, dtype=torch.int64), [1])
    rows = g.call("embedding", ids, g.weight("table", torch.zeros(3, 16)))
    values = inputs_of(g, rows, positions)
    assert values["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert values["ids"].max() < 3


def test_a_large_vocabulary_is_cut_where_nothing_else_depends_on_it() -> None:
    g = LoweredGraph()
    ids = g.placeholder("ids", torch.zeros(1, 11, dtype=torch.int64), [1])
    table = g.weight("table", torch.zeros(5000, 16))
    head = g.weight("head", torch.zeros(6000, 16))
    x = g.call("embedding", ids, table)
    values = inputs_of(g, g.call("linear", x, head))
    assert (values["table"].shape, values["head"].shape) == ((LARGE, 16), (LARGE, 16))


def test_a_weight_with_a_bias_or_other_readers_keeps_its_rows() -> None:
    g = LoweredGraph()
    x, head = g.tokens("x", (16,), FP32), g.weight("head", torch.zeros(600, 16))
    values = inputs_of(g, g.call("linear", x, head, g.weight("bias", torch.zeros(600))))
    assert values["head"].shape == (600, 16)
    g = LoweredGraph()
    x, head = g.tokens("x", (16,), FP32), g.weight("head", torch.zeros(600, 16))
    product = g.call("linear", x, head)
    values = inputs_of(g, g.function(aten.mul.Tensor, product, g.weight("scale", torch.zeros(600))))
    assert values["head"].shape == (600, 16)


def test_constants_keep_their_values() -> None:
    g = LoweredGraph()
    graph_module = g.finish(g.tokens("x", (8,), FP32))
    given = torch.full((1, 2, 8), 3.0)
    examples = (next(iter(graph_module.graph.nodes)).meta["val"],)
    assert fresh_inputs(graph_module, examples, 5, 0, {"x": given})[0] is given


def test_complex_inputs_have_two_random_parts() -> None:
    graph = LoweredGraph()
    table = graph.tokens("table", (8,), torch.complex64)
    graph_module = graph.finish(graph.function(torch.ops.aten.view_as_real.default, table))
    (value,) = fresh_inputs(graph_module, (table.meta["val"],), 5, 0)
    assert (value.dtype, value.shape) == (torch.complex64, (1, 5, 8))
    assert value.real.std() > 0.5 and value.imag.std() > 0.5 and not torch.equal(value.real, value.imag)


def test_page_size_is_the_caches() -> None:
    g = LoweredGraph()
    assert page_size_of(g.finish(g.cache("v_cache_3", 2, 32, 16, FP32))) == 32
    g = LoweredGraph()
    assert page_size_of(g.finish(g.tokens("x", (8,), FP32))) == 4


def test_what_is_ranked_has_no_ties_in_bf16_either() -> None:
    graph = LoweredGraph()
    rows = graph.function(aten.reshape.default, graph.tokens("logits", (256,), BF16), [1, -1, 256])
    router = graph.call("router", rows, None, 8, "softmax", False, 1, 1, "max", 1.0)
    values = inputs_of(graph, router)["logits"]
    assert values.dtype is BF16
    assert all(len(row.unique()) == 256 for row in values[0])
    assert not torch.equal(values[0, 0], values[0, 1])
