"""Graphs as text: they print as Python, load back to the same graph, and nothing else loads."""

import ast
import inspect
import operator
import textwrap

import pytest
import torch
from lowered import LoweredGraph
from models import tiny
from stages import FP32, before, logits, tokens
from torch import fx

from octavo.compiler import dump
from octavo.compiler.dump import load_graph, print_graph
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.pipeline import PIPELINE
from octavo.passes.rewrite import set_meta

STAGES = [*dict.fromkeys(step.name for step in PIPELINE), ""]


@pytest.mark.parametrize("name", ["llama", "window"])
def test_every_stage_prints_loads_and_prints_the_same(name: str) -> None:
    for stage in STAGES:
        graph_module = before(stage, name)
        text = print_graph(graph_module, "a header")
        assert strip(print_graph(load_graph(text, graph_module), "a header")) == strip(text), stage


def strip(text: str) -> list[str]:
    """Without the lines that tell where a call comes from, which the text does not need to load."""
    return [line for line in text.splitlines() if not line.startswith("    # ")]


@pytest.mark.parametrize("name", ["llama", "window"])
@pytest.mark.parametrize("stage", ["canonicalize", "fuse_gated_mlp", ""])
def test_a_loaded_graph_computes_the_same(name: str, stage: str) -> None:
    graph_module = before(stage, name)
    loaded = load_graph(print_graph(graph_module), graph_module)
    assert torch.equal(logits(loaded, tokens(7)), logits(graph_module, tokens(7)))


def test_the_text_itself_runs() -> None:
    graph_module = before("canonicalize", "sdpa")
    scope: dict[str, object] = {}
    exec(print_graph(graph_module), scope)
    weights = dict(graph_module.named_buffers())
    ids = tokens(5)
    (result,) = scope["forward"](weights, ids, torch.arange(5)[None])  # type: ignore[operator]
    assert torch.equal(result[0], logits(graph_module, ids))


def small() -> fx.GraphModule:
    g = LoweredGraph()
    x, rows = g.tokens("x", (8,), torch.bfloat16), g.input("logit_rows")
    y = g.call(
        "linear", g.call("gather_logits", x, rows), g.weight("head.weight", torch.ones(5, 8).bfloat16())
    )
    y.meta["nn_module_stack"] = {"k": ("head", torch.nn.Module)}
    y.meta["stack_trace"] = '  File "/home/me/model.py", line 9, in forward\n    y = self.head(x)'
    wide = g.function(torch.ops.aten._to_copy.default, y, dtype=FP32)
    return g.finish(wide)


