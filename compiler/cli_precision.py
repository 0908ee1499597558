"""The options of `octavo compile` that say what is quantised, and the configuration that they stand for."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from octavo.compiler.options import CarveConfig, Mode, QuantConfig


class Modes(StrEnum):
    nvfp4 = "nvfp4"
    nvfp4_weight_only = "nvfp4-weight-only"
    fp8 = "fp8"
    auto = "auto"
    auto_weight_only = "auto-weight-only"


AUTO = (Modes.auto, Modes.auto_weight_only)


class Pages(StrEnum):
    bf16 = "bf16"
    fp8 = "fp8"
    nvfp4 = "nvfp4"


class Methods(StrEnum):
    nearest = "nearest"
    search = "search"
    gptq = "gptq"


Quantize = Annotated[
    Modes | None,
    typer.Option(
        help="nvfp4: weights and activations in 4 bits; nvfp4-weight-only; fp8; auto: each layer's format by what it "
        "would lose; auto-weight-only: likewise, four-bit products reading 16-bit inputs. Default: the model's dtype."
    ),
]
KV = Annotated[
    Pages | None, typer.Option(help="Of the KV pages; also without --quantize. Default: the model's dtype.")
]
Weights = Annotated[
    Methods | None,
    typer.Option(
        help="nearest: scales of the largest elements; search: of least error; gptq: errors made up for. Default: "
        "search."
    ),
]
Bits = Annotated[
    float | None, typer.Option(help="auto: most bits of a weight's element, on average. Default: 5.4.")
]
Calibration = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text like that which will be served. Default: a text of Octavo's."),
]


def carve_of(text: str) -> CarveConfig:
    """Raises typer.BadParameter for what is not three whole numbers."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"expected E,S,K such as 8,2,3, got {text}")
    num_experts, num_shared, top_k = map(int, parts)
    return CarveConfig(num_experts, num_shared, top_k)


Carve = Annotated[
    CarveConfig | None,
    typer.Option(
        parser=carve_of,
        metavar="E,S,K",
        help="Cut dense FFNs into E experts: S shared ones, and K of the others for each token. Exact if S + K = E.",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Modules that stay as they are; may be given again."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Modules to quantise that would stay, as lm_head; may be given again."),
]


_MODES: dict[Modes, Mode] = {
    Modes.nvfp4: "nvfp4",
    Modes.nvfp4_weight_only: "nvfp4_weight_only",
    Modes.fp8: "fp8",
    Modes.auto: "auto",
    Modes.auto_weight_only: "auto_weight_only",
}


def config_of(
    quantize: Modes | None, kv: Pages | None, weights: Methods | None, bits: float | None,
    calibration: Path | None, keep: list[str] | None, include: list[str] | None,
) -> QuantConfig | None:  # fmt: skip
    """None where nothing is quantised. Raises typer.BadParameter for an option that would do nothing."""
    given = {"--calibration": calibration, "--keep": keep, "--include": include}
    of_products = {"--weights": weights, "--bits": bits}
    idle = (
        {} if quantize is not None else of_products if kv not in (None, Pages.bf16) else given | of_products
    )
    for name, value in idle.items():
        if value:
            raise typer.BadParameter("expected --quantize beside it", param_hint=name)
    if bits is not None and quantize not in AUTO:
        raise typer.BadParameter(f"expected --quantize auto beside it, got {quantize}", param_hint="--bits")
    if quantize is None and kv in (None, Pages.bf16):
        return None
    default = QuantConfig()
    return QuantConfig(
        mode="bf16" if quantize is None else _MODES[quantize],
        kv=default.kv if kv is None else kv.value,
        weights=default.weights if weights is None else weights.value,
        bits=default.bits if bits is None else bits,
        keep=tuple(keep or ()),
        include=tuple(include or ()),
    )
