"""The order by expert of the Triton family: its places, rows put into it, and the sum over a token's experts."""

from dataclasses import replace

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.moe_grouped import Places
from octavo.codegen.quantize_triton import has_fp4_conversion
from octavo.codegen.specs_triton import ceil_div, number, power_of_2, warps_for
from octavo.compiler.program import ITEM_BYTES, Dim
from octavo.compiler.target import Target

# Pairs that are counted together: with no more than that, one launch does.
COUNTED = 1024
CHUNK = 64
# Bits of an element of a converted row, with its share of a scale.
ROW_BITS = {"nvfp4": 4.5, "fp8": 8, "fp16": 16}


def permute_specs(places: Places) -> tuple[KernelSpec, ...]:
    """The launches that write place, tile_expert and num_tiles: one up to COUNTED pairs, else two."""
    few, many = f"{places.pairs} <= {COUNTED}", f"{places.pairs} > {COUNTED}"
    return (
        replace(place_spec(places, counted=False), when=few),
        replace(count_spec(places), when=many),
        replace(place_spec(places, counted=True), when=many),
    )


def _expert_params(places: Places) -> tuple[tuple[str, Param], ...]:
    return ("NUM_EXPERTS", places.experts), ("BLOCK_E", power_of_2(places.experts, 32)), ("BLOCK", COUNTED)


def count_spec(places: Places) -> KernelSpec:
    blocks = f"({places.pairs} + {COUNTED - 1}) // {COUNTED}"
    return KernelSpec(
        op="moe",
        template="triton/moe_count.py.jinja",
        params=_expert_params(places),
        args=(pointer("experts", "i64"), pointer("counts", "i32"), number("num_pairs", places.pairs)),
        grid=(blocks, "1", "1"),
        bytes=f"{places.pairs} * 8 + ({blocks}) * {4 * power_of_2(places.experts, 32)}",
        num_warps=4,
        label=f"e{places.experts}",
    )


def place_spec(places: Places, counted: bool) -> KernelSpec:
    """One program more than chunks of pairs where those are whole, so that there is one without a pair too."""
    block_e = power_of_2(places.experts, 32)
    counts = (pointer("counts", "i32"),) if counted else ()
    programs = f"({places.pairs} // {CHUNK} + 1)"
    return KernelSpec(
        op="moe",
        template="triton/moe_permute.py.jinja",
        params=(
            ("counted", counted), *_expert_params(places), ("CHUNK", CHUNK), ("ROWS", min(max(4096 // block_e, 1), 16)),
            ("TILE", places.tile),
        ),
        args=(
            pointer("experts", "i64"), *counts, pointer("place", "i32"), pointer("tile_expert", "i32"),
            pointer("num_tiles", "i32"), number("num_pairs", places.pairs),
        ),
        grid=(programs, "1", "1"),
        bytes=f"{places.pairs} * 12 + {places.tiles} * 4",
        num_warps=8,
        label=f"e{places.experts}_m{places.tile}{'_counted' if counted else ''}",
        iterations=f"{programs} * {COUNTED // CHUNK}",
    )  # fmt: skip


def quantize_rows_spec(
    places: Places, kind: str, k: int, dtype: str, x: str, rows: str, target: Target, in_order: bool = False
) -> KernelSpec:
    """x -> rows and rows_scale in the order by expert, as `kind`: nvfp4, fp8, or fp16, which has no scale.

    in_order: x is in that order already: a program for each row that there may be
    """
    block = power_of_2(k) if kind == "fp8" else min(power_of_2(k), 2048)
    top_k, count = (1, places.rows) if in_order else (places.top_k, str(places.count))
    outer = (pointer(f"{x}_outer", "fp32"),) if kind == "nvfp4" else ()
    results = {
        "nvfp4": (pointer(rows, "u8"), pointer(f"{rows}_scale", "fp8")),
        "fp8": (pointer(rows, "fp8"), pointer(f"{rows}_scale", "fp32")),
        "fp16": (pointer(rows, "fp16"),),
    }[kind]
    source: tuple[Arg, ...] = (pointer("num_tiles" if in_order else "place", "i32"),)
    return KernelSpec(
        op="moe",
        template="triton/moe_quantize.py.jinja",
        params=(
            ("dtype", dtype), ("kind", kind), ("in_order", in_order), ("TOP_K", top_k), ("TILE", places.tile), ("K", k),
            ("BLOCK", block), ("HW", has_fp4_conversion(target)),
        ),
        args=(pointer(x, dtype), *source, *outer, *results),
        grid=(count, str(ceil_div(k, block)), "1"),
        bytes=f"({count}) * {k * ITEM_BYTES[dtype] + top_k * int(k * ROW_BITS[kind]) // 8 + 4 * top_k}",
        flops=f"({count}) * {4 * k}",
        num_warps=warps_for(block),
        label=f"{kind}_{dtype}_k{k}{'_in_order' if in_order else f'_of{top_k}'}",
        features=("fp4_convert",) * (kind == "nvfp4"),
    )  # fmt: skip


def placed_sum_spec(
    count: Dim,
    top_k: int,
    width: int,
    dtype: str,
    part_dtype: str,
    weighted: bool = True,
    shared: bool = False,
) -> KernelSpec:
    """out[t, :] = shared[t, :] + the sum of top_k rows place[t, k] of parts, times weights[t, k] if weighted."""
    block = min(power_of_2(width), 1024)
    part, item = ITEM_BYTES[part_dtype] * width, ITEM_BYTES[dtype] * width
    optional = [("weights", "fp32")] * weighted + [("shared", dtype)] * shared
    return KernelSpec(
        op="moe",
        template="triton/moe_combine.py.jinja",
        params=(
            ("dtype", dtype), ("placed", True), ("weighted", weighted), ("shared", shared), ("TOP_K", top_k),
            ("WIDTH", width), ("BLOCK", block),
        ),
        args=(
            pointer("parts", part_dtype), pointer("place", "i32"), *(pointer(*entry) for entry in optional),
            pointer("out", dtype),
        ),
        grid=(str(count), str(ceil_div(width, block)), "1"),
        bytes=f"({count}) * {top_k * (part + 4 + 4 * weighted) + item * (1 + shared)}",
        flops=f"({count}) * {2 * top_k * width}",
        num_warps=warps_for(block),
        label=f"{dtype}_k{top_k}_w{width}{'_shared' if shared else ''}",
    )  # fmt: skip
