"""Options of the command line -> a QuantConfig, or a refusal of one that would do nothing."""

from pathlib import Path
from typing import Any

import pytest
import typer

from octavo.compiler.cli_precision import Methods, Modes, Pages, config_of
from octavo.compiler.options import QuantConfig
from octavo.compiler.quant_options import quant_config

NOTHING: dict[str, Any] = dict.fromkeys(
    ("quantize", "kv", "weights", "bits", "calibration", "keep", "include")
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"kv": Pages.bf16}, None),
        ({"quantize": Modes.nvfp4}, QuantConfig()),
        ({"quantize": Modes.fp8, "kv": Pages.nvfp4}, QuantConfig("fp8", "nvfp4")),
        ({"kv": Pages.fp8, "calibration": Path("a"), "keep": ["a"]}, QuantConfig("bf16", "fp8", keep=("a",))),
        (
            {
                "quantize": Modes.auto,
                "bits": 5.0,
                "weights": Methods.gptq,
                "keep": ["a", "b"],
                "include": ["c"],
            },
            QuantConfig("auto", weights="gptq", bits=5.0, keep=("a", "b"), include=("c",)),
        ),
    ],
)
def test_options_stand_for_a_configuration(given: dict[str, Any], expected: QuantConfig | None) -> None:
    assert config_of(**{**NOTHING, **given}) == expected


@pytest.mark.parametrize("mode", Modes)
def test_every_mode_is_one_of_the_compilers(mode: Modes) -> None:
    config = config_of(**{**NOTHING, "quantize": mode})
    assert config is not None and quant_config(config) == config
    assert config.mode == mode.value.replace("-", "_")


@pytest.mark.parametrize(
    ("given", "hint", "said"),
    [
        ({"weights": Methods.gptq}, "--weights", "expected --quantize beside it"),
        ({"bits": 5.0}, "--bits", "expected --quantize beside it"),
        ({"calibration": Path("a")}, "--calibration", "expected --quantize beside it"),
        ({"keep": ["a"]}, "--keep", "expected --quantize beside it"),
        ({"include": ["a"], "kv": Pages.bf16}, "--include", "expected --quantize beside it"),
        ({"weights": Methods.gptq, "kv": Pages.fp8}, "--weights", "expected --quantize beside it"),
        ({"bits": 5.0, "quantize": Modes.nvfp4}, "--bits", "expected --quantize auto beside it, got nvfp4"),
    ],
)
def test_options_that_would_do_nothing_are_refused(given: dict[str, Any], hint: str, said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said) as error:
        config_of(**{**NOTHING, **given})
    assert error.value.param_hint == hint
