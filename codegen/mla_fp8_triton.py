"""Latent attention over FP8 pages of the Triton family: native products of FP8 where they serve, fp16 elsewhere."""

from dataclasses import replace
from typing import Any, NamedTuple

from octavo.codegen.attention_triton import num_splits, parts_scratch, splits_for
from octavo.codegen.corner import Corner
from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.linear_triton import with_param
from octavo.codegen.mla import HeadProduct, Latents
from octavo.codegen.mla_triton import MAX_RANK, head_linear_spec, joining_spec, mla_spec
from octavo.codegen.specs_triton import ceil_div, in_order, number, power_of_2, tiles, warps_for
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

# The tensor core of an arch with tensor memory, and that of sm_90, take FP8 from 64 rows on.
NATIVE_ROWS = 64
WIDE_ROWS = 128
SMALL_SMEM_BYTES = 128 * 1024


class Form(NamedTuple):
    """Keys per tile, warps, tiles in flight."""

    block_n: int
    num_warps: int
    stages: int


def fp8_refusal(latents: Latents, target: Target) -> str | None:
    """Why FP8 pages cannot serve, with what does."""
    if latents.rank > MAX_RANK:
        return f"a latent must have at most {MAX_RANK} elements, got {latents.rank}; expand it instead"
    if latents.dtype not in ("bf16", "fp16"):
        return f"queries must be bf16 or fp16 for FP8 pages, got {latents.dtype}; pages of fp32 serve"
    if target.arch is None or target.arch < 90:
        return f"E4M3 needs sm_90 or newer, {target.name} is sm_{target.arch}; pages of bf16 serve"
    return None


def mla_fp8_spec(latents: Latents, target: Target) -> KernelSpec:
    """A node's launches: queries to FP8 if they are multiplied so, then those of mla_triton.mla_spec."""
    rows = tile_rows(latents, target)
    parts = value_parts(rows)
    heads = ceil_div(latents.heads, min(latents.heads, rows)) * parts
    splits = splits_for(heads, target)
    joined = replace(joining_spec(latents, splits), when="T == R")
    decode = replace(decode_spec(latents, rows, splits, target), when="T == R")
    # few heads: several tokens fill a tile, where there are several
    many_rows = rows if is_small(target) else max(rows, NATIVE_ROWS)
    prefill = replace(prefill_spec(latents, many_rows, target), when="T > R")
    queries = (replace(queries_spec(latents), when="" if is_native(rows) else "T > R"),) * is_native(
        many_rows
    )
    launches = (*queries, decode, joined, prefill)
    # a node's workspace is that of its first launch
    scratch = tuple(entry for launch in launches for entry in launch.scratch)
    return in_order(replace(launches[0], scratch=scratch), *launches[1:])


def tile_rows(latents: Latents, target: Target) -> int:
    """Rows of a tile: all heads up to 128 where shared memory holds them, 16 where it is small."""
    if is_small(target):
        return 16
    wanted = power_of_2(latents.heads, 16)
    return min(wanted, WIDE_ROWS if target.tmem_columns else NATIVE_ROWS)


def is_small(target: Target) -> bool:
    """Whether shared memory holds no tile of 64 rows of queries and two of keys."""
    return (target.smem_bytes or 0) < SMALL_SMEM_BYTES


def is_native(rows: int) -> bool:
    return rows >= NATIVE_ROWS


def value_parts(rows: int) -> int:
    """128 rows of 512 sums fill the tensor memory by themselves: two programs then, of half the values each."""
    return 2 if rows == WIDE_ROWS else 1


def queries_spec(latents: Latents) -> KernelSpec:
    """q_latent, q_rope -> q (T, heads, rank + rope_dim) E4M3 and q_scale (T, heads) fp32."""
    block_h = min(power_of_2(latents.heads), 4)
    block_r = power_of_2(latents.rank, 16)
    return KernelSpec(
        op="paged_mla_attention",
        template="triton/latent_queries_fp8.py.jinja",
        params=(
            ("dtype", latents.dtype), ("NUM_HEADS", latents.heads), ("RANK", latents.rank),
            ("ROPE_DIM", latents.rope_dim), ("BLOCK_H", block_h), ("BLOCK_R", block_r),
            ("BLOCK_E", power_of_2(latents.rope_dim, 16)),
        ),
        args=(
            pointer("q_latent", latents.dtype), pointer("q_rope", latents.dtype), pointer("q", "fp8"),
            pointer("q_scale", "fp32"),
        ),
        grid=("T", str(ceil_div(latents.heads, block_h)), "1"),
        bytes=f"T * {latents.heads * (latents.width * (ITEM_BYTES[latents.dtype] + 1) + 4)}",
        flops=f"T * {3 * latents.heads * latents.width}",
        num_warps=warps_for(block_h * block_r),
        label=latents.label,
        features=("fp8_convert",),
        scratch=(
            ("q", "fp8", ("T", latents.heads, latents.width)), ("q_scale", "fp32", ("T", latents.heads)),
        ),
    )  # fmt: skip


