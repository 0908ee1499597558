"""One mixture between a table and a head, through the passes up to the one that finds routers."""

from collections.abc import Callable

import torch
from models import with_margin
from stages import FP32, SETTINGS, tokens
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from octavo.compiler.capture import capture
from octavo.compiler.pipeline import PIPELINE, apply_step
from octavo.compiler.verify import prove_report
from octavo.passes.rule import PassReport


class Model(nn.Module):
    """A table, a mixture and a head: all that the pass looks at."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.table, self.mixture = nn.Embedding(96, 64), mixture

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        return F.linear(x + self.mixture(x), self.table.weight)


def around(make: Callable[[], nn.Module], dtype: torch.dtype = FP32) -> nn.Module:
    torch.manual_seed(0)
    return with_margin(Model(make())).to(dtype)


def assert_same(graph_module: GraphModule, model: nn.Module) -> None:
    """For few tokens, which leave experts without any, and for more."""
    for length in (1, 9):
        with torch.no_grad():
            (result,) = graph_module(tokens(length) % 96, torch.arange(length)[None])
            assert torch.allclose(result, model(tokens(length) % 96), atol=1e-3, rtol=1e-4)


def fused(
    make: Callable[[], nn.Module], dtype: torch.dtype = FP32
) -> tuple[GraphModule, PassReport, PassReport]:
    """The graph after the routers' pass, and what both passes reported; their sites are proven."""
    model = around(make, dtype)
    graph_module = capture(model).graph_module
    end = [step.name for step in PIPELINE].index("fuse_router") + 1
    reports = [apply_step(step, graph_module, SETTINGS)[0] for step in PIPELINE[:end]][-2:]
    for report in reports:
        prove_report(report, {})
    if dtype is FP32:
        assert_same(graph_module, model)
    return graph_module, reports[0], reports[1]
