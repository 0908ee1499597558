"""A rewritten graph as something that runs: attention by torch's own kernel, the rest by references."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

octavo = torch.ops.octavo


def executable(graph_module: GraphModule) -> Callable[..., Any]:
    """A function of a list of arguments, as AOTAutograd calls it."""
    for node in graph_module.graph.nodes:
        if node.target is octavo.attention.default:
            node.target = attention
    graph_module.recompile()
    return boxed(graph_module.forward)


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one list of arguments, which is emptied so that they may be freed."""

    def run(arguments: list[Any]) -> Any:
        given: Sequence[Any] = tuple(arguments)
        arguments.clear()
        return function(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, causal: bool = True,
    window: int = 0, softcap: float = 0.0, *rest: Any,
) -> Tensor:  # fmt: skip
    """octavo.attention by scaled_dot_product_attention, whose memory does not grow with the square of T."""
    if sinks is not None or window or softcap or any(value is not None for value in rest):
        result: Tensor = octavo.attention.default(q, k, v, sinks, scale, causal, window, softcap, *rest)
        return result
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped
    ).transpose(1, 2)