def decode_spec(latents: Latents, rows: int, splits: int, target: Target) -> KernelSpec:
    parts = num_splits(splits)
    heads = min(latents.heads, rows)
    written = (pointer("partial", "fp32"), pointer("lse", "fp32"), number("num_splits", parts))
    programs = ceil_div(latents.heads, heads) * value_parts(rows)
    row_bytes = latents.heads * (latents.width * _query_bytes(latents, rows) + latents.rank * 4)
    return _spec(
        latents, rows, target, True, written,
        grid=("R", str(programs), parts),
        bytes=f"S * {latents.width} + R * {row_bytes}",
        flops=f"S * {latents.flops_of_key}",
        iterations=f"(S // BLOCK_N + R) * {programs}",
        scratch=parts_scratch("R", latents.heads, parts, latents.rank),
    )  # fmt: skip


def prefill_spec(latents: Latents, rows: int, target: Target) -> KernelSpec:
    """flops are those of T queries that see S keys between them; a causal square needs half."""
    heads = min(latents.heads, rows)
    tokens = rows // heads
    written = (pointer("cu_seqlens_q", "i32"), pointer("out", latents.dtype), number("num_requests", "R"))
    programs = ceil_div(latents.heads, heads) * value_parts(rows)
    row_bytes = latents.width * _query_bytes(latents, rows) + latents.rank * ITEM_BYTES[latents.dtype]
    return _spec(
        latents, rows, target, False, written,
        grid=(f"T // {tokens} + R", str(programs), "1"),
        bytes=f"T * {latents.heads * row_bytes} + S * {latents.width}",
        flops=f"T * S * {latents.flops_of_key}",
        iterations=f"(T // {tokens} + R) * ((S - T // 2) // (R * BLOCK_N) + 1) * {programs}",
    )  # fmt: skip


def _query_bytes(latents: Latents, rows: int) -> int:
    return 1 if is_native(rows) else ITEM_BYTES[latents.dtype]


def _spec(
    latents: Latents, rows: int, target: Target, split: bool, written: tuple[Arg, ...], **rest: Any
) -> KernelSpec:
    params: tuple[tuple[str, Param], ...] = (
        ("dtype", latents.dtype), ("pages", "fp8"), ("native", is_native(rows)), ("split", split),
        ("softcap", latents.softcap > 0.0), ("SCALE", latents.scale), ("SOFTCAP", latents.softcap),
        ("WINDOW", latents.window), ("NUM_HEADS", latents.heads), ("RANK", latents.rank),
        ("ROPE_DIM", latents.rope_dim), ("PAGE_SIZE", latents.page_size), ("HEADS", min(latents.heads, rows)),
        ("BLOCK_M", rows), ("BLOCK_R", power_of_2(latents.rank, 16)), ("BLOCK_E", power_of_2(latents.rope_dim, 16)),
        ("PARTS", value_parts(rows)),
    )  # fmt: skip
    spec = KernelSpec(
        op="paged_mla_attention",
        template="triton/paged_mla_fp8.py.jinja",
        params=params,
        args=written,
        label=f"{latents.label}_fp8_{'decode' if split else 'prefill'}",
        **rest,
    )
    # sums in tensor memory pass through the registers in two halves; sums in registers stay where they are
    pieces = 2 if target.tmem_columns and is_native(rows) else 1
    first, *others = (
        _form(spec, latents, rows, form, tma, pieces) for form, tma in forms(latents, rows, target)
    )
    return replace(first, alternatives=tuple(others))


def forms(latents: Latents, rows: int, target: Target) -> tuple[tuple[Form, bool], ...]:
    """(form, whether pages come by tensor maps), best first."""
    if is_native(rows):
        few_keys = (Form(32, 8, 3), Form(32, 8, 2), Form(32, 8, 1))
        # rows of several tokens have a position each, in registers that 64 keys do not leave
        sizes: tuple[Form, ...] = few_keys if latents.heads < rows else (Form(64, 8, 2), *few_keys)
    else:
        sizes = (
            Form(64, 8, 2),
            Form(32, 8, 2),
            Form(32, 4, 2),
            Form(32, 8, 1),
            Form(16, 8, 1),
            Form(16, 4, 1),
        )
    tma = tuple((form, True) for form in sizes if takes_tma(latents, rows, form.block_n))
    return (*tma, *((form, False) for form in (*sizes, Form(16, 8, 1))))


