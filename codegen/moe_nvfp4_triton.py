"""Products grouped by expert on NVFP4 and FP8 weights, of the Triton family: kernels, tiles, refusals."""

from dataclasses import replace

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.linear_triton import with_stages
from octavo.codegen.moe_grouped import FEW_TILE, MANY_TILE, Grouped, Unit
from octavo.codegen.quantize_triton import has_fp4_conversion, scale_map
from octavo.codegen.specs_triton import ceil_div, tiles
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

# Bits of an NVFP4 element with its share of a scale.
NVFP4_BITS = 4.5


def _weight(product: Grouped, kind: str, block_n: int, block_k: int) -> tuple[Arg, ...]:
    """All experts' rows as one tensor, behind each other; every expert's scales are padded to 128 rows."""
    experts, n, k, name = product.places.experts, product.n, product.k, product.weight
    if kind == "fp8":
        return (tiles(name, "fp8", (experts * n, k), (block_n, block_k)),)
    scale = scale_map(f"{name}_scale", experts * ceil_div(n, 128), k, block_n, block_k)
    return tiles(name, "u8", (experts * n, k // 2), (block_n, block_k // 2)), scale


def _tail(product: Grouped) -> tuple[Arg, ...]:
    bias = (pointer(f"{product.weight}_bias", product.bias),) if product.bias else ()
    tables = pointer("tile_expert", "i32"), pointer("num_tiles", "i32")
    return (pointer(f"{product.weight}_alpha", "fp32"), *bias, *tables)


def _hidden(product: Grouped) -> tuple[Arg, ...]:
    return (
        pointer("hidden_outer", "fp32"), pointer(product.out, "u8"), pointer(f"{product.out}_scale", "fp8"),
    )  # fmt: skip


def _spec(product: Grouped, template: str, text: dict[str, Param], numbers: dict[str, int]) -> KernelSpec:
    unit = product.unit or Unit()
    params: tuple[tuple[str, Param], ...] = (
        *text.items(), ("gated", product.unit is not None), ("bias", product.bias), ("N", product.n),
        ("K", product.k), ("LIMIT", unit.limit), ("ALPHA", unit.alpha), ("OFFSET", unit.offset), *numbers.items(),
    )  # fmt: skip
    return KernelSpec(
        op="moe",
        template=f"triton/{template}.py.jinja",
        params=params,
        args=(),
        flops=product.flops,
        label=f"{product.label}_m{numbers['BLOCK_M']}",
        iterations=product.iterations(numbers["BLOCK_N"], numbers["BLOCK_K"]),
    )


def nvfp4_many_spec(product: Grouped, target: Target, block_n: int = 0) -> KernelSpec:
    """Tall tiles on the block-scaled tensor core; with a unit the result is NVFP4 too, else bf16."""
    is_specialised = bool(target.tmem_columns)
    block_n = block_n or (256 if is_specialised and product.n >= 256 else 128)
    block_m, block_k, programs = MANY_TILE, 256, target.sm_count or 1
    numbers = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "NUM_PROGRAMS": programs}
    places, k = product.places, product.k
    results = (
        _hidden(product)
        if product.unit
        else (tiles(product.out, "bf16", (places.rows, product.n), (block_m, block_n // 4)),)
    )
    text: dict[str, Param] = {"warp_specialize": is_specialised, "rounded": product.rounded}
    base = _spec(product, "moe_nvfp4", text, numbers)
    spec = replace(
        base,
        args=(
            tiles(product.x, "u8", (places.rows, k // 2), (block_m, block_k // 2)),
            scale_map(f"{product.x}_scale", places.scale_tiles, k, block_m, block_k),
            *_weight(product, "nvfp4", block_n, block_k), *_tail(product), *results,
        ),
        grid=(str(programs), "1", "1"),
        tiles=f"{places.tiles} * {ceil_div(product.n, block_n)}",
        bytes=product.bytes(NVFP4_BITS, NVFP4_BITS, NVFP4_BITS if product.unit else 16),
        num_warps=8,
        num_stages=3,
        features=(
            "tma_load", "mma_nvfp4", "scales_by_copy", "fp4_convert" if product.unit else "tma_store",
        ),
    )  # fmt: skip
    shorter = replace(spec, num_stages=2)
    if block_n == 128:
        return replace(spec, alternatives=(shorter,))
    return replace(spec, alternatives=(shorter, nvfp4_many_spec(product, target, 128)))


def nvfp4_few_spec(product: Grouped, target: Target) -> KernelSpec:
    """Short tiles, the weight being the tall operand; with a unit the result is NVFP4 too, else bf16."""
    block_m, block_n, block_k, stages = FEW_TILE, 128, 256, 6
    numbers = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages}
    places, k = product.places, product.k
    spec = replace(
        _spec(product, "moe_nvfp4_few", {"rounded": product.rounded}, numbers),
        args=(
            tiles(product.x, "u8", (places.rows, k // 2), (block_m, block_k // 2)),
            pointer(f"{product.x}_scale", "fp8"),
            *_weight(product, "nvfp4", block_n, block_k), *_tail(product),
            *(_hidden(product) if product.unit else (pointer(product.out, "bf16"),)),
        ),
        grid=(str(ceil_div(product.n, block_n)), places.tiles, "1"),
        bytes=product.bytes(NVFP4_BITS, NVFP4_BITS, NVFP4_BITS if product.unit else 16),
        num_warps=4 if target.tmem_columns else 8,
        num_stages=stages,
        features=("tma_load", "mma_nvfp4", "scales_by_copy", *(("fp4_convert",) if product.unit else ())),
    )  # fmt: skip
    return with_stages(spec, 5, 4, 3)


def fp8_many_spec(product: Grouped, target: Target) -> KernelSpec:
    """Tall tiles of FP8; the result is bf16, with a unit too, as a row's scale needs the whole row."""
    is_specialised = bool(target.tmem_columns)
    block_m, block_n, block_k, programs = MANY_TILE, 128, 128, target.sm_count or 1
    numbers = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "NUM_PROGRAMS": programs}
    places, part = product.places, block_n // (4 if product.unit else 2)
    spec = replace(
        _spec(product, "moe_fp8", {"warp_specialize": is_specialised, "by_row": product.by_row}, numbers),
        args=(
            tiles(product.x, "fp8", (places.rows, product.k), (block_m, block_k)),
            pointer(f"{product.x}_scale", "fp32"),
            *_weight(product, "fp8", block_n, block_k), *_tail(product),
            tiles(product.out, "bf16", (places.rows, product.width), (block_m, part)),
        ),
        grid=(str(programs), "1", "1"),
        tiles=f"{places.tiles} * {ceil_div(product.n, block_n)}",
        bytes=product.bytes(8, 8, 16),
        num_warps=4 if is_specialised else 8,
        num_stages=4,
        features=("tma_load", "tma_store", "mma_fp8"),
    )  # fmt: skip
    fewer = tuple(replace(spec, num_stages=stages) for stages in (3, 2))
    return replace(spec, alternatives=(replace(spec, num_warps=8), *fewer) if is_specialised else fewer)


def few_spec(
    product: Grouped, kind: str, target: Target, block_m: int = FEW_TILE, out_dtype: str = "bf16"
) -> KernelSpec:
    """The weight as the tall operand: FP8 with FP8 rows, or NVFP4 with fp16 rows, for every number of rows."""
    block_n = 128
    block_k, stages, warps = {"fp8": (128, 6, 4), "nvfp4": (128, 4, 8)}[kind]
    numbers = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages,
        "HW": has_fp4_conversion(target),
    }  # fmt: skip
    places, is_fp8 = product.places, kind == "fp8"
    text: dict[str, Param] = {"weights": kind, "out_dtype": out_dtype, "by_row": product.by_row}
    spec = replace(
        _spec(product, "moe_few", text, numbers),
        args=(
            tiles(product.x, "fp8" if is_fp8 else "fp16", (places.rows, product.k), (block_m, block_k)),
            *((pointer(f"{product.x}_scale", "fp32"),) if is_fp8 else ()),
            *_weight(product, kind, block_n, block_k), *_tail(product), pointer(product.out, out_dtype),
        ),
        grid=(str(ceil_div(product.n, block_n)), places.tiles, "1"),
        bytes=product.bytes(*((8, 8, 16) if is_fp8 else (16, NVFP4_BITS, 8 * ITEM_BYTES[out_dtype]))),
        num_warps=warps,
        num_stages=stages,
        label=f"{kind}_{product.label}_m{block_m}",
        features=("tma_load", "mma_fp8" if is_fp8 else "mma_16bit"),
    )  # fmt: skip
    return with_stages(spec, *range(stages - 1, 1, -1))


def refuse_nvfp4(target: Target) -> str | None:
    if target.arch is None or target.arch < 100:
        return f"sm_{target.arch} has no FP4 tensor core; the weight-only kernel serves"
    return None


def size_refusal(product: Grouped, kind: str) -> str | None:
    """Sizes that the tensor maps or the layout of the scales do not take."""
    of_k, of_n = (64, 128 if product.unit else 8) if kind == "nvfp4" else (16, 16)
    if product.k % of_k:
        return f"K must be a multiple of {of_k} for {kind}, got {product.k}"
    if product.n % of_n:
        return f"N must be a multiple of {of_n} for {kind}, got {product.n}"
    return None
