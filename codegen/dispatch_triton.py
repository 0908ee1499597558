"""Experts in parallel, of the Triton family: what goes to which rank, rows as bytes of the wire, and back.

A step of a rank: dispatch_order (who goes where), dispatch_pack (rows, local experts and weights of every slot), an
exchange of equal parts; moe_permute over the experts that arrived, dispatch_unpack into their order, the products,
placed_sum_spec over the slots that arrived (bf16 rows), an exchange back; placed_sum_spec over `back`, not weighted.
"""

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.quantize_triton import has_fp4_conversion
from octavo.codegen.specs_triton import ceil_div, number, power_of_2, warps_for
from octavo.compiler.program import ITEM_BYTES, Dim
from octavo.compiler.target import Target

KINDS = ("nvfp4", "fp8", "bf16")


def wire_bytes(kind: str, k: int) -> int:
    """Bytes of a row of k elements on the wire, a multiple of 16: 4032 for 7168 elements of NVFP4.

    Raises ValueError for a kind that there is not and for k that is not of whole blocks of 16.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if k % 16:
        raise ValueError(f"rows must be a multiple of 16 elements, got {k}")
    size = {"nvfp4": k // 2 + k // 16, "fp8": k + 4, "bf16": 2 * k}[kind]
    return ceil_div(size, 16) * 16


def order_spec(count: Dim, top_k: int, local: int, ranks: int, capacity: int) -> KernelSpec:
    """experts (count, top_k) -> order (ranks, capacity), counts (ranks,), back (count, ranks); capacity >= count."""
    block = 512
    return KernelSpec(
        op="dispatch",
        template="triton/dispatch_order.py.jinja",
        params=(
            ("TOP_K", top_k), ("BLOCK_K", power_of_2(top_k)), ("LOCAL", local), ("RANKS", ranks),
            ("CAPACITY", capacity), ("BLOCK", block),
        ),
        args=(
            pointer("experts", "i64"), pointer("order", "i32"), pointer("counts", "i32"), pointer("back", "i32"),
            number("num_tokens", count),
        ),
        grid=(str(ranks), "1", "1"),
        bytes=f"({count}) * {8 * top_k + 4 * ranks} + {4 * ranks * (capacity + 1)}",
        num_warps=4,
        label=f"k{top_k}_r{ranks}_e{local * ranks}",
        iterations=str(2 * ranks * ceil_div(capacity, block)),
    )  # fmt: skip


def pack_spec(
    kind: str, k: int, dtype: str, top_k: int, local: int, ranks: int, capacity: int, target: Target
) -> KernelSpec:
    """x, experts and weights of the tokens that order names -> wire, local and gains of ranks * capacity slots."""
    slots, row, block = ranks * capacity, wire_bytes(kind, k), power_of_2(k)
    outer = (pointer("outer", "fp32"),) if kind == "nvfp4" else ()
    routing = ("experts", "i64"), ("weights", "fp32"), ("local", "i64"), ("gains", "fp32")
    params: tuple[tuple[str, Param], ...] = (
        ("dtype", dtype), ("kind", kind), ("routed", True), ("K", k), ("ROW", row), ("BLOCK", block),
        ("TOP_K", top_k), ("BLOCK_K", power_of_2(top_k)), ("LOCAL", local), ("CAPACITY", capacity),
        ("HW", has_fp4_conversion(target)),
    )  # fmt: skip
    args: tuple[Arg, ...] = (
        pointer("x", dtype), pointer("order", "i32"), *outer, pointer("wire", "u8"),
        *(pointer(name, kind) for name, kind in routing),
    )  # fmt: skip
    return KernelSpec(
        op="dispatch",
        template="triton/dispatch_pack.py.jinja",
        params=params,
        args=args,
        grid=(str(slots), "1", "1"),
        bytes=f"{slots * (k * ITEM_BYTES[dtype] + row + 24 * top_k + 4)}",
        flops=f"{slots * 4 * k}",
        num_warps=warps_for(block),
        label=f"{kind}_{dtype}_k{k}_r{ranks}",
        features=("fp4_convert",) * (kind == "nvfp4"),
    )


def unpack_spec(kind: str, k: int, top_k: int, slots: int) -> KernelSpec:
    """wire -> rows and rows_scale in the order by expert, which place gives for every slot and its experts here."""
    row, size = wire_bytes(kind, k), k // 2 if kind == "nvfp4" else k
    dtype, scale = {"nvfp4": ("u8", "fp8"), "fp8": ("fp8", "fp32")}[kind]
    block = power_of_2(size)
    return KernelSpec(
        op="dispatch",
        template="triton/dispatch_unpack.py.jinja",
        params=(("kind", kind), ("TOP_K", top_k), ("K", k), ("ROW", row), ("BLOCK", block)),
        args=(
            pointer("wire", "u8"),
            pointer("place", "i32"),
            pointer("rows", dtype),
            pointer("rows_scale", scale),
        ),
        grid=(str(slots), "1", "1"),
        bytes=f"{slots * (2 * row + 4 * top_k)}",
        num_warps=warps_for(block),
        label=f"{kind}_k{k}_of{top_k}",
    )
