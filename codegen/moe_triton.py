"""Routers and mixtures of experts of the Triton family: the launches of each, and their tiles."""

from dataclasses import replace

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.linear_triton import with_param, with_stages
from octavo.codegen.moe import Mixture, Numbering, Router
from octavo.codegen.specs_triton import ceil_div, in_order, number, power_of_2, tiles, warps_for
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

# Pairs of a token and an expert for each expert, on average, from which on tiles are tall.
MANY_PAIRS = 32
# Rows from which on a tile is for the large tensor core.
TALL_TILE = 128


def router_spec(router: Router) -> KernelSpec:
    block_g, block_s = power_of_2(router.groups), power_of_2(router.experts // router.groups)
    bias = (pointer("bias", router.bias_dtype),) if router.bias_dtype else ()
    return KernelSpec(
        op="router",
        template="triton/router.py.jinja",
        params=(
            ("dtype", router.dtype), ("bias", bool(bias)), ("scoring", router.scoring),
            ("renormalize", router.renormalize), ("grouped", router.groups > 1),
            ("group_score", router.group_score), ("SCALING", router.scaling), ("NUM_EXPERTS", router.experts),
            ("TOP_K", router.top_k), ("NUM_GROUPS", router.groups), ("TOP_GROUPS", router.top_groups),
            ("BLOCK_G", block_g), ("BLOCK_S", block_s), ("BLOCK_K", power_of_2(router.top_k)),
        ),
        args=(pointer("logits", router.dtype), *bias, pointer("out_0", "fp32"), pointer("out_1", "i64")),
        grid=(str(router.count), "1", "1"),
        bytes=router.bytes,
        flops=router.flops,
        num_warps=warps_for(block_g * block_s),
        label=f"{router.dtype}_e{router.experts}_k{router.top_k}",
    )  # fmt: skip


def map_spec(numbering: Numbering) -> KernelSpec:
    block = 256
    return KernelSpec(
        op="map_experts",
        template="triton/map_experts.py.jinja",
        params=(("NUM_EXPERTS", numbering.experts), ("BLOCK", block)),
        args=(
            pointer("experts", "i64"), pointer("table", "i64"), pointer("out", "i64"),
            number("num_pairs", numbering.pairs),
        ),
        grid=(f"({numbering.pairs} + {block - 1}) // {block}", "1", "1"),
        bytes=numbering.bytes,
        num_warps=warps_for(block),
        label=numbering.label,
    )  # fmt: skip


def moe_spec(mixture: Mixture, is_tma: bool) -> KernelSpec:
    """Pairs in the order of experts, both products with short tiles or with tall ones, and the sum over slots."""
    limit = MANY_PAIRS * mixture.experts
    few, many = f"{mixture.pairs} <= {limit}", f"{mixture.pairs} > {limit}"
    products = [
        replace(product(mixture, block_m, is_tma), when=when)
        for product in (gate_up_spec, down_spec)
        for block_m, when in ((16, few), (128 if mixture.dtype == "bf16" else 64, many))
    ]
    scratch = (
        ("order", "i32", (mixture.count, mixture.top_k)),
        ("starts", "i32", (mixture.experts + 1,)),
        ("hidden", mixture.dtype, (mixture.count, mixture.top_k, mixture.intermediate)),
        ("parts", "fp32", (mixture.count, mixture.top_k, mixture.out)),
    )
    return in_order(replace(sort_spec(mixture), scratch=scratch), *products, combine_spec(mixture))


def sort_spec(mixture: Mixture) -> KernelSpec:
    return KernelSpec(
        op="moe",
        template="triton/moe_sort.py.jinja",
        params=(("NUM_EXPERTS", mixture.experts), ("BLOCK", 1024)),
        args=(
            pointer("experts", "i64"), pointer("order", "i32"), pointer("starts", "i32"),
            number("num_pairs", mixture.pairs),
        ),
        grid=(str(mixture.experts), "1", "1"),
        bytes=f"{mixture.pairs} * 12 + {4 * mixture.experts}",
        num_warps=4,
        label=f"e{mixture.experts}",
        iterations=f"({mixture.pairs} + 1023) // 1024 * {2 * mixture.experts}",
    )  # fmt: skip


def gate_up_spec(mixture: Mixture, block_m: int, is_tma: bool) -> KernelSpec:
    spec = product_spec(mixture, "gate_up", "x", "hidden", block_m, is_tma)
    token_bytes = mixture.hidden * ITEM_BYTES[mixture.dtype] + 4 * mixture.top_k
    return replace(spec, bytes=f"({mixture.count}) * {token_bytes} + {spec.bytes}")


def down_spec(mixture: Mixture, block_m: int, is_tma: bool) -> KernelSpec:
    spec = product_spec(mixture, "down", "hidden", "parts", block_m, is_tma)
    pair_bytes = mixture.intermediate * ITEM_BYTES[mixture.dtype] + 4
    return replace(spec, bytes=f"{mixture.pairs} * {pair_bytes} + {spec.bytes}")


def product_spec(
    mixture: Mixture, weight: str, source: str, target: str, block_m: int, is_tma: bool
) -> KernelSpec:
    """One of the two products; its bytes are those of the result and of the weights that are reached."""
    is_gated, dtype, item = weight == "gate_up", mixture.dtype, ITEM_BYTES[mixture.dtype]
    n, k = (mixture.intermediate, mixture.hidden) if is_gated else (mixture.out, mixture.intermediate)
    rows, out_dtype = (2 * n, dtype) if is_gated else (n, "fp32")
    block_n, block_k, warps, stages = tile_numbers(dtype, block_m, is_gated, k)
    if is_tma:
        weight_arg = tiles(weight, dtype, (mixture.experts * rows, k), (block_n, block_k))
    else:
        weight_arg = pointer(weight, dtype)
    bias_dtype = getattr(mixture, f"{weight}_bias")
    bias = (pointer(f"{weight}_bias", bias_dtype),) if bias_dtype else ()
    args: tuple[Arg, ...] = (
        pointer(source, dtype), weight_arg, *bias, pointer("order", "i32"), pointer("starts", "i32"),
        pointer(target, out_dtype),
    )  # fmt: skip
    params: tuple[tuple[str, Param], ...] = (
        ("dtype", dtype), ("out_dtype", out_dtype), ("gated", is_gated), ("bias", bool(bias)),
        ("access", "desc" if is_tma else "ptr"), ("limited", is_gated and mixture.limit > 0.0),
        ("activation", mixture.activation if is_gated else ""), ("LIMIT", mixture.limit),
        ("ALPHA", mixture.alpha), ("NUM_EXPERTS", mixture.experts), ("SHARE", mixture.top_k if is_gated else 1),
        ("N", n), ("K", k), ("ROWS", rows), ("BLOCK_E", power_of_2(mixture.experts)), ("BLOCK_M", block_m),
        ("BLOCK_N", block_n), ("BLOCK_K", block_k), ("STAGES", stages),
    )  # fmt: skip
    bound = f"{mixture.pairs} // {block_m} + ({mixture.reached})"
    spec = KernelSpec(
        op="moe",
        template="triton/moe_linear.py.jinja",
        params=params,
        args=args,
        grid=(str(ceil_div(n, block_n)), bound, "1"),
        bytes=f"{mixture.pairs} * {n * ITEM_BYTES[out_dtype]} + ({mixture.reached}) * {rows * k * item}",
        flops=f"{mixture.pairs} * {2 * rows * k}",
        num_warps=warps,
        num_stages=stages,
        label=f"{weight}_{dtype}_e{mixture.experts}_n{n}_k{k}_m{block_m}",
        narrow_loads=k % 8 > 0,
        iterations=f"({bound}) * {ceil_div(n, block_n) * ceil_div(k, block_k)}",
        # shorter tiles do without the large tensor core
        features=("tma_load",) * is_tma + ("mma_16bit",) * (dtype == "bf16" and block_m == TALL_TILE),
    )
    fewer_stages = with_stages(spec, *range(stages - 1, 0, -1)).alternatives
    if is_tma:
        return replace(spec, alternatives=fewer_stages)
    # rows that are not of whole 16-byte pieces are read element by element, which takes registers
    short = with_param(with_param(spec, "BLOCK_K", 16), "STAGES", 1)
    return replace(spec, alternatives=(*fewer_stages, replace(short, num_warps=2 * warps, num_stages=1)))


def tile_numbers(dtype: str, block_m: int, is_gated: bool, k: int) -> tuple[int, int, int, int]:
    """(columns, elements of K, warps, tiles in flight); a gated product has two tiles of weights at once.

    Rows that are not of whole 16-byte pieces pass through registers, which hold half as much.
    """
    if dtype == "fp32":
        return (32, 32, 4, 3) if is_gated else (64, 32, 4, 3)
    if block_m == 16:
        return (32, 128, 4, 4) if is_gated else (64, 128, 4, 4)
    return (64, 64, 8, 3) if is_gated or k % 8 else (128, 64, 8, 3)


def combine_spec(mixture: Mixture) -> KernelSpec:
    block = min(power_of_2(mixture.out), 1024)
    row_bytes = mixture.top_k * (4 * mixture.out + 12) + mixture.out * ITEM_BYTES[mixture.dtype]
    return KernelSpec(
        op="moe",
        template="triton/moe_combine.py.jinja",
        params=(
            ("dtype", mixture.dtype), ("placed", False), ("weighted", True), ("shared", False),
            ("TOP_K", mixture.top_k), ("WIDTH", mixture.out), ("BLOCK", block),
        ),
        args=(
            pointer("parts", "fp32"), pointer("experts", "i64"), pointer("weights", "fp32"),
            pointer("out", mixture.dtype),
        ),
        grid=(str(mixture.count), str(ceil_div(mixture.out, block)), "1"),
        bytes=f"({mixture.count}) * {row_bytes}",
        flops=f"{mixture.pairs} * {2 * mixture.out}",
        num_warps=warps_for(block),
        label=f"{mixture.dtype}_k{mixture.top_k}_w{mixture.out}",
    )  # fmt: skip


def tma_refusal(mixture: Mixture, target: Target) -> str | None:
    """Why the weights cannot be read through tensor maps."""
    if target.arch is None or target.arch < 90:
        return f"TMA needs sm_90 or newer, {target.name} is sm_{target.arch}"
    if mixture.dtype != "bf16":
        return f"dtype must be bf16, got {mixture.dtype}"
    sizes = {"hidden": mixture.hidden, "intermediate": mixture.intermediate}
    bad = [f"{name} {size} ({2 * size} bytes)" for name, size in sizes.items() if size % 8]
    return f"TMA needs rows of a multiple of 16 bytes, got {', '.join(bad)}" if bad else None
