"""Writes in place become new values: the same numbers, and nothing is rewritten whose memory others see."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from octavo.compiler.capture import _with_named_weights
from octavo.compiler.functional import make_functional


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def exported(function: Callable[[Tensor], Tensor]) -> Any:
    program = export(Function(function), (torch.ones(5, 4),), dynamic_shapes=({0: Dim.AUTO},), strict=False)
    return _with_named_weights(program)


def divided(x: Tensor) -> Tensor:
    y = x.exp()
    total = y.sum(-1, keepdim=True)
    y /= total
    return y * 2 + total


def scattered(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x)
    mask.scatter_(1, x.argmax(-1, keepdim=True), 1)
    return mask * x


def filled(x: Tensor) -> Tensor:
    whole = x.new_empty(x.shape[0], 6)
    whole[:, :4] = x
    whole[:, 4:] = x[:, :2] * 3
    return whole + 1


def twice(x: Tensor) -> Tensor:
    y = x + 1
    y.mul_(2)
    y.add_(x, alpha=3)
    return y


def written_through_a_view(x: Tensor) -> Tensor:
    y = x + 1
    rows = y.view(-1)
    y.mul_(2)
    return rows + 0


def written_transposed(x: Tensor) -> Tensor:
    y = x + 1
    y.t().mul_(2)
    return y + 0


def written_by_a_reshape(x: Tensor) -> Tensor:
    y = x + 1
    y.reshape(-1).mul_(2)
    return y + 0


def input_written(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def broadcast_into_a_part(x: Tensor) -> Tensor:
    y = x + 1
    y[:, :2] = x[:, :1]
    return y * 2


def converted_into_a_part(x: Tensor) -> Tensor:
    y = x + 1
    y[:, :2] = x[:, :2].double()
    return y * 2


def integers_divided(x: Tensor) -> Tensor:
    y = (x > 0).long() + 1
    y.pow_(2)
    return y * x


@pytest.mark.parametrize(
    "function", [divided, scattered, filled, twice, broadcast_into_a_part, integers_divided]
)
def test_writes_into_own_memory_become_values(function: Callable[[Tensor], Tensor]) -> None:
    graph_module = exported(function)
    assert make_functional(graph_module)
    assert not any(
        n.op == "call_function" and getattr(n.target, "_schema", None) and n.target._schema.is_mutable
        for n in graph_module.graph.nodes
    )
    graph_module.recompile()
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    expected = function(x.clone())
    (result,) = graph_module(x.clone())
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "function",
    [written_through_a_view, written_transposed, written_by_a_reshape, input_written, converted_into_a_part],
)
def test_memory_that_others_see_is_left_alone(function: Callable[[Tensor], Tensor]) -> None:
    assert not make_functional(exported(function))
