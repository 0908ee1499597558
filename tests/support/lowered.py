"""Builds lowered graphs by hand, as the pipeline leaves them: symbolic sizes, inputs, caches, weights."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg

from octavo.compiler import ops  # noqa: F401  (registers the dialect)
from octavo.compiler.program import STEP_INPUTS

# What symbolic sizes were seen as first; all different, so that each gets a symbol of its own.
HINTS = {"N": 17, "T": 11, "R": 5, "L": 3, "P": 7, "num_pages": 23, "R + 1": 6}
DTYPES = {"i64": torch.int64, "i32": torch.int32}


class LoweredGraph:
    """A graph under construction. Nodes carry meta["val"]; weights are real tensors on the module."""

    def __init__(self) -> None:
        self.module = torch.nn.Module()
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())

    def input(self, name: str) -> fx.Node:
        """A step input. The ids and positions of tokens are (1, T), as in captured graphs."""
        dtype, shape = STEP_INPUTS[name]
        sizes = [HINTS[str(size)] for size in shape]
        lead = [1] if name in ("input_ids", "positions") else []
        return self.placeholder(
            name, torch.zeros(lead + sizes, dtype=DTYPES[dtype]), range(len(lead), len(lead + sizes))
        )

    def cache(self, name: str, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype) -> fx.Node:
        return self.placeholder(
            name, torch.zeros(HINTS["num_pages"], kv_heads, page_size, dim, dtype=dtype), [0]
        )

    def placeholder(self, name: str, value: Tensor, dynamic: Any) -> fx.Node:
        kinds = [DimDynamic.DUCK if axis in dynamic else DimDynamic.STATIC for axis in range(value.dim())]
        node = self.graph.placeholder(name)
        assert node.name == name
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        node.meta["val"] = self.mode.from_tensor(value, symbolic_context=context)
        return node

    def tokens(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, rows: str = "T") -> fx.Node:
        """A token tensor (1, rows, *shape) as a placeholder, for graphs of one op."""
        return self.placeholder(name, torch.zeros(1, HINTS[rows], *shape, dtype=dtype), [1])

    def weight(self, name: str, value: Tensor) -> fx.Node:
        owner = self.module
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        if not hasattr(owner, leaf):
            owner.register_buffer(leaf, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        return node

    def call(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of `octavo.<op>`."""
        return self.function(getattr(torch.ops.octavo, op).default, *args, **kwargs)

    def function(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            values, named = map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*values, **named)
        return node

    def finish(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(self.module, self.graph)


def traced_product() -> fx.GraphModule:
    """Rows gathered, one product with an origin in the user's code, and a conversion."""
    g = LoweredGraph()
    x, rows = g.tokens("x", (8,), torch.bfloat16), g.input("logit_rows")
    y = g.call(
        "linear", g.call("gather_logits", x, rows), g.weight("head.weight", torch.ones(5, 8).bfloat16())
    )
    y.meta["nn_module_stack"] = {"k": ("head", torch.nn.Module)}
    y.meta["stack_trace"] = '  File "/home/me/model.py", line 9, in forward\n    y = self.head(x)'
    wide = g.function(torch.ops.aten._to_copy.default, y, dtype=torch.float32)
    return g.finish(wide)
