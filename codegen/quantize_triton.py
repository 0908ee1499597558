"""Quantisation to NVFP4 and FP8 of the Triton family: kernels by themselves, and what fused ones share."""

from octavo.codegen.corner import Corner
from octavo.codegen.kernel import Arg, KernelSpec, Param
from octavo.codegen.specs_triton import ceil_div, pointer, power_of_2, warps_for
from octavo.compiler.dims import ITEM_BYTES
from octavo.compiler.program import Dim
from octavo.compiler.target import Target

BLOCK_ELEMENTS = 16


def has_fp4_conversion(target: Target) -> bool:
    """Whether the arch converts between E2M1 and wider types by itself: sm_100a and newer."""
    return target.arch is not None and target.arch >= 100


def scale_bytes(rows: Dim, k: int) -> str:
    """Bytes of the scales of `rows` rows in the 128 x 4 layout, as an expression."""
    return f"(({rows}) + 127) // 128 * {512 * ceil_div(k, 64)}"


def nvfp4_results(code: str, scale: str) -> tuple[Arg, Arg]:
    return pointer(code, "u8"), pointer(scale, "fp8")


def quantize_nvfp4_spec(count: Dim, k: int, dtype: str, target: Target) -> KernelSpec:
    """x (count, k) -> out_0 (count, k / 2) codes, out_1 scales in the 128 x 4 layout."""
    block = min(power_of_2(k), 2048)
    has_hardware = has_fp4_conversion(target)
    params: tuple[tuple[str, Param], ...] = (
        ("dtype", dtype), ("K", k), ("BLOCK", block), ("HW", has_hardware),
    )  # fmt: skip
    return KernelSpec(
        op="quantize_nvfp4",
        template="triton/quantize_nvfp4.py.jinja",
        params=params,
        args=(pointer("x", dtype), pointer("outer", "fp32"), *nvfp4_results("out_0", "out_1")),
        grid=(str(count), str(ceil_div(k, block)), "1"),
        bytes=f"({count}) * {k * ITEM_BYTES[dtype] + k // 2 + k // BLOCK_ELEMENTS}",
        flops=f"({count}) * {4 * k}",
        num_warps=warps_for(block),
        label=f"{dtype}_k{k}",
        features=("fp4_convert",),
    )


CORNERS: tuple[Corner, ...] = (
    Corner("quantize_nvfp4 k4096", lambda target: quantize_nvfp4_spec("T", 4096, "bf16", target)),
    Corner("quantize_nvfp4 fp32 k144", lambda target: quantize_nvfp4_spec("T", 144, "fp32", target)),
)
