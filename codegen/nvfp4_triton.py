"""Products with NVFP4 weights of the Triton family: block-scaled (W4A4) where x is quantised too, else weight-only."""

from dataclasses import dataclass, replace

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.linear_triton import FEW_ROWS, is_worth_wide, with_param, with_stages
from octavo.codegen.quantize_triton import has_fp4_conversion, nvfp4_bytes, scale_map, scale_tiles
from octavo.codegen.specs_triton import ceil_div, in_order, number, power_of_2, tiles, warps_for
from octavo.compiler.program import ITEM_BYTES, Dim
from octavo.compiler.target import Target

# Rows of the weight in a tile: what the layout of scales holds together.
TILE_N = 128
# Weight-only kernels up to so many rows: 8 are for the tensor core of a warp, which needs less to get to it.
FEW_ROWS_WEIGHT_ONLY = (8, *FEW_ROWS)
# Partial sums of a product that is split along K may move a quarter of what the weights do.
MOST_PARTS_SHARE = 4


@dataclass(frozen=True)
class Nvfp4Product:
    """y[rows, n] = alpha * row_scale[rows] * x[rows, k] @ w[n, k].T + bias + residual; rows is "T" or "L".

    x_dtype    "nvfp4": codes and scales, as the weights have; "bf16" or "fp16": weights only are quantised
    alpha      the product of the outer scales: "scalar", or "column" (n,) for weights that were fused
    row_scale  whether each row of x has an outer scale of its own; of quantised x only
    bias       its dtype, "" for none
    residual   whether a tensor of y's shape and dtype is added
    """

    rows: Dim
    n: int
    k: int
    x_dtype: str
    out_dtype: str
    alpha: str = "scalar"
    row_scale: bool = False
    bias: str = ""
    residual: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.x_dtype == "nvfp4"

    @property
    def row_bytes(self) -> int:
        """Bytes of x, of y and of what is added for each row."""
        item = ITEM_BYTES[self.out_dtype] * (2 if self.residual else 1)
        x = nvfp4_bytes(self.k) if self.is_quantized else self.k * ITEM_BYTES[self.x_dtype]
        return x + self.n * item + (4 if self.row_scale else 0)

    def epilogue(self, residual: Arg) -> tuple[Arg, ...]:
        """What is applied to the sums, in call order."""
        args = [pointer("alpha", "fp32")]
        args += [pointer("row_scale", "fp32")] * self.row_scale
        args += [pointer("bias", self.bias)] if self.bias else []
        return (*args, *([residual] * self.residual))

    def kernel(self, template: str, text: dict[str, Param], numbers: dict[str, Param]) -> KernelSpec:
        """What the kernels of a product share; arguments, grid and warps are theirs."""
        flags: dict[str, Param] = {
            "alpha": self.alpha, "row_scale": self.row_scale, "bias": bool(self.bias), "residual": self.residual,
        }  # fmt: skip
        params = {"out_dtype": self.out_dtype, **flags, **text, "N": self.n, **numbers}
        tile = numbers.get("BLOCK_M", "sum")
        return KernelSpec(
            op="nvfp4_linear",
            template=f"triton/{template}.py.jinja",
            params=tuple(params.items()),
            args=(),
            bytes=f"({self.rows}) * {self.row_bytes} + {self.n * nvfp4_bytes(self.k)}",
            flops=f"({self.rows}) * {2 * self.n * self.k}",
            label=f"{self.x_dtype}_{self.out_dtype}_n{self.n}_k{self.k}_m{tile}",
        )


