"""What a target has no tensor core for is refused before anything else is done, with what it has."""

import pytest

import octavo
from octavo.compiler.errors import OptionError
from octavo.compiler.options import Mode
from octavo.compiler.target import load_target, target_names
from octavo.compiler.target_formats import check_target

HOPPER = ("h100", "h200")


@pytest.mark.parametrize("mode", ["nvfp4", "auto"])
@pytest.mark.parametrize("target", HOPPER)
def test_hopper_has_no_fp4_activations(mode: Mode, target: str) -> None:
    said = (
        rf"quantize: expected a mode that {target} has kernels for "
        rf"\(nvfp4_weight_only, fp8, bf16, auto_weight_only\), got '{mode}': "
        r"sm_90 has no NVFP4 tensor core, so activations cannot be NVFP4"
    )
    with pytest.raises(OptionError, match=said):
        check_target(mode, load_target(target))


def test_every_other_mode_is_served() -> None:
    for target in target_names():
        for mode in ("nvfp4", "nvfp4_weight_only", "fp8", "bf16", "auto", "auto_weight_only"):
            if target not in HOPPER or mode not in ("nvfp4", "auto"):
                check_target(mode, load_target(target))


def test_compile_says_so_before_it_looks_at_the_model() -> None:
    with pytest.raises(OptionError, match="got 'nvfp4': sm_90 has no NVFP4 tensor core"):
        octavo.compile(None, "h100", quantize="nvfp4")  # type: ignore[arg-type]
