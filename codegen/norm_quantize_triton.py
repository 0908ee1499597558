"""Norms and gated activations of the Triton family that quantise what they make, before it reaches memory."""

from dataclasses import replace

from octavo.codegen.corner import Corner
from octavo.codegen.kernel import KernelSpec, Param, pointer
from octavo.codegen.quantize_triton import FORMATS, LIMITS, Quantization, numbered, quantize_spec
from octavo.codegen.specs_triton import rms_norm_spec
from octavo.compiler.pointwise import ACTIVATIONS
from octavo.compiler.program import ITEM_BYTES, Dim
from octavo.compiler.target import Target


def rms_norm_quantize_spec(
    count: Dim, hidden: int, dtype: str, eps: float, offset: float, residual: bool,
    quantization: Quantization, target: Target, keep: bool = False, weight_dtype: str = "",
) -> KernelSpec:  # fmt: skip
    """rms_norm or add_rms_norm whose rows are quantised after they were rounded to dtype.

    Results in order: quantization.results, with keep the rows themselves, with residual the sum. An outer scale
    that is given is the argument `outer`, (1,) fp32 and at least 2^-80.
    """
    quantization.check(hidden)
    plain = rms_norm_spec(count, hidden, dtype, eps, offset, residual, weight_dtype)
    is_input = [not arg.name.startswith("out") for arg in plain.args]
    inputs = [arg for arg, is_one in zip(plain.args, is_input, strict=True) if is_one]
    rows = [dtype] * (keep + residual)
    results = list(numbered((*quantization.results, *rows)))
    # in the kernel the outer scale comes first, whether it is read or written
    outer = results.pop(len(quantization.results) - 1) if quantization.by_token else pointer("outer", "fp32")
    replaced: dict[str, Param] = {
        "quantize": quantization.format,
        "by_token": quantization.by_token,
        "keep": keep,
    }
    numbers = (("LIMIT", LIMITS[quantization.format]), ("HW", quantization.hardware(target)))
    item = hidden * ITEM_BYTES[dtype]
    row_bytes = (2 * residual + 1 + keep) * item + quantization.row_bytes(hidden)
    return replace(
        plain,
        op=f"{plain.op}_quantize_{quantization.format}",
        params=(*((name, replaced.get(name, value)) for name, value in plain.params), *numbers),
        args=(*inputs, outer, *results),
        bytes=f"({count}) * {row_bytes} + {item}",
        flops=f"({count}) * {(9 if residual else 8) * hidden}",
        label=f"{plain.label}_{quantization.label}{'_keep' if keep else ''}",
        features=quantization.features,
    )


def act_mul_quantize_spec(
    count: Dim, intermediate: int, dtype: str, activation: str, quantization: Quantization, target: Target
) -> KernelSpec:
    """act_mul whose rows are quantised after they were rounded to dtype: gate_up -> quantization.results."""
    return quantize_spec(count, intermediate, dtype, quantization, target, activation)


def _norm(
    hidden: int, quantization: Quantization, dtype: str = "bf16", residual: bool = True, keep: bool = False
) -> Corner:
    words = ["add_rms_norm" if residual else "rms_norm", dtype, f"h{hidden}", quantization.label]
    return Corner(
        " ".join(words + ["keep"] * keep),
        lambda target: rms_norm_quantize_spec(
            "T", hidden, dtype, 1e-5, 0.0, residual, quantization, target, keep
        ),
    )


def _act_mul(
    intermediate: int, quantization: Quantization, activation: str = "silu", dtype: str = "bf16"
) -> Corner:
    return Corner(
        f"act_mul {activation} {dtype} i{intermediate} {quantization.label}",
        lambda target: act_mul_quantize_spec("T", intermediate, dtype, activation, quantization, target),
    )


NVFP4, NVFP4_TOKEN, FP8, FP8_TOKEN = FORMATS
# Hidden sizes of SmolLM2, gpt-oss, Llama-3-8B, DeepSeek-V3, Llama-3-70B and the widest row; their intermediates.
CORNERS: tuple[Corner, ...] = (
    *(_norm(hidden, NVFP4) for hidden in (576, 2880, 4096, 7168, 8192, 16384)),
    *(_norm(hidden, form) for form in FORMATS[1:] for hidden in (4096, 7168, 16384)),
    *(_norm(7168, form, residual=False) for form in FORMATS),
    *(_norm(7168, form, keep=True) for form in FORMATS),
    _norm(16384, NVFP4, dtype="fp32", keep=True),
    _norm(100, FP8_TOKEN, dtype="fp32", residual=False),
    *(_act_mul(intermediate, form) for form in FORMATS for intermediate in (1536, 14336, 18432, 2048)),
    *(_act_mul(14336, form, activation) for form in (NVFP4, FP8_TOKEN) for activation in ACTIVATIONS[1:]),
    _act_mul(144, NVFP4, dtype="fp32"),
    _act_mul(100, FP8, dtype="fp32"),
)
