"""Shapes and dtypes -> KernelSpecs of the Triton family, tiles included. Reads no graph: rows_triton does.

bytes and flops count what the equation needs, every operand once; S is the context tokens of all requests.
"""

from dataclasses import dataclass, replace

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.compiler.pointwise import operations, write
from octavo.compiler.program import ITEM_BYTES, Dim


def number(name: str, value: Dim) -> Arg:
    """A size of the step, of which nothing is known when the kernel is compiled."""
    return Arg(name, "scalar", "i32", is_divisible_by_16=False, value=value)


def tiles(name: str, dtype: str, shape: tuple[Dim, ...], block: tuple[int, ...]) -> Arg:
    return Arg(name, "descriptor", dtype, shape=shape, block=block)


def power_of_2(number: int, at_least: int = 1) -> int:
    """The smallest power of two that is not below either."""
    return max(1 << max(number - 1, 0).bit_length(), at_least)


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def warps_for(elements: int) -> int:
    """Warps of a program that streams so many elements: 16 a thread, from 1 to 16 warps."""
    return min(max(power_of_2(elements) // 512, 1), 16)


def gather_rows_spec(op: str, rows: str, source: str, count: Dim, width: int, dtype: str) -> KernelSpec:
    """op is embedding or gather_logits; rows and source name its arguments."""
    block = power_of_2(width)
    return KernelSpec(
        op=op,
        template="triton/gather_rows.py.jinja",
        params=(("dtype", dtype), ("WIDTH", width), ("BLOCK", block)),
        args=(pointer(rows, "i64"), pointer(source, dtype), pointer("out", dtype)),
        grid=(str(count), "1", "1"),
        bytes=f"({count}) * {2 * width * ITEM_BYTES[dtype] + 8}",
        num_warps=warps_for(block),
        label=f"{dtype}_w{width}",
        waits=True,
    )


def add_spec(count: Dim, width: int, dtype: str) -> KernelSpec:
    block = 1024
    return KernelSpec(
        op="add",
        template="triton/add.py.jinja",
        params=(("dtype", dtype), ("BLOCK", block)),
        args=(
            pointer("x", dtype),
            pointer("y", dtype),
            pointer("out", dtype),
            Arg("numel", "scalar", "i32", width % 16 == 0, f"({count}) * {width}"),
        ),
        grid=(f"(({count}) * {width} + {block - 1}) // {block}", "1", "1"),
        bytes=f"({count}) * {3 * width * ITEM_BYTES[dtype]}",
        flops=f"({count}) * {width}",
        num_warps=4,
        label=dtype,
        waits=True,
    )


def rms_norm_spec(
    count: Dim, hidden: int, dtype: str, eps: float, offset: float, residual: bool, weight_dtype: str = ""
) -> KernelSpec:
    """weight_dtype: where it is not dtype; Gemma's 1 + weight is kept in fp32, say."""
    block = power_of_2(hidden)
    inputs = ("x", "residual", "weight") if residual else ("x", "weight")
    outputs = ("out_0", "out_1") if residual else ("out",)
    item = ITEM_BYTES[dtype]
    return KernelSpec(
        op="add_rms_norm" if residual else "rms_norm",
        template="triton/rms_norm.py.jinja",
        params=(
            ("dtype", dtype), ("residual", residual), ("quantize", ""), ("by_token", False), ("keep", True),
            ("EPS", eps), ("OFFSET", offset), ("HIDDEN", hidden), ("BLOCK", block),
        ),
        args=tuple(
            pointer(name, weight_dtype if name == "weight" and weight_dtype else dtype)
            for name in inputs + outputs
        ),
        grid=(str(count), "1", "1"),
        bytes=f"({count}) * {(4 if residual else 2) * hidden * item} + {hidden * item}",
        flops=f"({count}) * {(5 if residual else 4) * hidden}",
        num_warps=warps_for(block),
        label=f"{'add_' if residual else ''}{dtype}_h{hidden}",
        waits=True,
    )  # fmt: skip


def layer_norm_spec(count: Dim, hidden: int, dtype: str, eps: float, weights: dict[str, str]) -> KernelSpec:
    """weights: name -> dtype of those of weight and bias that there are."""
    block = power_of_2(hidden)
    return KernelSpec(
        op="layer_norm",
        template="triton/layer_norm.py.jinja",
        params=(
            ("dtype", dtype), ("weight", "weight" in weights), ("bias", "bias" in weights), ("EPS", eps),
            ("HIDDEN", hidden), ("BLOCK", block),
        ),
        args=tuple(pointer(name, kind) for name, kind in {"x": dtype, **weights, "out": dtype}.items()),
        grid=(str(count), "1", "1"),
        bytes=f"({count}) * {2 * hidden * ITEM_BYTES[dtype]}",
        flops=f"({count}) * {8 * hidden}",
        num_warps=warps_for(block),
        label=f"{dtype}_h{hidden}",
        waits=True,
    )  # fmt: skip


def pointwise_spec(
    count: Dim, width: int, operands: dict[str, tuple[str, str]], expression: str, out_dtype: str
) -> KernelSpec:
    """operands: name -> dtype, and "rows", "vector" or "column"."""
    block = min(power_of_2(width), 1024)
    kinds = ";".join(f"{name} {kind}" for name, (_, kind) in operands.items())
    item = (
        sum(ITEM_BYTES[dtype] for dtype, kind in operands.values() if kind == "rows") + ITEM_BYTES[out_dtype]
    )
    return KernelSpec(
        op="pointwise",
        template="triton/pointwise.py.jinja",
        params=(
            ("expression", expression), ("body", write(expression, repr, lambda f, x: TRITON_CALLS[f].format(x))),
            ("operands", kinds), ("WIDTH", width), ("BLOCK", block),
        ),
        args=(*(pointer(name, dtype) for name, (dtype, _) in operands.items()), pointer("out", out_dtype)),
        grid=(str(count), str(ceil_div(width, block)), "1"),
        bytes=f"({count}) * {width * item}",
        flops=f"({count}) * {width * operations(expression)}",
        num_warps=warps_for(block),
        label=f"{out_dtype}_w{width}",
        waits=True,
    )  # fmt: skip


# The functions of pointwise expressions; tanh and the tanh form of gelu through exp, which cannot overflow to nan.
TRITON_CALLS = {
    "exp": "tl.exp({0})", "sigmoid": "(1.0 / (1.0 + tl.exp(-{0})))", "rsqrt": "tl.rsqrt({0})",
    "tanh": "(2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0)", "sqrt": "tl.sqrt({0})",
    "silu": "({0} / (1.0 + tl.exp(-{0})))", "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "gelu": "(0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476)))",
    "gelu_tanh": "({0} / (1.0 + tl.exp(-1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0}))))",
}  # fmt: skip


