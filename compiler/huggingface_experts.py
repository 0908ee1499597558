"""Hugging Face's extension point for experts: stacked weights and what the router chose arrive as one op.

How a module gates its experts is method code, so it is probed: the method runs on numbers that pass every clamp, and
the result is compared with what `octavo::moe` would make of them. Nothing is taken from a module's name.
Imports transformers, so it is imported only for a model that is one of theirs.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from octavo.compiler.errors import CaptureError
from octavo.compiler.ops.moe import gate
from octavo.compiler.pointwise import ACTIVATIONS

INTERFACE = "octavo"
# What transformers' decorator sets on every module whose experts go through the interface.
MARKS = ("is_transposed", "is_concatenated", "has_gate", "has_bias", "has_post_expert_norm")
WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True)
class Gating:
    """How a module makes one row of a gate's and an up's: the attributes of `octavo::moe`, and the rows' order."""

    activation: str
    limit: float
    alpha: float
    interleaved: bool


@contextlib.contextmanager
def experts_as_op(model: nn.Module) -> Iterator[None]:
    """While active, every stack of experts in `model` calls `octavo::moe`. Undone afterwards.

    Raises CaptureError, where a module is called, if its experts are not of that form or go past the interface.
    """
    paths = {module: path for path, module in model.named_modules() if uses_interface(module)}
    known = {module: _read(module, path) for module, path in paths.items()}
    waiting: list[nn.Module] = []

    def experts(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        waiting.remove(module)
        gating = known[module]
        if isinstance(gating, CaptureError):
            raise gating
        return _call(module, gating, x, index, weights)

    def came_through(module: nn.Module, *_: Any) -> None:
        if module in waiting:
            raise _refusal(module, paths[module], "its forward does not call the experts interface")

    ExpertsInterface.register(INTERFACE, experts)
    configs: dict[int, Any] = {id(module.config): module.config for module in paths}
    previous = {key: config._experts_implementation for key, config in configs.items()}
    with contextlib.ExitStack() as stack:
        for module in paths:
            stack.callback(module.register_forward_pre_hook(lambda m, *_: waiting.append(m)).remove)
            stack.callback(module.register_forward_hook(came_through).remove)
        try:
            for config in configs.values():
                config._experts_implementation = INTERFACE
            yield
        finally:
            for key, config in configs.items():
                config._experts_implementation = previous[key]


def uses_interface(module: nn.Module) -> bool:
    return all(hasattr(module, mark) for mark in MARKS)


def _call(module: Any, gating: Gating, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """x (T, hidden); index, weights (T, K). The stacked weights as `octavo::moe` takes them."""
    up_axis, down_axis = (2, 1) if module.is_transposed else (1, 2)
    stacked = (module.gate_up_proj, module.down_proj)
    if module.is_transposed:
        stacked = tuple(w.transpose(up_axis, down_axis) for w in stacked)
    biases = tuple(getattr(module, name) for name in BIASES) if module.has_bias else (None, None)
    gate_up, gate_up_bias = stacked[0], biases[0]
    if gating.interleaved:
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
        gate_up_bias = (
            None if gate_up_bias is None else torch.cat((gate_up_bias[:, ::2], gate_up_bias[:, 1::2]), 1)
        )
    slots = index.shape[-1]
    result: Tensor = torch.ops.octavo.moe(
        x.reshape(1, -1, x.shape[-1]), index.reshape(1, -1, slots), weights.reshape(1, -1, slots).float(),
        gate_up, gate_up_bias, stacked[1], biases[1], gating.activation, gating.limit, gating.alpha,
    )  # fmt: skip
    return result.reshape(x.shape)


def _read(module: nn.Module, path: str) -> Gating | CaptureError:
    """The module's gating, or why it has none that `octavo::moe` knows."""
    try:
        _check(module, path)
        return _probe(module, path)
    except CaptureError as error:
        return error


def _check(module: Any, path: str) -> None:
    if not module.has_gate:
        raise _refusal(module, path, "its experts have no gate, only an up projection")
    if module.has_post_expert_norm:
        raise _refusal(module, path, "it normalises what each expert gives")
    if getattr(module, "_is_expert_parallel", False):
        raise _refusal(
            module, path, "its experts are spread over ranks; load the model without expert parallelism"
        )
    names = WEIGHTS + (BIASES if module.has_bias else ())
    found = {name: p for name, p in (*module.named_parameters(), *module.named_buffers())}
    unknown = sorted(found.keys() - set(names))
    if unknown or found.keys() != set(names):
        raise _refusal(module, path, f"it has {sorted(found)}, expected {sorted(names)}")
    gate_up, down = (tuple(found[name].shape) for name in WEIGHTS)
    if module.is_transposed:
        gate_up, down = (s[:1] + s[:0:-1] for s in (gate_up, down))
    experts, hidden, width = down if len(down) == 3 else (0, 0, 0)
    if gate_up != (experts, 2 * width, hidden):
        raise _refusal(
            module, path, f"its weights are {gate_up} and {down}, expected (E, 2 I, D) and (E, D, I)"
        )
    if not found[WEIGHTS[0]].is_floating_point():
        raise _refusal(module, path, f"its weights are {found[WEIGHTS[0]].dtype}; load them unquantized")


def _probe(module: Any, path: str) -> Gating:
    numbers = sorted(
        {float(v) for v in vars(module).values() if isinstance(v, int | float) and not isinstance(v, bool)}
    )
    largest = 2 * max([4.0, *(abs(n) for n in numbers if abs(n) < 1e4)])
    row = torch.linspace(-largest, largest, 41, dtype=torch.float64)
    # Every gate meets every up, near zero and far from it, in both orders of rows.
    first = torch.cat((row, row / largest))
    gates, ups = (v.reshape(-1) for v in torch.meshgrid(first, first.flip(0) + 0.125, indexing="ij"))
    forms = {
        False: torch.cat((gates, ups)), True: torch.stack((gates, ups), -1).reshape(-1),
    }  # fmt: skip
    try:
        with torch.no_grad():
            results = {
                interleaved: module._apply_gate(values[None])[0] for interleaved, values in forms.items()
            }
    except Exception as error:
        raise _refusal(
            module, path, f"its gate does not run on its own ({type(error).__name__}: {error})"
        ) from None
    limits = (0.0, *(n for n in numbers if n > 0))
    activations = [*((name, 1.0) for name in ACTIVATIONS), *(("swiglu_oai", n) for n in numbers)]
    choices = itertools.product((False, True), limits, activations)
    for interleaved, limit, (activation, alpha) in choices:
        expected = gate(forms[False][None], activation, limit, alpha)[0]
        if torch.allclose(results[interleaved].double(), expected, rtol=1e-6, atol=1e-6):
            return Gating(activation, limit, alpha, interleaved)
    known = ", ".join((*ACTIVATIONS, "swiglu_oai"))
    raise _refusal(
        module, path, f"its gate ({_line(type(module)._apply_gate)}) is none of {known}, clamped or not"
    )


def _refusal(module: nn.Module, path: str, reason: str) -> CaptureError:
    return CaptureError(
        f"capture: {path} ({type(module).__name__}, {_line(type(module).forward)}) cannot be one octavo.moe: {reason}"
    )


def _line(method: Any) -> str:
    """File and line in which a method starts, below its decorators."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return "source unknown" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
