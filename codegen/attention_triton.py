"""Paged attention of the Triton family: kernels for steps of one token per request, of few, and for all others."""

from dataclasses import dataclass, replace
from typing import Any

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.quantize_triton import has_fp4_conversion
from octavo.codegen.specs_triton import Heads, ceil_div, in_order, number, power_of_2, tiles
from octavo.compiler.expression import at_most
from octavo.compiler.program import ITEM_BYTES, Dim
from octavo.compiler.target import Target

MAX_SPLITS = 32
MAX_TREE = 64
# Rows of a tile of few tokens per request: a token more of every request costs no further pass over the pages.
MAX_FEW_ROWS = 64
# Bytes of shared memory that the tiles of 128 keys of one program take: 16 bits, heads of 128, two in flight.
LARGE_TILES = 73764
_QUANTIZED = ("fp8", "nvfp4")


@dataclass(frozen=True)
class Attention:
    """One paged attention: softmax(softcap(q k^T * scale) + slopes * distance, masked) v over pages.

    pages         what they hold: "" the dtype of q, "fp8" (E4M3) with one multiplier, "nvfp4" E2M1 codes with
                  linear E4M3 scales and one multiplier
    query_length  new tokens per request up to which the context is split among programs; speculation has several
    tree          a mask for each new token says which new tokens it sees
    """

    heads: Heads
    dtype: str
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    pages: str = ""
    query_length: int = 1
    tree: bool = False

    def __post_init__(self) -> None:
        sizes = (self.heads.head_dim, self.heads.value_dim)
        if self.pages not in ("", *_QUANTIZED):
            raise ValueError(f"expected pages of fp8, nvfp4 or of the dtype of q, got {self.pages!r}")
        if self.pages == "nvfp4" and any(size % 16 for size in sizes):
            raise ValueError(f"expected head sizes in whole blocks of 16 for NVFP4 pages, got {sizes}")
        if self.tree and self.slopes:
            raise ValueError(
                "expected no slopes beside a tree: keys of a branch are not in the order of the pages"
            )
        if self.tree and 0 < self.window < MAX_TREE:
            raise ValueError(f"expected a window of {MAX_TREE} at least beside a tree, got {self.window}")

    @property
    def is_quantized(self) -> bool:
        return self.pages in _QUANTIZED

    @property
    def operand(self) -> str:
        """The dtype of what is multiplied."""
        return "fp16" if self.is_quantized else self.dtype

    @property
    def params(self) -> tuple[tuple[str, Param], ...]:
        return (
            ("dtype", self.dtype), ("pages", self.pages), ("softcap", self.softcap > 0.0),
            ("slopes", self.slopes), ("tree", self.tree), ("SCALE", self.scale), ("SOFTCAP", self.softcap),
            ("WINDOW", self.window), *self.heads.params,
        )  # fmt: skip

    @property
    def label(self) -> str:
        marks = (
            [self.pages] * self.is_quantized + [f"w{self.window}"] * bool(self.window)
            + ["cap"] * bool(self.softcap) + ["sinks"] * self.sinks + ["slopes"] * self.slopes + ["tree"] * self.tree
        )  # fmt: skip
        return "_".join((self.dtype, self.heads.label, *marks))

    @property
    def is_wide(self) -> bool:
        return max(self.heads.head_dim, self.heads.value_dim) > 128

    @property
    def has_narrow_rows(self) -> bool:
        """Whether rows of the pages, or of their scales, are no whole number of pieces of 4 bytes."""
        sizes = (self.heads.head_dim, self.heads.value_dim)
        bits = {"fp8": 8, "nvfp4": 0.5}.get(self.pages, ITEM_BYTES[self.dtype] * 8)
        return any(size * bits % 32 for size in sizes)

    @property
    def token_bytes(self) -> int:
        """Of one token in the pages, all kv heads: keys and values with their scales."""
        width = self.heads.num_kv_heads * (self.heads.head_dim + self.heads.value_dim)
        if self.pages == "nvfp4":
            return width // 2 + width // 16
        return width * (1 if self.pages == "fp8" else ITEM_BYTES[self.dtype])

    def cache_args(self, block_n: int) -> tuple[Arg, ...]:
        """q, the pages as pointers, or as tensor maps of `block_n` rows unless 0, their scales, table and lengths."""
        kind = {"": self.dtype, "fp8": "fp8", "nvfp4": "u8"}[self.pages]
        args = [pointer("q", self.dtype)]
        for name, size in (("k_cache", self.heads.head_dim), ("v_cache", self.heads.value_dim)):
            pack = 2 if self.pages == "nvfp4" else 1
            shape = (f"num_pages * {self.heads.num_kv_heads}", self.heads.page_size, size // pack)
            block = (1, block_n, power_of_2(size, 16) // pack)
            args.append(tiles(name, kind, shape, block) if block_n else pointer(name, kind))
        if self.pages == "nvfp4":
            args += [pointer(name, "fp8") for name in ("k_scales", "v_scales")]
        if self.is_quantized:
            args.append(pointer("multipliers", "fp32"))
        return (*args, pointer("page_table", "i32"), pointer("seq_lens", "i32"))

    def mask_args(self, has_sinks: bool) -> tuple[Arg, ...]:
        return (
            *[pointer("tree", "i64")] * self.tree,
            *[pointer("sinks", self.dtype)] * (has_sinks and self.sinks),
            *[pointer("slopes", "fp32")] * self.slopes,
        )


@dataclass(frozen=True)
class Form:
    """Numbers of a kernel that leave its result alone: keys per tile, warps, tiles in flight, how pages come."""

    block_n: int
    num_warps: int
    stages: int
    tma: bool = False
    specialised: bool = False


def attention_spec(attention: Attention, target: Target) -> KernelSpec:
    """Split-context kernels where every request has one token: T == R says so, as none comes without.

    With a query_length above 1 there is one more of them, for steps of up to so many tokens per request.
    """
    splits = max_splits(attention, target)
    few = f"T <= {attention.query_length} * R"
    launches = [replace(decode_spec(attention, target, splits), when="T == R")]
    if attention.query_length > 1:
        launches.append(replace(few_tokens_spec(attention, target, splits), when=f"T > R and {few}"))
    launches.append(replace(combine_spec(attention, splits), when=few if len(launches) > 1 else "T == R"))
    many = f"T > {attention.query_length} * R" if attention.query_length > 1 else "T > R"
    return in_order(*launches, replace(prefill_spec(attention, target), when=many))


def max_splits(attention: Attention, target: Target) -> int:
    """As splits_for, with a tile of the window each at least."""
    splits = splits_for(attention.heads.num_kv_heads, target)
    return min(splits, ceil_div(attention.window, 64) + 1) if attention.window else splits


def splits_for(programs: int, target: Target) -> int:
    """Parts that give every multiprocessor two programs when there is one request of so many programs."""
    return min(max(2 * (target.sm_count or 1) // programs, 1), MAX_SPLITS)


def parts_scratch(
    count: Dim, heads: int, parts: Dim, width: int
) -> tuple[tuple[str, str, tuple[Dim, ...]], ...]:
    """What the parts of a context leave for the kernel that combines them."""
    return ("partial", "fp32", (count, heads, parts, width)), ("lse", "fp32", (count, heads, parts))


def num_splits(splits: int) -> str:
    """Parts in a step: about the lesser of splits / R (enough programs) and P (a page each), 1 to splits."""
    return f"1 + {splits} * P // ({splits} + R * P)"


def decode_spec(attention: Attention, target: Target, splits: int) -> KernelSpec:
    """A token of every request."""
    rows = power_of_2(attention.heads.group, 16)
    forms = few_rows_forms(attention, target, rows)
    return _first(*(split_spec(attention, target, splits, rows, form, False) for form in forms))


def few_tokens_spec(attention: Attention, target: Target, splits: int) -> KernelSpec:
    """Any tokens of every request, best for so many as fill the rows of a tile: query_length, or MAX_FEW_ROWS."""
    group = attention.heads.group
    rows = max(power_of_2(group * attention.query_length, 16), 16)
    rows = max(min(rows, MAX_FEW_ROWS), power_of_2(group, 16))
    forms = few_rows_forms(attention, target, rows)
    return _first(*(split_spec(attention, target, splits, rows, form, True) for form in forms))


def few_rows_forms(attention: Attention, target: Target, rows: int) -> tuple[Form, ...]:
    """Best first. A large group has as many rows as a prefill tile, and asks for as many registers.

    Tensor maps save a third of the instructions on 16-bit pages, a fifth on FP8. Tiles of 128 keys save as much
    again where shared memory holds several programs; FP8 pages would need 200 registers for them.
    """
    block_n = 32 if attention.is_wide or attention.dtype == "fp32" else 64
    warps = 8 if rows > 64 else 4
    plain = (*(Form(block_n, warps, stages) for stages in (3, 2, 1)), Form(16, 8, 1))
    if not takes_tma(attention, block_n):
        return plain
    tma = (Form(block_n, warps, 3, tma=True), Form(block_n, warps, 2, tma=True))
    is_large = block_n == 64 and rows <= 16 and attention.pages != "fp8"
    is_large = is_large and (target.smem_bytes or 0) >= 2 * LARGE_TILES and takes_tma(attention, 128)
    return (*[Form(128, 4, 3, tma=True)] * is_large, *tma, *plain)


def takes_tma(attention: Attention, block_n: int) -> bool:
    """Whether a tile lies in one page, and rows have whole pieces of 16 bytes."""
    heads = attention.heads
    bits = {"fp8": 8, "nvfp4": 4}.get(attention.pages, ITEM_BYTES[attention.dtype] * 8)
    is_whole = all(size * bits % 128 == 0 for size in (heads.head_dim, heads.value_dim))
    return heads.page_size % block_n == 0 and is_whole


def split_spec(
    attention: Attention, target: Target, splits: int, rows: int, form: Form, is_ragged: bool
) -> KernelSpec:
    heads, parts = attention.heads, num_splits(splits)
    q_bytes = heads.num_heads * (heads.head_dim * ITEM_BYTES[attention.dtype] + heads.value_dim * 4)
    return _spec(
        attention, target, form, rows,
        template="triton/paged_attention_decode.py.jinja",
        params=(("ragged", is_ragged), ("BLOCK_G", rows)),
        args=(
            *attention.cache_args(form.block_n * form.tma),
            *[pointer("cu_seqlens_q", "i32")] * is_ragged,
            *attention.mask_args(has_sinks=False),
            pointer("partial", "fp32"),
            pointer("lse", "fp32"),
            *[number("num_requests", "R")] * is_ragged,
            number("max_pages", "P"),
            number("num_splits", parts),
        ),
        grid=(f"T // {rows // heads.group} + R" if is_ragged else "R", str(heads.num_kv_heads), parts),
        bytes=f"S * {attention.token_bytes} + T * {q_bytes}",
        flops=f"S * {2 * heads.num_heads * (heads.head_dim + heads.value_dim)}" + " * T // R" * is_ragged,
        iterations=f"({_keys(attention)} // {form.block_n} + R) * {heads.num_kv_heads}",
        scratch=parts_scratch("T", heads.num_heads, parts, heads.value_dim),
    )  # fmt: skip


def combine_spec(attention: Attention, splits: int) -> KernelSpec:
    heads, parts = attention.heads, num_splits(splits)
    block_s, block_v = power_of_2(splits), power_of_2(heads.value_dim, 16)
    row_bytes = heads.value_dim * (4 + ITEM_BYTES[attention.dtype])
    return KernelSpec(
        op="paged_attention",
        template="triton/paged_attention_combine.py.jinja",
        params=(
            ("dtype", attention.dtype), ("sinks", attention.sinks), ("NUM_HEADS", heads.num_heads),
            ("VALUE_DIM", heads.value_dim), ("BLOCK_S", block_s), ("BLOCK_V", block_v),
        ),
        args=(
            pointer("partial", "fp32"), pointer("lse", "fp32"),
            *[pointer("sinks", attention.dtype)] * attention.sinks, pointer("out", attention.dtype),
            number("num_splits", parts),
        ),
        grid=(f"T * {heads.num_heads}", "1", "1"),
        bytes=f"T * {heads.num_heads * row_bytes}",
        flops=f"T * {2 * heads.num_heads * heads.value_dim}",
        num_warps=4,
        label=f"{attention.dtype}_h{heads.num_heads}_d{heads.value_dim}{'_sinks' if attention.sinks else ''}",
    )  # fmt: skip


def prefill_spec(attention: Attention, target: Target) -> KernelSpec:
    """flops are those of T queries that see S keys between them; a causal square needs half."""
    return _first(*(whole_spec(attention, target, form) for form in prefill_forms(attention, target)))


def whole_spec(attention: Attention, target: Target, form: Form) -> KernelSpec:
    heads = attention.heads
    # sums of 128 wide rows leave no registers for conversions, on sm_120 for nothing, but in tensor memory
    has_room = target.tmem_columns or (target.arch != 120 and not attention.is_quantized)
    few = 128 if has_room or not attention.is_wide else 64
    rows = max(power_of_2(heads.group), few if attention.operand != "fp32" else 32)
    row_bytes = heads.num_heads * (heads.head_dim + heads.value_dim) * ITEM_BYTES[attention.dtype]
    tokens = rows // heads.group
    # that a tile sees of each request: half of the new ones and all before them
    keys = _keys(attention) if attention.window else "(S - T // 2)"
    return _spec(
        attention, target, form, rows,
        template="triton/paged_attention_prefill.py.jinja",
        params=(("ragged", True), ("sinks", attention.sinks), ("BLOCK_M", rows)),
        args=(
            *attention.cache_args(form.block_n * form.tma),
            pointer("cu_seqlens_q", "i32"),
            *attention.mask_args(has_sinks=True),
            pointer("out", attention.dtype),
            number("num_requests", "R"),
            number("max_pages", "P"),
        ),
        grid=(f"T // {tokens} + R", str(heads.num_kv_heads), "1"),
        bytes=f"S * {attention.token_bytes} + T * {row_bytes}",
        flops=f"T * S * {2 * heads.num_heads * (heads.head_dim + heads.value_dim)}",
        iterations=f"(T // {tokens} + R) * ({keys} // (R * {form.block_n}) + 1) * {heads.num_kv_heads}",
    )  # fmt: skip


def prefill_forms(attention: Attention, target: Target) -> tuple[Form, ...]:
    """Best first.

    Warps that each do one part of the work need the accumulator out of their registers, in tensor memory, and
    leave few for more than masks: nothing but sinks. Otherwise pages come by pointers, which cost 8 warps no more
    than tensor maps. Small heads leave a thread the registers for a whole row of scores: 4 warps then need no
    exchange between them, and 8 are held to 128 registers, which spill. Wide heads, and the warps of sm_120, which
    hold all keys of a tile in registers, want few keys.
    """
    if attention.operand == "fp32":
        return Form(32, 8, 3), Form(32, 8, 2), Form(16, 8, 2), Form(16, 8, 1), Form(16, 16, 1)
    heads = attention.heads
    wide = (Form(64, 8, 3), Form(64, 8, 2))
    narrow = (Form(32, 8, 3), Form(32, 8, 2), Form(32, 8, 1), Form(16, 8, 1))
    few_warps = (Form(64, 4, 3), Form(64, 4, 2))
    is_small = max(heads.head_dim, heads.value_dim) <= 64 and target.arch != 120
    plain = (*few_warps, *wide, *narrow) if is_small else (*wide, *few_warps, *narrow)
    has_masks = attention.window or attention.softcap or attention.slopes or attention.tree
    if attention.is_wide or (target.arch == 120 and (has_masks or attention.is_quantized)):
        return (*narrow, *plain)
    if not target.tmem_columns or has_masks or attention.is_quantized:
        return plain
    specialised = Form(64, 4, 3, tma=True, specialised=True)
    return (specialised, *plain) if takes_tma(attention, specialised.block_n) else plain


def reads_scale_words(attention: Attention, form: Form) -> bool:
    """Whether a program takes the scales of NVFP4 pages four at a time: where a thread has fewer for itself."""
    size = min(attention.heads.head_dim, attention.heads.value_dim)
    is_few = form.block_n * size // 16 < 4 * 32 * form.num_warps
    return attention.pages == "nvfp4" and is_few and not attention.has_narrow_rows


def _keys(attention: Attention) -> str:
    """Keys that a token of every request sees, together."""
    return f"({at_most('S', f'R * {attention.window}')})" if attention.window else "S"


def _spec(attention: Attention, target: Target, form: Form, rows: int, **rest: Any) -> KernelSpec:
    """What the kernels over pages share; rows are those of a tile."""
    has_conversion = has_fp4_conversion(target)
    params = (
        *attention.params, ("tma", form.tma), ("warp_specialize", form.specialised),
        ("scale_words", reads_scale_words(attention, form)), *rest.pop("params"), ("HW", has_conversion),
        ("BLOCK_N", form.block_n), *attention.heads.blocks, ("STAGES", form.stages),
    )  # fmt: skip
    return KernelSpec(
        op="paged_attention",
        params=params,
        num_warps=form.num_warps,
        num_stages=form.stages,
        label=attention.label,
        features=(
            *["tma_load"] * form.tma,
            *["mma_16bit"] * (rows >= 64 and attention.operand != "fp32"),
            *["fp4_convert"] * (attention.pages == "nvfp4" and has_conversion),
            *["fp8_convert"] * attention.is_quantized,
        ),
        narrow_loads=attention.has_narrow_rows,
        **rest,
    )


def _first(first: KernelSpec, *others: KernelSpec) -> KernelSpec:
    return replace(first, alternatives=others)
