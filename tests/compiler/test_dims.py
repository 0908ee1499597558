"""Sizes by name: a lowered graph's symbols become T, R, L, P and num_pages."""

import pytest
import torch
from lowered import LoweredGraph

from octavo.compiler.dims import dim_names, dtype_name, is_view, leaves_graph, to_dim
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.expression import evaluate
from octavo.compiler.ops.quantize import swizzled_size


def test_names_symbols_by_the_inputs_that_hold_them() -> None:
    g = LoweredGraph()
    ids, table, rows = (g.input(name) for name in ("input_ids", "page_table", "logit_rows"))
    cache = g.cache("k_cache_0", 3, 16, 8, torch.bfloat16)
    names = dim_names(g.graph)
    assert sorted(names.values()) == ["L", "P", "R", "T", "num_pages"]
    sizes = [to_dim(size, names) for node in (ids, table, rows, cache) for size in node.meta["val"].shape]
    assert sizes == [1, "T", "R", "P", "L", "num_pages", 3, 16, 8]
    assert to_dim(2 * ids.meta["val"].shape[1] * 3 + 4, names) == "6*T + 4"
    assert dtype_name(cache.meta["val"]) == "bf16"


def test_a_quotient_that_is_rounded_down_is_written_as_programs_have_it() -> None:
    g = LoweredGraph()
    ids, rows = g.input("input_ids"), g.input("logit_rows")
    names = dim_names(g.graph)
    for node, name in ((ids, "T"), (rows, "L")):
        count = node.meta["val"].shape[-1]
        written = to_dim(swizzled_size(count, 40), names)
        values = [evaluate(written, {name: size}) for size in (0, 1, 128, 129)]
        assert values == [0, 5120, 5120, 10240]


def test_refuses_a_size_without_a_name() -> None:
    g = LoweredGraph()
    ids = g.input("input_ids")
    with pytest.raises(IllegalGraphError, match=r"size .* holds"):
        to_dim(ids.meta["val"].shape[1], {})


def test_refuses_other_dtypes() -> None:
    with pytest.raises(
        IllegalGraphError, match=r"dtype must be one of fp32, bf16, fp8, u8, i32, i64, got torch.float16"
    ):
        dtype_name(torch.zeros(1, dtype=torch.float16))


def test_knows_what_leaves_the_graph() -> None:
    g = LoweredGraph()
    x = g.call("embedding", g.input("input_ids"), g.weight("w", torch.zeros(3, 8)))
    logits = g.call("linear", x, g.weight("head", torch.zeros(7, 8)))
    view = g.function(torch.ops.aten.view.default, logits, [1, -1, 7])
    g.finish(view)
    assert leaves_graph(logits) and leaves_graph(view) and not leaves_graph(x)
    assert is_view(view) and not is_view(logits)
