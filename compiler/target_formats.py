"""Which modes of quantisation a target has kernels for: known before anything is captured or calibrated."""

from typing import get_args

from octavo.compiler.errors import OptionError
from octavo.compiler.options import Mode
from octavo.compiler.target import Target

# Modes that multiply codes of a format with each other -> the rate of the target that says it can.
_RATES = {"nvfp4": "nvfp4", "auto": "nvfp4", "fp8": "fp8", "auto_weight_only": "fp8"}


def check_target(mode: str, target: Target, whose: str = "quantize") -> None:
    """Raises OptionError for a mode that the target's tensor cores cannot serve, naming those that they can.

    mode   of QuantConfig, or the format of a product
    whose  what asks for it
    """
    if not _is_served(mode, target):
        served = ", ".join(mode for mode in get_args(Mode) if _is_served(mode, target))
        raise OptionError(
            f"{whose}: expected a mode that {target.name} has kernels for ({served}), got {mode!r}: sm_"
            f"{target.arch} has no {_RATES[mode].upper()} tensor core, so activations cannot be "
            f"{_RATES[mode].upper()}"
        )


def _is_served(mode: str, target: Target) -> bool:
    """Host code serves every mode, and products of 16 bits with weights of NVFP4 every GPU."""
    return target.family == "cpp" or mode not in _RATES or _RATES[mode] in target.flops


def layout_of(target: Target) -> str:
    """Of block scales, as the target's kernels read them."""
    return "linear" if target.family == "cpp" else "swizzled_128x4"
