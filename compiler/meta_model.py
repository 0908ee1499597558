"""Models whose weights have no values yet: built under `torch.device("meta")`, a full-size model takes no memory.

Only parameters may lack values. What a module computes in its constructor (angles of a rotation, say) is computed
again on the CPU, since passes look into it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from octavo.compiler.errors import CaptureError
from octavo.passes.rewrite import fake_mode, held, hold

META, CPU = torch.device("meta"), torch.device("cpu")


def has_values(model: nn.Module) -> bool:
    return not any(p.is_meta for p in model.parameters())


def on_cpu(graph_module: GraphModule, model: nn.Module) -> None:
    """A graph captured on the meta device as one of the CPU, with the model's computed buffers in it."""
    known = _computed_buffers(model)
    with fake_mode(graph_module):
        for node in graph_module.graph.nodes:
            node.args = map_aggregate(node.args, _moved)
            node.kwargs = map_aggregate(node.kwargs, _moved)
            if "val" in node.meta:
                node.meta["val"] = map_aggregate(node.meta["val"], _moved)
    for node in graph_module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if held(graph_module, name).is_meta and name in known:
            hold(graph_module, name, known[name])


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CPU if value == META else value
    if isinstance(value, Tensor) and value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
    return value


def _computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Values of the buffers that no checkpoint holds, by the graph's names for them.

    Raises CaptureError for one whose module cannot be made again from its configuration.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        names = [n for n in sorted(module._non_persistent_buffers_set) if _lacks_value(module, n)]
        if not names:
            continue
        again = _made_again(module)
        for name in names:
            value = None if again is None else getattr(again, name, None)
            if value is None or value.is_meta:
                raise CaptureError(
                    f"capture: buffer {path}.{name} of {type(module).__name__} is computed when the module is "
                    "made and has no values on the meta device; build the model with only its parameters "
                    "there (accelerate.init_empty_weights)"
                )
            found[f"{path}.{name}"] = value
    return found


def _lacks_value(module: nn.Module, name: str) -> bool:
    value = module._buffers.get(name)
    return value is not None and value.is_meta


def _made_again(module: nn.Module) -> nn.Module | None:
    """A module that its configuration describes fully, on the CPU."""
    config = getattr(module, "config", None)
    if config is None:
        return None
    try:
        with CPU:
            return type(module)(config)
    except TypeError:
        return None
