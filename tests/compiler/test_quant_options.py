"""What may be asked for is taken as it is; everything else is refused with what was expected."""

import math
from typing import Any

import pytest

from octavo.compiler.errors import OptionError
from octavo.compiler.options import QuantConfig
from octavo.compiler.quant_options import needs_calibration, quant_config, uses_calibration


def test_a_mode_stands_for_its_configuration() -> None:
    assert quant_config(None) is None
    for mode in ("nvfp4", "nvfp4_weight_only", "fp8", "bf16", "auto", "auto_weight_only"):
        assert quant_config(mode) == QuantConfig(mode)
    config = QuantConfig("auto", "nvfp4", "gptq", "by_token", 1.0, 4.5, 0.1, ("*.o_proj",), ("lm_head",))
    assert quant_config(config) is config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "int4",
            "quantize: expected one of nvfp4, nvfp4_weight_only, fp8, bf16, auto, auto_weight_only, got 'int4'",
        ),
        (4, "quantize: expected a mode or a QuantConfig, got int"),
        (QuantConfig("w4a4"), "mode: expected one of nvfp4, .*, got 'w4a4'"),  # type: ignore[arg-type]
        ({"kv": "int8"}, "kv: expected one of bf16, fp8, nvfp4, got 'int8'"),
        ({"weights": "awq"}, "weights: expected one of nearest, search, gptq, got 'awq'"),
        ({"activations": "fast"}, "activations: expected one of static, by_token, got 'fast'"),
        (
            {"activations": "dynamic"},
            "activations: .*depend on the requests beside it, so neither batching nor",
        ),
        ({"headroom": 0.9}, "headroom: expected 1 or more, got 0.9"),
        ({"headroom": math.inf}, "headroom: expected 1 or more, got inf"),
        ({"bits": 4.4}, r"bits: expected 4\.5 \(NVFP4\) to 16, got 4\.4"),
        ({"bits": 16.5}, "bits: expected .* to 16, got 16.5"),
        ({"bits": math.nan}, "bits: expected .*, got nan"),
        ({"bits": "5"}, "bits: expected .*, got '5'"),
        ({"bits": True}, "bits: expected .*, got True"),
        ({"kl": -0.1}, "kl: expected 0 or more, got -0.1"),
        ({"keep": "lm_head"}, "keep: expected a tuple of globs of module paths, got 'lm_head'"),
        ({"include": ("",)}, r"include: expected a tuple of globs of module paths, got \('',\)"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=f"^{said}"):
        quant_config(QuantConfig(**given) if isinstance(given, dict) else given)


@pytest.mark.parametrize(
    ("config", "needs", "uses"),
    [
        (QuantConfig("nvfp4"), 'activations="static"', True),
        (QuantConfig("nvfp4", activations="by_token"), "", True),
        (QuantConfig("nvfp4", activations="by_token", weights="nearest"), "", False),
        (QuantConfig("nvfp4_weight_only"), "", True),
        (QuantConfig("nvfp4_weight_only", weights="nearest"), "", False),
        (QuantConfig("nvfp4_weight_only", weights="gptq"), 'weights="gptq"', True),
        (QuantConfig("fp8"), "", False),
        (QuantConfig("fp8", weights="gptq"), "", False),
        (QuantConfig("fp8", kv="fp8"), 'kv="fp8"', True),
        (QuantConfig("bf16"), "", False),
        (QuantConfig("bf16", kv="nvfp4"), 'kv="nvfp4"', True),
        (QuantConfig("auto", activations="by_token"), 'mode="auto"', True),
        (QuantConfig("auto_weight_only"), 'mode="auto_weight_only"', True),
    ],
)
def test_what_needs_calibration(config: QuantConfig, needs: str, uses: bool) -> None:
    reason = needs_calibration(config)
    assert reason.startswith(needs) and bool(reason) is bool(needs)
    assert uses_calibration(config) is uses