def act_mul_spec(count: Dim, intermediate: int, dtype: str, activation: str) -> KernelSpec:
    block = min(power_of_2(intermediate), 1024)
    return KernelSpec(
        op="act_mul",
        template="triton/act_mul.py.jinja",
        params=(
            ("dtype", dtype), ("activation", activation), ("INTERMEDIATE", intermediate), ("BLOCK", block),
        ),
        args=(pointer("gate_up", dtype), pointer("out", dtype)),
        grid=(str(count), str(ceil_div(intermediate, block)), "1"),
        bytes=f"({count}) * {3 * intermediate * ITEM_BYTES[dtype]}",
        flops=f"({count}) * {5 * intermediate}",
        num_warps=warps_for(block),
        label=f"{activation}_{dtype}_i{intermediate}",
        waits=True,
    )  # fmt: skip


def rope_spec(
    count: Dim, num_heads: int, head_dim: int, rotary_dim: int, dtype: str, interleaved: bool
) -> KernelSpec:
    block_d = power_of_2(head_dim)
    block_h = min(power_of_2(num_heads), max(2048 // block_d, 1))
    return KernelSpec(
        op="rope",
        template="triton/rope.py.jinja",
        params=(
            ("dtype", dtype), ("interleaved", interleaved), ("NUM_HEADS", num_heads), ("HEAD_DIM", head_dim),
            ("ROTARY_DIM", rotary_dim), ("BLOCK_H", block_h), ("BLOCK_D", block_d),
        ),
        args=tuple(pointer(name, dtype) for name in ("x", "cos", "sin", "out")),
        grid=(str(count), str(ceil_div(num_heads, block_h)), "1"),
        bytes=f"({count}) * {2 * (num_heads * head_dim + rotary_dim) * ITEM_BYTES[dtype]}",
        flops=f"({count}) * {3 * num_heads * rotary_dim}",
        num_warps=warps_for(block_h * block_d),
        label=f"{dtype}_h{num_heads}_d{head_dim}",
        waits=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """The head counts and sizes of an attention layer and the page size of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def label(self) -> str:
        return f"h{self.num_heads}_kv{self.num_kv_heads}_d{self.head_dim}_p{self.page_size}"

    @property
    def params(self) -> tuple[tuple[str, Param], ...]:
        return (
            ("NUM_HEADS", self.num_heads), ("NUM_KV_HEADS", self.num_kv_heads), ("HEAD_DIM", self.head_dim),
            ("VALUE_DIM", self.value_dim), ("PAGE_SIZE", self.page_size),
        )  # fmt: skip

    @property
    def blocks(self) -> tuple[tuple[str, Param], ...]:
        """Tile widths over the head sizes; 16 is the least that a product takes."""
        return ("BLOCK_D", power_of_2(self.head_dim, 16)), ("BLOCK_V", power_of_2(self.value_dim, 16))


def kv_write_spec(count: Dim, heads: Heads, dtype: str) -> KernelSpec:
    block_h = power_of_2(heads.num_kv_heads)
    width = heads.num_kv_heads * (heads.head_dim + heads.value_dim)
    shape = tuple(entry for entry in heads.params if entry[0] != "NUM_HEADS")
    names = ("k", "v", "k_cache", "v_cache")
    return KernelSpec(
        op="kv_write",
        template="triton/kv_write.py.jinja",
        params=(("dtype", dtype), ("pages", ""), *shape, ("BLOCK_H", block_h), *heads.blocks, ("HW", False)),
        args=(*(pointer(name, dtype) for name in names), pointer("slot_mapping", "i64")),
        grid=(str(count), "1", "1"),
        bytes=f"({count}) * {2 * width * ITEM_BYTES[dtype] + 8}",
        num_warps=warps_for(block_h * power_of_2(heads.head_dim, 16)),
        label=f"{dtype}_kv{heads.num_kv_heads}_d{heads.head_dim}_p{heads.page_size}",
        waits=True,
    )


def rope_kv_write_spec(
    count: Dim, heads: Heads, rotary_dim: int, dtype: str, interleaved: bool
) -> KernelSpec:
    block_g = power_of_2(heads.group)
    width = (heads.num_heads + heads.num_kv_heads) * heads.head_dim + heads.num_kv_heads * heads.value_dim
    tables = tuple(pointer(name, dtype) for name in ("qkv", "cos_table", "sin_table"))
    indices = tuple(pointer(name, "i64") for name in ("positions", "slot_mapping"))
    results = tuple(pointer(name, dtype) for name in ("k_cache", "v_cache", "out"))
    return KernelSpec(
        op="rope_kv_write",
        template="triton/rope_kv_write.py.jinja",
        params=(
            ("dtype", dtype), ("pages", ""), ("interleaved", interleaved), *heads.params,
            ("ROTARY_DIM", rotary_dim), ("BLOCK_G", block_g), *heads.blocks, ("HW", False),
        ),
        args=(*tables, *indices, *results),
        grid=(str(count), str(heads.num_kv_heads), "1"),
        bytes=f"({count}) * {2 * (width + rotary_dim) * ITEM_BYTES[dtype] + 16}",
        flops=f"({count}) * {3 * (heads.num_heads + heads.num_kv_heads) * rotary_dim}",
        num_warps=warps_for(block_g * power_of_2(heads.head_dim, 16)),
        label=f"{dtype}_{heads.label}",
        waits=True,
    )  # fmt: skip


def in_order(*specs: KernelSpec) -> KernelSpec:
    """One node's launches as one spec: the first, with the others behind it."""
    return replace(specs[0], also=specs[1:])
