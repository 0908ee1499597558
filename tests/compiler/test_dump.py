"""Graphs as text: they print as Python that reads like the model, and runs."""

import textwrap

import pytest
import torch
from lowered import LoweredGraph, traced_product
from stages import FP32, before, logits, tokens

from octavo.compiler.dump import print_graph, settle
from octavo.compiler.errors import IllegalGraphError
from octavo.passes.rewrite import hold


def test_the_text_itself_runs() -> None:
    graph_module = before("canonicalize", "sdpa")
    scope: dict[str, object] = {}
    exec(print_graph(graph_module), scope)
    weights = dict(graph_module.named_buffers())
    ids = tokens(5)
    (result,) = scope["forward"](weights, ids, torch.arange(5)[None])  # type: ignore[operator]
    assert torch.equal(result[0], logits(graph_module, ids))


def test_reads_like_this() -> None:
    text = print_graph(traced_product(), 'after x | "quoted" C:\\path')
    assert text.startswith('"""after x | "quoted" C:/path"""\n')
    assert text[text.index("WEIGHTS") :] == textwrap.dedent("""\
        WEIGHTS = {
            "head.weight": "bf16[5, 8]",
        }


        def forward(
            w,
            x: "bf16[1, T, 8]",
            logit_rows: "i64[D1]",
        ):
            gather_logits_default = octavo.gather_logits.default(x, logit_rows)  # bf16[1, D1, 8]
            # head | model.py:9  y = self.head(x)
            linear_default = octavo.linear.default(gather_logits_default, w["head.weight"])  # bf16[1, D1, 5]
            # no source
            _to_copy_default = aten._to_copy.default(linear_default, dtype=torch.float32)  # f32[1, D1, 5]
            return (_to_copy_default,)
        """)


def test_what_has_no_name_in_the_text_is_refused() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    node = g.graph.call_function(torch.neg, (x,))
    node.meta["val"] = x.meta["val"]
    with pytest.raises(IllegalGraphError, match="is not an op that has a name in the text form"):
        print_graph(g.finish(node))


def test_settling_gives_the_order_and_the_names_that_the_text_has() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    first, again = g.graph.get_attr("a.b"), g.graph.get_attr("a.b")
    hold(g.module, "a.b", torch.ones(4))
    first.meta["val"] = again.meta["val"] = g.mode.from_tensor(torch.ones(4))
    total = g.function(torch.ops.aten.add.Tensor, g.function(torch.ops.aten.add.Tensor, x, first), again)
    dead = [g.function(torch.ops.aten.add.Tensor, x, x) for _ in range(3)]
    graph_module = g.finish(total)
    for node in dead:
        graph_module.graph.erase_node(node)
    expected = graph_module(torch.ones(1, 3, 4))
    settle(graph_module)
    graph_module.graph.lint()
    names = [n.name for n in graph_module.graph.nodes]
    assert names == ["a_b", "x", "add_tensor", "add_tensor_1", "output"]
    assert torch.equal(graph_module(torch.ones(1, 3, 4))[0], expected[0])
    # Names of what is gone are free: the next is the one that it would be in a loaded graph.
    assert graph_module.graph.call_function(torch.ops.aten.add.Tensor, (x, x)).name == "add_tensor_2"


@pytest.mark.parametrize("text", ['"', '"""', "\n\nimport os", "\u2028x", "back\\slash", ""])
def test_nothing_that_a_model_names_leaves_its_place_in_the_text(text: str) -> None:
    """Module paths, lines and weights may be called anything: the text stays the same program."""
    graph_module = traced_product()
    linear = next(n for n in graph_module.graph.nodes if n.name == "linear_default")
    linear.meta["nn_module_stack"] = {"k": (f"a{text}b", torch.nn.Module)}
    linear.meta["stack_trace"] = f'  File "/m.py", line 9, in f\n    {text.strip()}'
    plain, odd = (
        [line for line in print_graph(gm, header).split("\n")[1:] if not line.startswith("    # ")]
        for gm, header in ((traced_product(), "h"), (graph_module, f"h{text}"))
    )
    assert odd == plain
    scope: dict[str, object] = {}
    exec(print_graph(graph_module, f"h{text}"), scope)
    assert "os" not in scope
