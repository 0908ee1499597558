"""What `quantize=` may be given, and what calibration that asks for."""

import math
from typing import Any, get_args

from octavo.compiler.errors import OptionError
from octavo.compiler.options import Mode, OuterScales, PageFormat, QuantConfig, WeightMethod

LEAST_BITS, MOST_BITS = 4.5, 16.0
CHOICES: dict[str, tuple[str, ...]] = {
    "mode": get_args(Mode), "kv": get_args(PageFormat), "weights": get_args(WeightMethod),
    "activations": get_args(OuterScales),
}  # fmt: skip


def quant_config(quantize: str | QuantConfig | None) -> QuantConfig | None:
    """The configuration that a mode stands for, checked. Raises OptionError naming the option."""
    if quantize is None:
        return None
    if isinstance(quantize, str):
        _check_choice("quantize", quantize, CHOICES["mode"])
        quantize = QuantConfig(quantize)  # type: ignore[arg-type]
    if not isinstance(quantize, QuantConfig):
        raise OptionError(f"quantize: expected a mode or a QuantConfig, got {type(quantize).__name__}")
    check_quant_config(quantize)
    return quantize


def check_quant_config(config: QuantConfig) -> None:
    """Raises OptionError for what is no choice, out of range, or not lossless when requests share a step."""
    if config.activations in ("dynamic", "tensor", "per_tensor"):
        raise OptionError(
            f"activations: expected static or by_token, got {config.activations!r}; a scale made of a whole tensor in "
            "every step would let a token's result depend on the requests beside it, so neither batching nor "
            "speculation would be lossless"
        )
    for name, choices in CHOICES.items():
        _check_choice(name, getattr(config, name), choices)
    _check_number("headroom", config.headroom, 1.0, math.inf, "1 or more")
    _check_number("bits", config.bits, LEAST_BITS, MOST_BITS, f"{LEAST_BITS} (NVFP4) to {MOST_BITS:g}")
    _check_number("kl", config.kl, 0.0, math.inf, "0 or more")
    for name in ("keep", "include"):
        globs = getattr(config, name)
        if not isinstance(globs, tuple) or not all(isinstance(glob, str) and glob for glob in globs):
            raise OptionError(f"{name}: expected a tuple of globs of module paths, got {globs!r}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _check_number(name: str, value: Any, least: float, most: float, said: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or not math.isfinite(value):
        raise OptionError(f"{name}: expected {said}, got {value!r}")


def needs_calibration(config: QuantConfig) -> str:
    """Why it cannot be done without calibration, or ""."""
    has_nvfp4 = config.mode not in ("fp8", "bf16")
    if config.is_auto:
        return f'mode="{config.mode}" measures what each format loses'
    if config.mode == "nvfp4" and config.activations == "static":
        return 'activations="static" takes its scales from what the model computes'
    if config.kv != "bf16":
        return f'kv="{config.kv}" takes its multipliers from keys and values'
    if has_nvfp4 and config.weights == "gptq":
        return 'weights="gptq" makes up for errors by what products read'
    return ""


def uses_calibration(config: QuantConfig) -> bool:
    """Whether it gets better by calibration: the search weighs errors by what products read."""
    has_nvfp4 = config.mode not in ("fp8", "bf16")
    return bool(needs_calibration(config)) or (has_nvfp4 and config.weights == "search")
