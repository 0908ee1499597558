"""Matrix products of the Triton family: which kernel for which number of rows, and its tiles."""

from dataclasses import dataclass, replace

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.specs_triton import ceil_div, in_order, number, tiles
from octavo.compiler.program import ITEM_BYTES, Dim
from octavo.compiler.target import Target

# A step of at most this many rows gets a kernel made for it; above the last, the persistent one.
FEW_ROWS = (16, 64)
MANY_ROWS = 4096


@dataclass(frozen=True)
class Product:
    """y[rows, n] = alpha * row_scale[rows] * x[rows, k] @ w[n, k].T + bias; rows is a size of the step, "T" or "L".

    dtype      of x and w: "bf16", "fp32", or "fp8"
    bias       whether there is one, in dtype; beside fp8 in bias_dtype
    alpha      scale of the weights, "scalar" or "column" (n,), times that of x if it has one; "" for none
    row_scale  whether every row of x has a scale
    """

    rows: Dim
    n: int
    k: int
    dtype: str
    out_dtype: str
    bias: bool
    alpha: str = ""
    row_scale: bool = False
    bias_dtype: str = "bf16"

    def kernel(self, template: str, numbers: dict[str, int], args: tuple[Arg, ...]) -> KernelSpec:
        """What the kernels of a product share; tile numbers and arguments are theirs."""
        item, out_item = ITEM_BYTES[self.dtype], ITEM_BYTES[self.out_dtype]
        params: tuple[tuple[str, Param], ...] = (
            ("dtype", self.dtype), ("out_dtype", self.out_dtype), ("alpha", self.alpha),
            ("row_scale", self.row_scale), ("bias", self.bias), ("N", self.n), ("K", self.k),
        )  # fmt: skip
        dtypes = self.dtype if self.dtype == self.out_dtype else f"{self.dtype}_{self.out_dtype}"
        return KernelSpec(
            op="linear",
            template=f"triton/{template}.py.jinja",
            params=(*params, *numbers.items()),
            args=args,
            bytes=f"({self.rows}) * {self.k * item + self.n * out_item} + {self.n * self.k * item}",
            flops=f"({self.rows}) * {2 * self.n * self.k}",
            label=f"{dtypes}_n{self.n}_k{self.k}_m{numbers['BLOCK_M']}",
        )

    @property
    def epilogue_args(self) -> tuple[Arg, ...]:
        present = {"alpha": bool(self.alpha), "row_scale": self.row_scale, "bias": self.bias}
        dtypes = {"bias": self.bias_dtype if self.dtype == "fp8" else self.dtype}
        return tuple(pointer(name, dtypes.get(name, "fp32")) for name, there in present.items() if there)


def tma_refusal(product: Product, target: Target) -> str | None:
    """Why the TMA kernels cannot serve the product."""
    if target.arch is None or target.arch < 90:
        return f"TMA needs sm_90 or newer, {target.name} is sm_{target.arch}"
    if product.dtype not in ("bf16", "fp8"):
        return f"dtype must be bf16 or fp8, got {product.dtype}"
    row_bytes = {"k": product.k * ITEM_BYTES[product.dtype], "n": product.n * ITEM_BYTES[product.out_dtype]}
    bad = [f"{name} {getattr(product, name)} ({size} bytes)" for name, size in row_bytes.items() if size % 16]
    return f"TMA needs rows of a multiple of 16 bytes, got {', '.join(bad)}" if bad else None


def linear_tma_spec(product: Product, target: Target) -> KernelSpec:
    """Kernels for up to 16 rows, up to 64, and more."""
    kernels, below = [], 0
    for limit in FEW_ROWS:
        when = f"{product.rows} > {below} and {product.rows} <= {limit}"
        kernels.append(replace(few_rows_spec(product, limit, target), when=when))
        below = limit
    return in_order(*kernels, replace(many_rows_spec(product, target), when=f"{product.rows} > {below}"))


