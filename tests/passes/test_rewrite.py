"""replace(): what it takes out and puts in, the two forms it keeps, and which sites are equal."""

import functools
import operator

import pytest
import torch
from lowered import LoweredGraph
from stages import BF16, FP32, calls, count
from torch import fx

from octavo.compiler.origin import where
from octavo.passes.pattern import aten
from octavo.passes.rewrite import (
    Builder,
    Recipe,
    Site,
    collect,
    extract,
    fake_mode,
    held,
    hold,
    new_weight,
    recipes,
    replace,
    set_meta,
    signature,
    structure,
)

octavo = torch.ops.octavo
NEG, EXP, MUL = aten.neg.default, aten.exp.default, aten.mul.Tensor


def run(graph_module: fx.GraphModule, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(fx.Interpreter(graph_module).run(*inputs))


def test_replaces_one_node_and_keeps_both_forms() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    root = g.function(MUL, g.function(NEG, x), 2.0)
    graph_module = g.finish(g.function(EXP, root))
    site = replace(graph_module, [root], lambda b: [b.call(MUL, x, -2.0)], [x])
    graph_module.graph.lint()
    value = torch.randn(1, 3, 4)
    assert count(graph_module, MUL) == 1
    assert torch.equal(run(graph_module, value)[0], (value * -2).exp())
    assert torch.equal(run(site.before, value)[0], -value * 2)
    assert torch.equal(run(site.after, value)[0], value * -2)
    assert [tuple(e.shape)[2:] for e in site.examples] == [(4,)]
    assert site.node == "mul_tensor"


def test_new_nodes_have_shapes_and_the_origin_of_the_root() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), BF16)
    root = g.function(NEG, x)
    root.meta["nn_module_stack"] = {"k": ("layers.3.mlp", torch.nn.Module)}
    root.meta["stack_trace"] = '  File "/home/me/model.py", line 212, in forward\n    y = -x'
    graph_module = g.finish(root)
    replace(graph_module, [root], lambda b: [b.call(MUL, x, -1.0)], [x])
    (new,) = calls(graph_module, MUL)
    assert (new.meta["val"].dtype, new.meta["val"].shape[2]) == (BF16, 4)
    assert where(new) == "node mul, layers.3.mlp, model.py:212"


def test_replaces_several_nodes_at_once() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    both = [g.function(NEG, x), g.function(EXP, x)]
    graph_module = g.finish(g.function(MUL, *both))

    def build(b: Builder) -> list[fx.Node]:
        return [b.call(MUL, x, -1.0), b.call(aten.pow.Scalar, torch.e, x)]

    site = replace(graph_module, both, build, [x])
    graph_module.graph.lint()
    value = torch.randn(1, 3, 4)
    assert count(graph_module, NEG, EXP) == 0
    assert torch.allclose(run(graph_module, value)[0], -value * value.exp())
    assert len(run(site.before, value)) == len(run(site.after, value)) == 2


def test_a_new_value_may_read_what_it_replaces() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    root = g.function(NEG, x)
    graph_module = g.finish(root)
    replace(graph_module, [root], lambda b: [b.call(MUL, root, 1.0)], [x])
    graph_module.graph.lint()
    value = torch.randn(1, 3, 4)
    assert torch.equal(run(graph_module, value)[0], -value)


def test_effects_are_taken_out_put_in_and_part_of_both_forms() -> None:
    g = LoweredGraph()
    k, slots = g.tokens("k", (2, 16), FP32), g.input("slot_mapping")
    caches = [g.cache(f"{kind}_cache_0", 2, 4, 16, FP32) for kind in "kv"]
    write = g.call("kv_write", k, k, *caches, slots)
    root = g.function(NEG, k)
    graph_module = g.finish(root)

    def build(b: Builder) -> list[fx.Node]:
        b.effect(octavo.kv_write.default, k, b.call(NEG, k), *caches, slots)
        return [b.call(MUL, k, -1.0)]

    site = replace(graph_module, [root], build, [k, *caches, slots], effects=[write])
    graph_module.graph.lint()
    (new,) = calls(graph_module, octavo.kv_write.default)
    assert [str(n) for n in new.args[:2]] == ["k", "neg"]
    for form, sign in ((site.before, 1), (site.after, -1)):
        value, pages = torch.randn(1, 3, 2, 16), [torch.zeros(5, 2, 4, 16) for _ in range(2)]
        run(form, value, *pages, torch.tensor([4, 5, 9]))
        assert torch.equal(pages[1][1, :, 0], sign * value[0, 0])