def weight_args(product: Nvfp4Product, block_n: int, block_k: int) -> tuple[Arg, Arg]:
    """Codes and scales of the weight: one layout for every kernel, whether x is quantised or not."""
    return (
        tiles("weight", "u8", (product.n, product.k // 2), (block_n, block_k // 2)),
        scale_map("weight_scale", ceil_div(product.n, 128), product.k, block_n, block_k),
    )


def nvfp4_refusal(product: Nvfp4Product, target: Target) -> str | None:
    """Why no kernel of this file computes the product, and what does."""
    if target.arch is None or target.arch < 90:
        return f"TMA needs sm_90 or newer, {target.name} is sm_{target.arch}; dequantise the weights to bf16"
    if product.k % 64:
        return (
            f"K must be a multiple of 64, four scales of 16 elements, which are read together; got {product.k}; "
            "dequantise the weights to bf16"
        )
    if not product.is_quantized:
        return "only rows of quantised x have outer scales" if product.row_scale else None
    if target.arch < 100:
        return f"sm_{target.arch} has no FP4 tensor core; weight-only products serve: keep x in bf16"
    row_bytes = product.n * ITEM_BYTES[product.out_dtype]
    if row_bytes % 16:
        return (
            f"TMA needs rows of y of a multiple of 16 bytes, got n {product.n} ({row_bytes} bytes); weight-only "
            "products serve: keep x in bf16"
        )
    return None


def nvfp4_linear_spec(product: Nvfp4Product, target: Target) -> KernelSpec:
    """All launches of a product that nvfp4_refusal lets pass: streams of the weights for few rows, tiles for more."""
    limits = FEW_ROWS if product.is_quantized else FEW_ROWS_WEIGHT_ONLY
    launches: list[KernelSpec] = []
    scratch: dict[str, tuple[str, str, tuple[Dim, ...]]] = {}
    for below, limit in zip((0, *limits), limits, strict=False):
        when = f"{product.rows} > {below} and {product.rows} <= {limit}"
        stream = block_scaled_few if product.is_quantized else weight_only_few
        spec = stream(product, limit, target)
        launches.append(replace(spec, when=when))
        if splits := splits_of(spec):
            launches.append(replace(sum_parts_spec(product, splits), when=when))
            size = splits * limit
            held = scratch.get("parts", ("", "", (0,)))[2][0]
            scratch["parts"] = ("parts", "fp32", (max(int(held), size), product.n))
    when = f"{product.rows} > {limits[-1]}"
    if product.is_quantized:
        launches.append(replace(block_scaled_many(product, target), when=when))
    else:
        launches += [replace(spec, when=when) for spec in weight_only_many(product, target)]
        if product.x_dtype == "bf16":
            scratch["x_fp16"] = ("x_fp16", "fp16", (product.rows, product.k))
    return replace(in_order(*launches), scratch=tuple(scratch.values()))


def part_of_k(product: Nvfp4Product, block_m: int, block_k: int, target: Target) -> int:
    """Tiles of K for one program: fewer than all where the tiles of N would leave multiprocessors idle."""
    turns = ceil_div(product.k, block_k)
    wanted = ceil_div(target.sm_count or 1, ceil_div(product.n, TILE_N))
    # a part is written and read in fp32
    most = nvfp4_bytes(product.k) // (MOST_PARTS_SHARE * 8 * block_m)
    return ceil_div(turns, max(min(wanted, most, turns), 1))


def splits_of(spec: KernelSpec) -> int:
    """Parts of K of which a launch leaves the sums; 0 if it leaves the result."""
    params = dict(spec.params)
    return ceil_div(int(params["K"]), int(params["BLOCK_K"]) * int(params["PART"])) if params["split"] else 0


def stream_spec(
    product: Nvfp4Product, template: str, text: dict[str, Param], numbers: dict[str, int], target: Target
) -> KernelSpec:
    """What streams of the weights share: tiles of N and parts of K."""
    block_m, block_k = numbers["BLOCK_M"], numbers["BLOCK_K"]
    turns, tall = ceil_div(product.k, block_k), ceil_div(product.n, TILE_N)
    part = part_of_k(product, block_m, block_k, target)
    is_split = part < turns
    # parts are plain sums: what is applied to them is left to sum_parts
    bare = replace(product, alpha="", row_scale=False, bias="", residual=False, out_dtype="fp32")
    shared = bare if is_split else product
    params: dict[str, Param] = {"K": product.k, **numbers, "BLOCK_N": TILE_N, "PART": part}
    spec = shared.kernel(template, {**text, "split": is_split}, params)
    epilogue = () if is_split else product.epilogue(pointer("residual", product.out_dtype))
    out = pointer("parts", "fp32") if is_split else pointer("out", product.out_dtype)
    return replace(
        spec,
        args=(*epilogue, out, number("num_rows", product.rows)),
        grid=(str(tall), "1", str(ceil_div(turns, part))),
        iterations=str(tall * turns),
        num_stages=numbers["STAGES"],
        bytes=f"{spec.bytes} + ({product.rows}) * {4 * product.n * (ceil_div(turns, part) - 1)}",
        label=f"{spec.label}_split{ceil_div(turns, part)}" if is_split else spec.label,
    )


def block_scaled_few(product: Nvfp4Product, block_m: int, target: Target) -> KernelSpec:
    """W4A4 of up to block_m rows; the scales of x, which are few, are not worth a tensor map."""
    block_k, has_tmem = 256, bool(target.tmem_columns)
    # more do not fit into the shared memory of consumer Blackwell
    stages = (6 if has_tmem else 5) - (block_m >= 64)
    numbers = {"BLOCK_M": block_m, "BLOCK_K": block_k, "STAGES": stages}
    spec = stream_spec(product, "nvfp4_linear_few_rows", {}, numbers, target)
    x = tiles("x", "u8", (product.rows, product.k // 2), (block_m, block_k // 2))
    spec = replace(
        spec,
        args=(x, pointer("x_scale", "fp8"), *weight_args(product, TILE_N, block_k), *spec.args),
        num_warps=4 if has_tmem else 8,
        features=("tma_load", "mma_nvfp4", "scales_by_copy"),
    )
    return with_stages(spec, 4, 3, 2)


def block_scaled_many(product: Nvfp4Product, target: Target) -> KernelSpec:
    """The persistent W4A4 kernel. Wide tiles load less for each operation, but there are fewer of them.

    Two accumulators of 256 columns and the scales do not fit into the tensor memory.
    """
    if not target.tmem_columns:
        plain = block_scaled_form(product, target, 128, is_specialised=False)
        return replace(plain, alternatives=(replace(plain, num_stages=2),))
    narrow, wide = (block_scaled_form(product, target, n, is_specialised=True) for n in (128, 256))
    narrow = replace(narrow, alternatives=(replace(narrow, num_stages=3),))
    wide = replace(wide, alternatives=(replace(wide, num_stages=2),))
    return replace(narrow, candidates=(wide,) * is_worth_wide(product.n, target))


def block_scaled_form(
    product: Nvfp4Product, target: Target, block_n: int, is_specialised: bool
) -> KernelSpec:
    block_m, block_k, programs = 128, 256, target.sm_count or 1
    is_wide = block_n > 128
    piece = (block_m, 64 if is_specialised else 32)
    numbers: dict[str, Param] = {
        "K": product.k, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
        "SUBTILES": block_n // piece[1], "GROUP_M": 8, "NUM_PROGRAMS": programs,
    }  # fmt: skip
    text: dict[str, Param] = {"warp_specialize": is_specialised, "single_accumulator": is_wide}
    shape = (product.rows, product.n)
    pieces = f"({product.rows} + {block_m - 1}) // {block_m} * {ceil_div(product.n, block_n)}"
    return replace(
        product.kernel("nvfp4_linear", text, numbers),
        args=(
            tiles("x", "u8", (product.rows, product.k // 2), (block_m, block_k // 2)),
            scale_map("x_scale", scale_tiles(product.rows), product.k, block_m, block_k),
            *weight_args(product, block_n, block_k),
            *product.epilogue(tiles("residual", product.out_dtype, shape, piece)),
            tiles("out", product.out_dtype, shape, piece),
            number("num_rows", product.rows),
        ),
        grid=(str(programs), "1", "1"),
        tiles=pieces,
        iterations=f"{pieces} * {ceil_div(product.k, block_k)}",
        num_warps=8 if is_wide or not is_specialised else 4,
        num_stages=4 if is_specialised and not is_wide else 3,
        features=("tma_load", "tma_store", "mma_nvfp4", "scales_by_copy"),
    )


def weight_only_few(product: Nvfp4Product, block_m: int, target: Target) -> KernelSpec:
    block_k = 256 if block_m <= 16 else 128
    numbers = {"BLOCK_M": block_m, "BLOCK_K": block_k, "STAGES": 4}
    spec = weight_only_form(product, product.x_dtype, numbers, target)
    x = tiles("x", product.x_dtype, (product.rows, product.k), (block_m, block_k))
    return with_stages(replace(spec, args=(x, *spec.args)), 3, 2)


def weight_only_many(product: Nvfp4Product, target: Target) -> tuple[KernelSpec, ...]:
    """The conversion of x to fp16 where it is bf16, then tiles of the product."""
    narrow, wide = (weight_only_tile(product, block_m, target) for block_m in (128, 256))
    # without tensor memory the sums of a wide tile lie in registers, which are too few
    is_wide_served = bool(target.tmem_columns) and is_worth_wide(product.n, target)
    tile = replace(narrow, candidates=(wide,) * is_wide_served)
    return (saturate_spec(product), tile) if product.x_dtype == "bf16" else (tile,)


def weight_only_tile(product: Nvfp4Product, block_m: int, target: Target) -> KernelSpec:
    block_k = 128 if block_m == 128 else 64
    name = "x_fp16" if product.x_dtype == "bf16" else "x"
    numbers = {"BLOCK_M": block_m, "BLOCK_K": block_k, "STAGES": 3}
    # no parts of K: there are rows enough
    spec = weight_only_form(product, "fp16", numbers, replace(target, sm_count=1))
    pieces = f"({product.rows} + {block_m - 1}) // {block_m}"
    spec = replace(
        spec,
        args=(tiles(name, "fp16", (product.rows, product.k), (block_m, block_k)), *spec.args),
        grid=(spec.grid[0], pieces, "1"),
        iterations=f"{pieces} * {spec.iterations}",
    )
    return with_stages(spec, 2)


def weight_only_form(
    product: Nvfp4Product, dtype: str, numbers: dict[str, int], target: Target
) -> KernelSpec:
    """A weight-only kernel but for its first argument, x in dtype."""
    text: dict[str, Param] = {"dtype": dtype}
    has_conversion = has_fp4_conversion(target)
    spec = stream_spec(product, "nvfp4_weight_only", text, numbers, target)
    # tiles of 8 rows are for the tensor core of a warp
    mma = ("mma_16bit",) if numbers["BLOCK_M"] >= 16 else ()
    pieces = min(ceil_div(numbers["BLOCK_M"], 32), 4)
    return replace(
        with_param(with_param(spec, "HW", has_conversion), "PIECES", pieces),
        args=(*weight_args(product, TILE_N, numbers["BLOCK_K"]), *spec.args),
        num_warps=8,
        features=("tma_load", "fp4_convert", *mma),
    )


def saturate_spec(product: Nvfp4Product) -> KernelSpec:
    block, numel = 2048, f"({product.rows}) * {product.k}"
    return KernelSpec(
        op="nvfp4_linear",
        template="triton/saturate_fp16.py.jinja",
        params=(("BLOCK", block),),
        args=(
            pointer("x", "bf16"),
            pointer("x_fp16", "fp16"),
            Arg("numel", "scalar", "i32", is_divisible_by_16=True, value=numel),
        ),
        grid=(f"({numel} + {block - 1}) // {block}", "1", "1"),
        bytes=f"{numel} * 4",
        num_warps=warps_for(block),
    )


def sum_parts_spec(product: Nvfp4Product, splits: int) -> KernelSpec:
    """The end of a product of which the sums over `splits` parts of K lie in scratch, in a fixed order."""
    block = min(power_of_2(product.n), 1024)
    spec = product.kernel("sum_parts", {}, {"SPLITS": splits, "BLOCK": block})
    row_bytes = product.n * (4 * splits + ITEM_BYTES[product.out_dtype] * (2 if product.residual else 1))
    return replace(
        spec,
        args=(
            pointer("parts", "fp32"),
            *product.epilogue(pointer("residual", product.out_dtype)),
            pointer("out", product.out_dtype),
            number("num_rows", product.rows),
        ),
        grid=(str(product.rows), str(ceil_div(product.n, block)), "1"),
        bytes=f"({product.rows}) * {row_bytes}",
        flops=f"({product.rows}) * {product.n * splits}",
        num_warps=warps_for(block),
        label=f"{product.out_dtype}_n{product.n}_{splits}",
    )
