"""How a model is called: ids, positions and features in, logits and hidden states out, whatever its own names are."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compiler.errors import CaptureError
from octavo.compiler.hidden_states import Taps, resolve_features
from octavo.compiler.program import FEATURES

EXAMPLE_LEN = 7  # odd, not 1 or 2: those sizes are specialised
POSITION_NAMES = ("position_ids", "positions", "position", "pos", "input_pos")
Caller = Callable[[nn.Module, Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]


def library_of(model: nn.Module) -> Any:
    """The module that knows the model's library, or None. Others' models import no transformers."""
    if "transformers" not in sys.modules:
        return None
    from octavo.compiler import huggingface

    return huggingface if huggingface.is_model(model) else None


def parts_as_ops(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """While active, experts of the library's own modules in another model (a draft head, say) call `octavo::moe`."""
    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    from octavo.compiler import huggingface_experts

    return huggingface_experts.experts_as_op(model)


def caller_of(model: nn.Module, features: Sequence[int] | None) -> Caller:
    """The model's own call, with its logits and the hidden states that are asked for."""
    library = library_of(model)
    call: Caller = _signature(model) if library is None else lambda *given: (library.call(*given[:3]),)
    if features is None:
        return call
    if reads_features(model):
        raise CaptureError(
            f"features: {type(model).__name__} reads features itself, and what it returns behind its logits are its own"
        )
    wanted = resolve_features(model, features)

    def tapped(module: nn.Module, ids: Tensor, positions: Tensor, given: Tensor | None) -> tuple[Tensor, ...]:
        with Taps(module, wanted) as taps:
            (logits,) = call(module, ids, positions, given)
            return logits, *taps.found(logits)

    return tapped


def reads_features(model: nn.Module) -> bool:
    """Whether it is a draft head: it takes the hidden states of a target beside the tokens."""
    return FEATURES in inspect.signature(model.forward).parameters


def _signature(model: nn.Module) -> Caller:
    """How a hand-written model takes its inputs: token ids first, positions and features by name if it has them."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = [p.name for p in parameters]
    positions = next((n for n in names if n in POSITION_NAMES), None)
    is_head = FEATURES in names
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    unknown = [n for n in required[1:] if n not in (positions, FEATURES)]
    if not names or unknown:
        raise CaptureError(
            f"capture: {type(model).__name__}.forward takes {names}; expected token ids and optionally "
            f"positions (one of {', '.join(POSITION_NAMES)}) and {FEATURES}; wrap the model in a module that fills in "
            f"{unknown or 'these'}"
        )

    def call(
        module: nn.Module, ids: Tensor, position_ids: Tensor, given: Tensor | None
    ) -> tuple[Tensor, ...]:
        others = {positions: position_ids} if positions else {}
        result = module(ids, **others, **({FEATURES: given} if is_head else {}))
        if hasattr(result, "logits"):
            return (result.logits,)
        several = result if isinstance(result, tuple | list) else (result,)
        return tuple(several) if is_head else (several[0],)

    return call


def example_features(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Of a draft head, in the dtype of its weights."""
    if not reads_features(model):
        return {}
    width = getattr(model, "features_width", None)
    if not isinstance(width, int):
        raise CaptureError(
            f"capture: {type(model).__name__} reads features and does not say how many a token: give it an attribute "
            f"features_width (an int), got {width!r}"
        )
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return {FEATURES: torch.zeros(1, EXAMPLE_LEN, width, dtype=dtype, device=device)}
