"""Corners of the kernels that work on whole rows or write 16- and 32-bit pages: sizes of models, and edges."""

from collections.abc import Callable

from octavo.codegen.corner import Corner
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.mla_triton import latent_write_spec
from octavo.codegen.specs_triton import (
    TRITON_CALLS,
    Heads,
    act_mul_spec,
    add_spec,
    gather_rows_spec,
    kv_write_spec,
    layer_norm_spec,
    pointwise_spec,
    rms_norm_spec,
    rope_kv_write_spec,
    rope_spec,
)
from octavo.compiler.pointwise import ACTIVATIONS

# SmolLM2, gpt-oss, Llama-3-8B, DeepSeek-V3, Llama-3-70B, the widest row.
HIDDEN = (576, 2880, 4096, 7168, 8192, 16384)
INTERMEDIATE = (1536, 2048, 14336, 18432)
# Llama-3-8B, gpt-oss; sizes that fill no tile; every query head on one key.
HEADS = (
    Heads(32, 8, 128, 128, 64),
    Heads(64, 8, 64, 64, 64),
    Heads(9, 3, 80, 48, 16),
    Heads(40, 1, 96, 96, 32),
)
OPERANDS = {"a": ("bf16", "rows"), "b": ("fp32", "column"), "c": ("bf16", "vector")}


def _corner(name: str, make: Callable[[], KernelSpec]) -> Corner:
    """A corner whose spec is the same on every target."""
    return Corner(name, lambda target: make())


def _gather(width: int, dtype: str) -> Corner:
    return _corner(
        f"embedding {dtype} w{width}",
        lambda: gather_rows_spec("embedding", "ids", "weight", "T", width, dtype),
    )


def _rms_norm(hidden: int, dtype: str, residual: bool) -> Corner:
    name = f"{'add_' if residual else ''}rms_norm {dtype} h{hidden}"
    return _corner(name, lambda: rms_norm_spec("T", hidden, dtype, 1e-5, 0.0, residual))


def _layer_norm(hidden: int, dtype: str, weights: dict[str, str]) -> Corner:
    name = " ".join(["layer_norm", dtype, f"h{hidden}", *weights])
    return _corner(name, lambda: layer_norm_spec("T", hidden, dtype, 1e-5, weights))


def _pointwise(name: str, width: int, expression: str, dtype: str) -> Corner:
    operands = {letter: OPERANDS[letter] for letter in OPERANDS if letter in name.split()[-1]}
    return _corner(
        f"pointwise {name} w{width}", lambda: pointwise_spec("T", width, operands, expression, dtype)
    )


def _act_mul(intermediate: int, dtype: str, activation: str) -> Corner:
    return _corner(
        f"act_mul {activation} {dtype} i{intermediate}",
        lambda: act_mul_spec("T", intermediate, dtype, activation),
    )


def _of_heads(heads: Heads, dtype: str, interleaved: bool) -> tuple[Corner, ...]:
    name = f"{dtype} {heads.label}{' interleaved' if interleaved else ''}"
    size = heads.head_dim
    return (
        _corner(f"rope {name}", lambda: rope_spec("T", heads.num_heads, size, size, dtype, interleaved)),
        _corner(f"kv_write {name}", lambda: kv_write_spec("T", heads, dtype)),
        _corner(f"rope_kv_write {name}", lambda: rope_kv_write_spec("T", heads, size, dtype, interleaved)),
    )


_EVERY_CALL = " + ".join(f"{name}(a)" for name in TRITON_CALLS) + " - b * c"
CORNERS: tuple[Corner, ...] = (
    *(_gather(hidden, "bf16") for hidden in HIDDEN),
    *(_gather(width, "fp32") for width in (1, 16384)),
    _corner(
        "gather_logits bf16 w4096",
        lambda: gather_rows_spec("gather_logits", "logit_rows", "hidden", "L", 4096, "bf16"),
    ),
    _corner("add bf16 w4096", lambda: add_spec("T", 4096, "bf16")),
    _corner("add fp32 w7", lambda: add_spec("T", 7, "fp32")),
    *(_rms_norm(hidden, "bf16", residual) for hidden in HIDDEN for residual in (False, True)),
    *(_rms_norm(hidden, "fp32", True) for hidden in (1, 16384)),
    *(_layer_norm(hidden, "bf16", {"weight": "bf16", "bias": "bf16"}) for hidden in HIDDEN),
    _layer_norm(16384, "fp32", {"weight": "fp32"}),
    _layer_norm(1000, "fp32", {}),
    _pointwise("every call abc", 4096, _EVERY_CALL, "bf16"),
    _pointwise("softcap a", 7, "20.0 * tanh(a / 20.0)", "fp32"),
    *(_act_mul(intermediate, "bf16", "silu") for intermediate in INTERMEDIATE),
    *(_act_mul(14336, "bf16", activation) for activation in ACTIVATIONS[1:]),
    _act_mul(7, "fp32", "gelu"),
    *(corner for heads in HEADS for corner in _of_heads(heads, "bf16", False)),
    *(corner for corner in _of_heads(HEADS[2], "fp32", True)),
    _corner("latent_write bf16 r512_64", lambda: latent_write_spec(512, 64, "bf16")),
    _corner("latent_write fp32 r40_12", lambda: latent_write_spec(40, 12, "fp32")),
)  # fmt: skip
