"""Writes to pages of FP8 and NVFP4 of the Triton family."""

from dataclasses import replace

from octavo.codegen.corner import Corner
from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.mla_triton import latent_write_spec
from octavo.codegen.quantize_triton import BLOCK_ELEMENTS, has_fp4_conversion
from octavo.codegen.specs_triton import (
    Heads,
    kv_write_spec,
    rope_kv_write_spec,
)
from octavo.compiler.program import ITEM_BYTES, Dim
from octavo.compiler.target import Target

PAGE_DTYPES = {"fp8": "fp8", "nvfp4": "u8"}
FEATURES = {"fp8": ("fp8_convert",), "nvfp4": ("fp4_convert", "fp8_convert")}


def kv_write_quantize_spec(count: Dim, heads: Heads, dtype: str, pages: str, target: Target) -> KernelSpec:
    """kv_write to pages "fp8" or "nvfp4": x / multiplier; multipliers (2,) fp32, of k and of v.

    The caches of NVFP4 hold codes, (pages, kv_heads, page_size, dim / 2), and k_scales and v_scales E4M3 scales,
    (pages, kv_heads, page_size, dim / 16), of which a multiplier is the outer scale: at least 2^-80.
    """
    width = heads.num_kv_heads * (heads.head_dim + heads.value_dim)
    plain = kv_write_spec(count, heads, dtype)
    spec = _with_pages(plain, heads, pages, target)
    return replace(spec, bytes=f"({count}) * {_token_bytes(width, width, dtype, pages) + 8}")


def rope_kv_write_quantize_spec(
    count: Dim, heads: Heads, rotary_dim: int, dtype: str, interleaved: bool, pages: str, target: Target
) -> KernelSpec:
    """rope_kv_write to the pages of kv_write_quantize_spec; k is rounded to dtype before it is quantised."""
    q = heads.num_heads * heads.head_dim
    kv = heads.num_kv_heads * (heads.head_dim + heads.value_dim)
    plain = rope_kv_write_spec(count, heads, rotary_dim, dtype, interleaved)
    spec = _with_pages(plain, heads, pages, target)
    tables = (q + 2 * rotary_dim) * ITEM_BYTES[dtype] + 16
    return replace(spec, bytes=f"({count}) * {_token_bytes(q + kv, kv, dtype, pages) + tables}")


def _token_bytes(read: int, written: int, dtype: str, pages: str) -> int:
    """Bytes of a token: elements read in dtype, elements written to pages."""
    codes = written // 2 + written // BLOCK_ELEMENTS if pages == "nvfp4" else written
    return read * ITEM_BYTES[dtype] + codes


def _with_pages(spec: KernelSpec, heads: Heads, pages: str, target: Target) -> KernelSpec:
    """The spec of a plain write with caches of another dtype, the multipliers before and scales behind them."""
    bad = [size for size in (heads.head_dim, heads.value_dim) if pages == "nvfp4" and size % BLOCK_ELEMENTS]
    if bad:
        raise ValueError(f"rows of NVFP4 pages must have a multiple of {BLOCK_ELEMENTS} elements, got {bad}")
    scales = (pointer("k_scales", "fp8"), pointer("v_scales", "fp8")) if pages == "nvfp4" else ()
    caches = {
        "k_cache": (pointer("multipliers", "fp32"), pointer("k_cache", PAGE_DTYPES[pages])),
        "v_cache": (pointer("v_cache", PAGE_DTYPES[pages]), *scales),
    }
    args: list[Arg] = []
    for arg in spec.args:
        args += caches.get(arg.name, (arg,))
    hardware = pages == "nvfp4" and has_fp4_conversion(target)
    return _reformed(replace(spec, args=tuple(args)), pages, {"pages": pages, "HW": hardware})


def _reformed(spec: KernelSpec, pages: str, values: dict[str, Param]) -> KernelSpec:
    return replace(
        spec,
        op=f"{spec.op}_quantize_{pages}",
        params=tuple((name, values.get(name, value)) for name, value in spec.params),
        label=f"{spec.label}_{pages}",
        features=FEATURES[pages],
    )


def latent_write_quantize_spec(rank: int, rope_dim: int, dtype: str) -> KernelSpec:
    """latent_write to FP8: both parts divided by one multiplier, the argument multiplier, (1,) fp32."""
    width = rank + rope_dim
    plain = latent_write_spec(rank, rope_dim, dtype)
    latent, k_rope, _, slots = plain.args
    args = (latent, k_rope, pointer("multiplier", "fp32"), pointer("cache", "fp8"), slots)
    spec = replace(plain, args=args, bytes=f"T * {width * (ITEM_BYTES[dtype] + 1) + 8}")
    return _reformed(spec, "fp8", {"pages": "fp8"})


LLAMA, GPT_OSS = Heads(32, 8, 128, 128, 64), Heads(64, 8, 64, 64, 64)
UNEVEN = Heads(9, 3, 80, 48, 16)


def _pages(heads: Heads, pages: str, dtype: str = "bf16") -> tuple[Corner, Corner]:
    name = f"{dtype} {heads.label} {pages}"
    rotary_dim = heads.head_dim
    return (
        Corner(f"kv_write {name}", lambda target: kv_write_quantize_spec("T", heads, dtype, pages, target)),
        Corner(
            f"rope_kv_write {name}",
            lambda target: rope_kv_write_quantize_spec("T", heads, rotary_dim, dtype, False, pages, target),
        ),
    )


# The heads of Llama-3-8B and gpt-oss and sizes that fill no tile; the latent of DeepSeek.
CORNERS: tuple[Corner, ...] = (
    *(
        corner
        for heads in (LLAMA, GPT_OSS, UNEVEN)
        for pages in PAGE_DTYPES
        for corner in _pages(heads, pages)
    ),
    *(corner for pages in PAGE_DTYPES for corner in _pages(LLAMA, pages, "fp32")),
    Corner("latent_write fp8 r512_64", lambda target: latent_write_quantize_spec(512, 64, "bf16")),
    Corner("latent_write fp32 fp8 r40_12", lambda target: latent_write_quantize_spec(40, 12, "fp32")),
)