def takes_tma(latents: Latents, rows: int, block_n: int) -> bool:
    """Whether tiles of keys lie in one page, rows of queries behind each other, and both have whole 16-byte pieces."""
    sizes = (latents.rank, latents.rope_dim)
    is_whole = all(size % 16 == 0 and size == power_of_2(size) for size in sizes)
    return is_whole and latents.page_size % block_n == 0 and rows % min(latents.heads, rows) == 0


def _form(spec: KernelSpec, latents: Latents, rows: int, form: Form, tma: bool, pieces: int) -> KernelSpec:
    native = is_native(rows)
    numbers = {"tma": tma, "BLOCK_N": form.block_n, "PIECES": pieces, "STAGES": form.stages}
    for name, value in numbers.items():
        spec = with_param(spec, name, value)
    return replace(
        spec,
        args=(*_tensors(latents, rows, form.block_n if tma else 0), *spec.args, number("max_pages", "P")),
        features=(*["tma_load"] * tma, *["mma_fp8"] * native, *["fp8_convert"] * (not native)),
        iterations=spec.iterations.replace("BLOCK_N", str(form.block_n)),
        num_warps=form.num_warps,
        num_stages=form.stages,
    )


def _tensors(latents: Latents, rows: int, block_n: int) -> tuple[Arg, ...]:
    """Queries and pages, as tensor maps of block_n keys unless 0, with what they are multiplied by."""
    widths = (power_of_2(latents.rank, 16), power_of_2(latents.rope_dim, 16))
    pages: tuple[Arg, ...] = (pointer("cache", "fp8"),)
    queries: tuple[Arg, ...] = (pointer("q_latent", latents.dtype), pointer("q_rope", latents.dtype))
    if is_native(rows):
        queries = (pointer("q", "fp8"), pointer("q_scale", "fp32"))
    if block_n:
        shape = ("num_pages", latents.page_size, latents.width)
        boxes = (*widths, widths[0] // value_parts(rows))
        pages = tuple(tiles("cache", "fp8", shape, (1, block_n, width)) for width in boxes)
    if block_n and is_native(rows):
        all_rows = (f"T * {latents.heads}", latents.width)
        maps = tuple(tiles("q", "fp8", all_rows, (rows, width)) for width in widths)
        queries = (*maps, pointer("q_scale", "fp32"))
    lists = pointer("page_table", "i32"), pointer("seq_lens", "i32")
    return (*queries, *pages, pointer("multiplier", "fp32"), *lists)


def _fp8_corner(name: str, latents: Latents) -> Corner:
    return Corner(
        f"MLA FP8 {name}",
        lambda target: mla_fp8_spec(latents, target),
        lambda target: fp8_refusal(latents, target),
    )


def _corner(name: str, latents: Latents) -> Corner:
    return Corner(f"MLA {name}", lambda target: mla_spec(latents, target))


def _product_corner(name: str, product: HeadProduct) -> Corner:
    return Corner(f"head_linear {name}", lambda target: head_linear_spec(product))


DEEPSEEK = Latents(128, 512, 64, 64, "bf16", "fp8", 192**-0.5)
BF16 = replace(DEEPSEEK, cache_dtype="bf16")
CORNERS: tuple[Corner, ...] = (
    _fp8_corner("128 heads", DEEPSEEK),
    _fp8_corner("64 heads", replace(DEEPSEEK, heads=64)),
    _fp8_corner("16 heads", replace(DEEPSEEK, heads=16)),
    _fp8_corner("128 heads, pages of 32", replace(DEEPSEEK, page_size=32)),
    _fp8_corner("128 heads, pages of 16", replace(DEEPSEEK, page_size=16)),
    _fp8_corner(
        "16 heads, pages of 16, window, softcap",
        replace(DEEPSEEK, heads=16, page_size=16, window=1024, softcap=50.0),
    ),
    _fp8_corner("5 heads of odd sizes", Latents(5, 96, 24, 64, "fp16", "fp8", 0.1)),
    _fp8_corner("fp32", replace(DEEPSEEK, dtype="fp32")),
    _corner("128 heads", BF16),
    _corner("64 heads", replace(BF16, heads=64)),
    _corner("16 heads, pages of 16", replace(BF16, heads=16, page_size=16)),
    _corner("128 heads, pages of 32", replace(BF16, page_size=32)),
    _product_corner("into the latent", HeadProduct(128, 512, 128, "bf16", "bf16")),
    _product_corner("out of the latent", HeadProduct(128, 128, 512, "bf16", "bf16")),
    _product_corner("odd, into fp32", HeadProduct(5, 12, 36, "bf16", "fp32", "L")),
    _product_corner("fp32, odd", HeadProduct(5, 12, 36, "fp32", "fp32")),
)