def two_layers(second: float = 2.0, dtype: torch.dtype = FP32, width: int = 4) -> list[Site]:
    """Sites of neg(x * number) in two places; the numbers may differ."""
    g = LoweredGraph()
    x = g.tokens("x", (width,), dtype)
    first = g.function(NEG, g.function(MUL, x, 2.0))
    last = g.function(NEG, g.function(MUL, first, second))
    graph_module = g.finish(last)
    sites = []
    for root, source, number in ((last, first, second), (first, x, 2.0)):
        build = functools.partial(scaled, source=source, number=-number)
        sites.append(replace(graph_module, [root], build, [source]))
    return sites


def scaled(b: Builder, source: fx.Node, number: float) -> list[fx.Node]:
    return [b.call(MUL, source, number)]


def test_equal_sites_have_one_key_and_share_their_forms() -> None:
    last, first = two_layers()
    assert last.node != first.node
    assert last.key == first.key
    assert last.before is first.before and last.after is first.after


def test_other_numbers_dtypes_and_shapes_are_other_sites() -> None:
    others = (two_layers(second=3.0), two_layers(dtype=BF16), two_layers(width=8))
    assert len({sites[0].key for sites in (two_layers(), *others)}) == 4


def masked(mask: torch.Tensor, free: bool) -> Site:
    """A site that reads a weight: free, for any value of it, or relying on the one it has."""
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    weight = g.weight("mask", mask)
    root = g.function(MUL, x, weight)
    graph_module = g.finish(root)
    inputs = [x, weight] if free else [x]
    return replace(graph_module, [root], lambda b: [b.call(MUL, weight, x)], inputs)


def test_weights_that_a_site_relies_on_are_part_of_its_key() -> None:
    ones, zeros = torch.ones(4), torch.zeros(4)
    assert masked(ones, free=False).key == masked(ones.clone(), free=False).key
    assert masked(ones, free=False).key != masked(zeros, free=False).key
    assert masked(ones, free=True).key == masked(zeros, free=True).key
    assert masked(ones, free=True).key != masked(ones, free=False).key
    assert torch.equal(masked(zeros, free=False).constants["mask"], zeros)
    assert masked(zeros, free=True).constants == {}


def test_collect_stops_at_inputs_and_orders_what_is_between() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    low = g.function(NEG, x)
    high = g.function(MUL, g.function(EXP, low), low)
    g.finish(high)
    leaves, inner = collect([high], [low])
    assert [str(n) for n in leaves] == ["neg_default"]
    assert [str(n) for n in inner] == ["exp_default", "mul_tensor"]
    assert torch.equal(run(extract([high], leaves), torch.ones(2))[0], torch.ones(2) * torch.e)


def test_step_inputs_keep_their_role_in_the_structure() -> None:
    g = LoweredGraph()
    ids, positions = g.input("input_ids"), g.input("positions")
    rows = [g.function(aten.add.Tensor, n, 1) for n in (ids, positions)]
    g.finish(*rows)
    assert structure([rows[0]], [ids]) != structure([rows[1]], [positions])


def test_signature_numbers_symbols_by_appearance() -> None:
    g = LoweredGraph()
    x, slots = g.tokens("x", (4,), BF16), g.input("logit_rows")
    values = [n.meta["val"] for n in (x, x, slots)]
    assert signature(values) == "torch.bfloat16[1, s0, 4]; torch.bfloat16[1, s0, 4]; torch.int64[s1]"
    assert signature([3]) == "int"


def test_weights_by_dotted_names() -> None:
    root, value = torch.nn.Module(), torch.arange(3)
    hold(root, "a.b.c", value)
    hold(root, "a.d", value)
    assert held(root, "a.b.c") is value
    with pytest.raises(AssertionError, match=r"a\.b is a Module"):
        held(root, "a.b")


def test_new_weight_has_its_shape_and_comes_first() -> None:
    g = LoweredGraph()
    graph_module = g.finish(g.tokens("x", (4,), FP32))
    recipe = Recipe(("angles",), lambda sources: sources[0].cos())
    node = new_weight(graph_module, "tables.cos", torch.zeros(3, 4), recipe)
    assert recipes(graph_module) == {"tables.cos": recipe}
    assert next(iter(graph_module.graph.nodes)) is node
    assert (tuple(node.meta["val"].shape), node.target) == ((3, 4), "tables.cos")
    assert fake_mode(graph_module) is g.mode


def test_set_meta_infers_tuples_too() -> None:
    g = LoweredGraph()
    x, w = g.tokens("x", (4,), FP32), g.weight("w", torch.ones(4))
    both = g.graph.call_function(octavo.add_rms_norm.default, (x, x, w, 1e-5))
    item = g.graph.call_function(operator.getitem, (both, 1))
    for node in (both, item):
        set_meta(node, g.mode)
    assert [tuple(v.shape)[2:] for v in both.meta["val"]] == [(4,), (4,)]
    assert item.meta["val"].shape[2] == 4
