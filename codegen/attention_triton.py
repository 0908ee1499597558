"""Paged attention of the Triton family: kernels for steps of one token per request, and for all others."""

from dataclasses import dataclass, replace

from octavo.codegen.kernel import Arg, KernelSpec, Param
from octavo.codegen.linear_triton import with_param, with_stages
from octavo.codegen.specs_triton import Heads, in_order, number, pointer, power_of_2
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

MAX_SPLITS = 32


@dataclass(frozen=True)
class Attention:
    """One paged attention: softmax(softcap(q k^T * scale) + slopes * distance, masked) v over pages."""

    heads: Heads
    dtype: str
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False

    @property
    def params(self) -> tuple[tuple[str, Param], ...]:
        return (
            ("dtype", self.dtype), ("softcap", self.softcap > 0.0), ("sinks", self.sinks),
            ("slopes", self.slopes), ("SCALE", self.scale), ("SOFTCAP", self.softcap), ("WINDOW", self.window),
            *self.heads.params,
        )  # fmt: skip

    @property
    def label(self) -> str:
        marks = (
            [f"w{self.window}"] * bool(self.window) + ["cap"] * bool(self.softcap) + ["sinks"] * self.sinks
        )
        return "_".join((self.dtype, self.heads.label, *marks, *["slopes"] * self.slopes))

    @property
    def cache_args(self) -> tuple[Arg, ...]:
        floats = tuple(pointer(name, self.dtype) for name in ("q", "k_cache", "v_cache"))
        return (*floats, pointer("page_table", "i32"), pointer("seq_lens", "i32"))

    @property
    def sinks_args(self) -> tuple[Arg, ...]:
        return (pointer("sinks", self.dtype),) if self.sinks else ()

    @property
    def slopes_args(self) -> tuple[Arg, ...]:
        return (pointer("slopes", "fp32"),) if self.slopes else ()


def attention_spec(attention: Attention, target: Target) -> KernelSpec:
    """Split-context kernels where every request has one token: T == R says so, as none comes without."""
    splits = max_splits(attention, target)
    decode = replace(decode_spec(attention, splits), when="T == R")
    combine = replace(combine_spec(attention, splits), when="T == R")
    return in_order(decode, combine, replace(prefill_spec(attention), when="T > R"))


def max_splits(attention: Attention, target: Target) -> int:
    """Parts that give every multiprocessor two programs when there is one request."""
    return min(max(2 * (target.sm_count or 1) // attention.heads.num_kv_heads, 1), MAX_SPLITS)


def num_splits(splits: int) -> str:
    """Parts in a step: about the lesser of splits / R (enough programs) and P (a page each), 1 to splits."""
    return f"1 + {splits} * P // ({splits} + R * P)"


def decode_spec(attention: Attention, splits: int) -> KernelSpec:
    heads, item = attention.heads, ITEM_BYTES[attention.dtype]
    is_wide = max(heads.head_dim, heads.value_dim) > 128
    block_g = power_of_2(heads.group, 16)
    block_n = 32 if is_wide or attention.dtype == "fp32" else 64
    parts = num_splits(splits)
    token_bytes = heads.num_kv_heads * (heads.head_dim + heads.value_dim) * item
    spec = KernelSpec(
        op="paged_attention",
        template="triton/paged_attention_decode.py.jinja",
        params=(
            *attention.params, ("BLOCK_G", block_g), ("BLOCK_N", block_n), *heads.blocks, ("STAGES", 3),
        ),
        args=(
            *attention.cache_args,
            *attention.slopes_args,
            pointer("partial", "fp32"),
            pointer("lse", "fp32"),
            number("max_pages", "P"),
            number("num_splits", parts),
        ),
        grid=("R", str(heads.num_kv_heads), parts),
        bytes=f"S * {token_bytes} + R * {heads.num_heads * (heads.head_dim * item + heads.value_dim * 4)}",
        flops=f"S * {2 * heads.num_heads * (heads.head_dim + heads.value_dim)}",
        num_warps=4,
        num_stages=3,
        label=attention.label,
        scratch=(
            ("partial", "fp32", ("R", heads.num_heads, parts, heads.value_dim)),
            ("lse", "fp32", ("R", heads.num_heads, parts)),
        ),
    )  # fmt: skip
    # a large group has as many rows as a prefill tile, and asks for as many registers
    last = replace(with_param(with_param(spec, "BLOCK_N", 16), "STAGES", 1), num_warps=8, num_stages=1)
    return replace(spec, alternatives=(*with_stages(spec, 2, 1).alternatives, last))


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
            pointer("partial", "fp32"), pointer("lse", "fp32"), *attention.sinks_args,
            pointer("out", attention.dtype), number("num_splits", parts),
        ),
        grid=(f"R * {heads.num_heads}", "1", "1"),
        bytes=f"R * {heads.num_heads * row_bytes}",
        flops=f"R * {2 * heads.num_heads * heads.value_dim}",
        num_warps=4,
        label=f"{attention.dtype}_h{heads.num_heads}_d{heads.value_dim}{'_sinks' if attention.sinks else ''}",
    )  # fmt: skip


def prefill_spec(attention: Attention) -> KernelSpec:
    """flops are those of T queries that see S keys between them; a causal square needs half."""
    heads, item = attention.heads, ITEM_BYTES[attention.dtype]
    block_m = 128 if attention.dtype == "bf16" else max(power_of_2(heads.group), 32)
    spec = KernelSpec(
        op="paged_attention",
        template="triton/paged_attention_prefill.py.jinja",
        params=(*attention.params, ("BLOCK_M", block_m), *heads.blocks),
        args=(
            *attention.cache_args,
            pointer("cu_seqlens_q", "i32"),
            *attention.sinks_args,
            *attention.slopes_args,
            pointer("out", attention.dtype),
            number("num_requests", "R"),
            number("max_pages", "P"),
        ),
        grid=(f"T // {block_m // heads.group} + R", str(heads.num_kv_heads), "1"),
        bytes=f"S * {heads.num_kv_heads * (heads.head_dim + heads.value_dim) * item}"
        f" + T * {heads.num_heads * (heads.head_dim + heads.value_dim) * item}",
        flops=f"T * S * {2 * heads.num_heads * (heads.head_dim + heads.value_dim)}",
        label=attention.label,
        features=("mma_16bit",) if attention.dtype == "bf16" else (),
    )
    first, *others = (prefill_form(spec, *form) for form in prefill_forms(attention))
    return replace(first, alternatives=tuple(others))


def prefill_forms(attention: Attention) -> tuple[tuple[int, int, int], ...]:
    """(keys per tile, warps, tiles in flight), best first.

    Small heads leave a thread the registers for a whole row of scores: 4 warps then need no exchange between
    them, and 8 are held to 128 registers, which spill.
    """
    if attention.dtype == "fp32":
        return (32, 8, 3), (32, 8, 2), (16, 8, 2), (16, 8, 1), (16, 16, 1)
    wide, narrow = ((64, 8, 3), (64, 8, 2)), ((32, 8, 3), (32, 8, 2), (32, 8, 1), (16, 8, 1))
    few_warps = ((64, 4, 3), (64, 4, 2))
    is_small = max(attention.heads.head_dim, attention.heads.value_dim) <= 64
    return (*few_warps, *wide, *narrow) if is_small else (*wide, *few_warps, *narrow)


def prefill_form(spec: KernelSpec, block_n: int, num_warps: int, stages: int) -> KernelSpec:
    sized = with_param(with_param(spec, "BLOCK_N", block_n), "STAGES", stages)
    return replace(sized, num_warps=num_warps, num_stages=stages)