def test_reads_like_this() -> None:
    text = print_graph(small(), 'after x | "quoted" C:\\path')
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
            _to_copy_default = aten._to_copy.default(linear_default, dtype=torch.float32)  # f32[1, D1, 5]
            return (_to_copy_default,)
        """)


def test_without_weights_they_are_on_the_meta_device() -> None:
    loaded = load_graph(print_graph(small()))
    assert {(name, b.device.type, b.dtype) for name, b in loaded.named_buffers()} == {
        ("head.weight", "meta", torch.bfloat16)
    }


def test_weights_must_be_those_of_the_text() -> None:
    with pytest.raises(
        IllegalGraphError, match=r"weight head.weight is torch.float32 \[5, 8\], the text says bf16"
    ):
        load_graph(print_graph(small()), {"head.weight": torch.ones(5, 8)})


def body(statement: str, weights: str = "{}", argument: str = 'x: "f32[1, T, 4]"') -> str:
    return f"WEIGHTS = {weights}\n\n\ndef forward(w, {argument}):\n    {statement}\n    return (x,)\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (body('y = __import__("os").system("true")'), "line 5: __import__('os').system is not an op"),
        (body("y = open(x)"), "line 5: open is not an op"),
        (body("y = aten.neg.nothing(x)"), "line 5: aten.neg.nothing is not an op"),
        (body("y = aten.nothing_at_all.default(x)"), "line 5: aten.nothing_at_all.default is not an op"),
        (body("y = torch.ops.aten.neg.default(x)"), "line 5: torch.ops.aten.neg.default is not an op"),
        (body("y = prims.neg.default(x)"), "line 5: prims.neg.default is not an op"),
        (body("import os"), "line 5: expected `name = op(...)` or a return"),
        (body("y = lambda: x"), "line 5: expected `name = op(...)` or a return"),
        (body("for y in x: pass"), "line 5: expected `name = op(...)` or a return"),
        (body("y = aten.mul.Tensor(x, lambda: 1)"), "line 5: expected a literal"),
        (body("y = aten.mul.Tensor(x, [n for n in x])"), "line 5: expected a literal"),
        (body("y = aten.mul.Tensor(x, aten.neg.default(x))"), "line 5: expected a literal"),
        (body("y = aten.neg.default(z)"), "line 5: z is not defined above"),
        (body('y = aten.neg.default(w["a"])'), "line 5: a is not in WEIGHTS"),
        (body("y, z = aten.neg.default(x)"), "line 5: expected one name on the left"),
        (body("pass", argument="x"), "line 4: input x has no type"),
        (body("pass", argument='x: "f31[1]"'), "'f31[1]' is not a type such as bf16[1, T, 576]"),
        (body("pass", weights='{"a": open("x")}'), "line 1: expected a literal"),
        ("x = 1", "expected WEIGHTS and a function forward; is this a dump of octavo?"),
        ("def forward(", "the text is not Python"),
        ("\0", "the text is not Python"),
    ],
)  # fmt: skip
def test_refuses_what_is_no_graph(text: str, said: str) -> None:
    with pytest.raises(IllegalGraphError) as raised:
        load_graph(text)
    assert str(raised.value).startswith("dump: ")
    assert said in str(raised.value)


@pytest.mark.parametrize("depth", [150, 5000, 200_000])
def test_refuses_deep_nesting(depth: int) -> None:
    text = body(f"y = aten.mul.Tensor(x, {'(' * depth}1{',)' * depth})")
    with pytest.raises(IllegalGraphError):
        load_graph(text)
    with pytest.raises(IllegalGraphError):
        load_graph(body(f"y = aten.mul.Tensor(x, {'-' * depth}x)"))


def test_an_op_that_does_not_fit_its_arguments_is_refused_with_its_line() -> None:
    for call in ("aten.neg.default(3)", "aten.neg.default(x, x)", "aten.view.default(x, [7])"):
        with pytest.raises(IllegalGraphError, match="line 5: aten"):
            load_graph(body(f"y = {call}"))


def test_the_loader_executes_no_text() -> None:
    tree = ast.parse(inspect.getsource(dump))
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert called.isdisjoint({"exec", "eval", "compile", "__import__"})
    assert "literal_eval" in ast.dump(tree)


def test_arithmetic_on_sizes_loads_too() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    length = g.function(torch.ops.aten.sym_size.int, x, 1)
    shorter = g.graph.call_function(operator.sub, (g.graph.call_function(operator.mul, (length, 2)), length))
    for node in g.graph.nodes:
        if "val" not in node.meta:
            set_meta(node, g.mode)
    text = print_graph(g.finish(g.function(torch.ops.aten.slice.Tensor, x, 1, 0, shorter)))
    assert strip(print_graph(load_graph(text))) == strip(text)


def test_numbers_that_are_no_literals_load_too() -> None:
    text = body(
        "y = aten.full.default([2], inf, dtype=torch.float32, layout=torch.strided, device=device('cpu'))"
    )
    (node,) = (n for n in load_graph(text).graph.nodes if n.op == "call_function")
    assert node.args == ([2], float("inf"))
    assert node.kwargs == {"dtype": FP32, "layout": torch.strided, "device": torch.device("cpu")}


def test_what_has_no_name_in_the_text_is_refused() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    node = g.graph.call_function(torch.neg, (x,))
    node.meta["val"] = x.meta["val"]
    with pytest.raises(IllegalGraphError, match="is not an op that has a name in the text form"):
        print_graph(g.finish(node))


def test_weights_may_be_a_module() -> None:
    model, graph_module = tiny("llama"), before("canonicalize")
    loaded = load_graph(print_graph(graph_module), model)
    assert torch.equal(logits(loaded, tokens(7)), logits(graph_module, tokens(7)))
