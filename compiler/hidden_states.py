"""The hidden states of a model, numbered as Hugging Face numbers them: what draft heads read beside a token.

0 is what the first layer gets, i what layer i makes, and -1 (or the number of layers) what the last product reads to
make the logits: the last layer's behind the final norm.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from octavo.compiler.errors import CaptureError, OptionError

LAST = -1


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of layers: of the lists that lie in no other, that with most parameters. Raises CaptureError."""
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [m for path, m in lists.items() if not any(path.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise CaptureError(
            f"features: {type(model).__name__} has no nn.ModuleList of layers, so there is nothing to count them by; "
            "keep its layers in one"
        )
    return max(outer, key=lambda module: sum(p.numel() for p in module.parameters()))


def resolve_features(model: nn.Module, features: Sequence[int]) -> tuple[int, ...]:
    """The numbers with LAST for the last. Raises OptionError for one that there is not, or that is there twice."""
    count = len(decoder_layers(model))
    resolved = tuple(LAST if number == count else number for number in features)
    wrong = [number for number in resolved if not LAST <= number < count]
    if wrong or not resolved or len(set(resolved)) != len(resolved):
        raise OptionError(
            f"features: expected different numbers from 0 (embeddings) to {count} (or -1: behind the last norm) of "
            f"{type(model).__name__}, which has {count} layers, got {list(features)}"
        )
    return resolved


class Taps(ExitStack):
    """While active, what the model computes is kept: its logits come with the hidden states of these numbers."""

    def __init__(self, model: nn.Module, features: Sequence[int]) -> None:
        super().__init__()
        self.features = features
        self._layers = decoder_layers(model)
        self._inputs: dict[int, Tensor] = {}
        self._last: list[
            tuple[Tensor | None, Tensor]
        ] = []  # what modules without parts got and made, in order
        for number, layer in enumerate(self._layers):
            self.callback(layer.register_forward_pre_hook(self._enter(number), with_kwargs=True).remove)
        for module in model.modules():
            if not any(True for _ in module.children()):
                self.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)

    def _enter(self, number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs[number] = _first_tensor(args, kwargs)

        return hook

    def _leave(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if isinstance(result, Tensor) and result.dim() == 3:
            self._last.append((_first_tensor(args, kwargs), result))

    def found(self, logits: Tensor) -> tuple[Tensor, ...]:
        """The hidden states (1, T, hidden), once the model has run. Raises CaptureError for one that it has not."""
        missing = [number for number in self.features if number != LAST and number not in self._inputs]
        if missing:
            raise CaptureError(
                f"features: the layers {missing} were given no hidden states (1, T, hidden) while the model ran"
            )
        return tuple(self._read_last(logits) if n == LAST else self._inputs[n] for n in self.features)

    def _read_last(self, logits: Tensor) -> Tensor:
        """The input of the module that made the logits; what the last module made, where none did (tied weights)."""
        width = self._inputs[0].shape[-1]
        given, made = self._last[-1]
        if given is not None and made.shape[-1] == logits.shape[-1] and given.shape[-1] == width:
            return given
        if made.shape[-1] != width:
            raise CaptureError(
                f"features: expected the last module to make logits, or hidden states of {width}, got "
                f"{tuple(made.shape)}; let a module of its own (nn.Linear) make the logits"
            )
        return made


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first of three axes: hidden states come before everything else that layers get."""
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() == 3), None)