def few_rows_spec(product: Product, block_m: int, target: Target) -> KernelSpec:
    """A stream of the weights in tiles as tall as still gives every multiprocessor one, or nearly so."""
    enough = target.sm_count or 1
    tallest = next((size for size in (128, 64) if ceil_div(product.n, size) >= enough), 32)
    others = [size for size in (2 * tallest, tallest // 2) if 32 <= size <= 128]
    worthwhile = [size for size in others if 2 * ceil_div(product.n, size) >= enough]
    first, *candidates = (few_rows_form(product, block_m, block_n) for block_n in (tallest, *worthwhile))
    return replace(first, candidates=tuple(candidates))


def few_rows_form(product: Product, block_m: int, block_n: int) -> KernelSpec:
    block_k = (64 if block_n == 128 else 128) * 2 // ITEM_BYTES[product.dtype]
    numbers = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": 6}
    programs = ceil_div(product.n, block_n)
    args = (
        tiles("x", product.dtype, (product.rows, product.k), (block_m, block_k)),
        tiles("weight", product.dtype, (product.n, product.k), (block_n, block_k)),
        *product.epilogue_args,
        pointer("out", product.out_dtype),
        number("num_rows", product.rows),
    )
    spec = replace(
        product.kernel("linear_few_rows", numbers, args),
        grid=(str(programs), "1", "1"),
        iterations=str(programs * ceil_div(product.k, block_k)),
        num_warps=4,
        num_stages=6,
        features=("tma_load",),
    )
    return with_stages(spec, 4, 3)


def many_rows_spec(product: Product, target: Target) -> KernelSpec:
    """The persistent kernel, warp-specialised where the tensor core reads its operands from shared memory.

    Wider tiles load less for each operation, but there are fewer of them to share out: a candidate.
    """
    plain, wide_plain = (many_rows_form(product, target, size, is_specialised=False) for size in (128, 256))
    if not target.tmem_columns:
        plain = replace(plain, alternatives=(replace(plain, num_stages=2),))
        # sums of a wide tile lie in registers, which beside those of FP8 products of Hopper are too few
        has_room = target.arch == 90 and product.dtype == "bf16"
        return replace(plain, candidates=(wide_plain,) * (has_room and is_worth_wide(product.n, target)))
    narrow, wide = (many_rows_form(product, target, size, is_specialised=True) for size in (128, 256))
    narrow = replace(narrow, alternatives=(replace(narrow, num_stages=3), plain))
    return replace(narrow, candidates=(wide,) * is_worth_wide(product.n, target))


def is_worth_wide(n: int, target: Target) -> bool:
    """Whether a step of MANY_ROWS has a tile of 128 x 256 for each multiprocessor."""
    return ceil_div(MANY_ROWS, 128) * ceil_div(n, 256) >= (target.sm_count or 1)


def many_rows_form(product: Product, target: Target, block_n: int, is_specialised: bool) -> KernelSpec:
    block_m, block_k = 128, 128 // ITEM_BYTES[product.dtype]
    programs = target.sm_count or 1
    numbers = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "SUBTILES": block_n // 64,
        "GROUP_M": 8, "NUM_PROGRAMS": programs,
    }  # fmt: skip
    args = (
        tiles("x", product.dtype, (product.rows, product.k), (block_m, block_k)),
        tiles("weight", product.dtype, (product.n, product.k), (block_n, block_k)),
        *product.epilogue_args,
        tiles("out", product.out_dtype, (product.rows, product.n), (block_m, 64)),
        number("num_rows", product.rows),
    )
    pieces = f"({product.rows} + {block_m - 1}) // {block_m} * {ceil_div(product.n, block_n)}"
    spec = replace(
        product.kernel("linear", numbers, args),
        grid=(str(programs), "1", "1"),
        tiles=pieces,
        iterations=f"{pieces} * {ceil_div(product.k, block_k)}",
        # a wide tile spills with four warps, where the epilogue is more than a cast
        num_warps=4 if is_specialised and block_n == 128 else 8,
        num_stages=4 if is_specialised and block_n == 128 else 3,
        features=("tma_load", "tma_store", "mma_fp8" if product.dtype == "fp8" else "mma_16bit"),
    )
    return with_param(spec, "warp_specialize", is_specialised)


def linear_pointer_spec(product: Product) -> KernelSpec:
    """Kernels for up to 16 rows and for more, of any shape and dtype."""
    few = pointer_spec(product, 16, 64, 32 if product.dtype == "fp32" else 64)
    many = pointer_spec(product, 64, 64, 16 if product.dtype == "fp32" else 64)
    return in_order(replace(few, when=f"{product.rows} <= 16"), replace(many, when=f"{product.rows} > 16"))


def pointer_spec(product: Product, block_m: int, block_n: int, block_k: int) -> KernelSpec:
    numbers = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": 3}
    # masks compare with N and K: only rows of whole 16-byte pieces can be read in such pieces
    args = (
        pointer("x", product.dtype),
        pointer("weight", product.dtype),
        *product.epilogue_args,
        pointer("out", product.out_dtype),
        number("num_rows", product.rows),
    )
    turns = ceil_div(product.n, block_n) * ceil_div(product.k, block_k)
    spec = replace(
        product.kernel("linear_pointer", numbers, args),
        grid=(str(ceil_div(product.n, block_n)), f"({product.rows} + {block_m - 1}) // {block_m}", "1"),
        iterations=f"({product.rows} + {block_m - 1}) // {block_m} * {turns}",
        narrow_loads=product.k * ITEM_BYTES[product.dtype] % 16 > 0,
        num_warps=4,
        num_stages=3,
    )
    staged = with_stages(spec, 2, 1)
    # rows that are read element by element take registers
    short = replace(
        with_param(with_param(spec, "STAGES", 1), "BLOCK_K", min(block_k, 32)), num_warps=8, num_stages=1
    )
    return replace(staged, alternatives=(*staged.alternatives, short))


def with_param(spec: KernelSpec, name: str, value: Param) -> KernelSpec:
    """The spec with one parameter set, added at the end if it is new."""
    others = tuple(entry for entry in spec.params if entry[0] != name)
    return replace(spec, params=(*others, (name, value)))


def with_stages(spec: KernelSpec, *fewer: int) -> KernelSpec:
    """Forms with fewer tiles in flight as alternatives: shared memory is what they save."""
    forms = (replace(with_param(spec, "STAGES", stages), num_stages=stages) for stages in fewer)
    return replace(spec, alternatives=tuple(forms))
