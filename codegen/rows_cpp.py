"""The selection table of the cpp family. One row per op: what differs between CPUs, the C++ text decides."""

from collections.abc import Callable, Mapping

from torch import fx

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.row import Row, dtype_of, result_dtype, row_count, static_size, tensor, token_count
from octavo.compiler.legality import named_arguments
from octavo.compiler.ops.pointwise import kind
from octavo.compiler.pointwise import ACTIVATIONS, NAMES, operations, write
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

# Elements of K that one dot product takes at most: the rows of a tile then fit the first-level cache.
MAX_CHUNK = 768
# Query rows (tokens times heads of a group) that share each key.
QUERY_ROWS = 16


def embedding(node: fx.Node, target: Target) -> KernelSpec:
    dtype = dtype_of(node, "weight")
    rows, width = _sizes(node, "weight", 0, 1)
    count = row_count(node)
    args = (pointer("ids", "i64"), pointer("weight", dtype), pointer("out", dtype), rows_arg(node))
    return _spec(
        "embedding", args, f"{dtype}_w{width}", dict(dtype=dtype, ROWS=rows, WIDTH=width),
        bytes=f"{count} * {2 * width * ITEM_BYTES[dtype] + 8}",
    )  # fmt: skip


def rms_norm(node: fx.Node, target: Target) -> KernelSpec:
    dtype, weight_dtype, hidden = dtype_of(node, "x"), dtype_of(node, "weight"), static_size(node, "x", -1)
    args = (pointer("x", dtype), pointer("weight", weight_dtype), pointer("out", dtype), rows_arg(node))
    return _spec(
        "rms_norm", args, f"{dtype}_h{hidden}", dict(dtype=dtype, weight_dtype=weight_dtype, **_norm(node)),
        bytes=f"{row_count(node)} * {2 * hidden * ITEM_BYTES[dtype]} + {hidden * ITEM_BYTES[weight_dtype]}",
        flops=f"{row_count(node)} * {4 * hidden}",
    )  # fmt: skip


def add_rms_norm(node: fx.Node, target: Target) -> KernelSpec:
    dtype, weight_dtype, hidden = dtype_of(node, "x"), dtype_of(node, "weight"), static_size(node, "x", -1)
    args = (
        pointer("x", dtype), pointer("residual", dtype), pointer("weight", weight_dtype),
        pointer("out_0", dtype), pointer("out_1", dtype), rows_arg(node),
    )  # fmt: skip
    return _spec(
        "add_rms_norm", args, f"{dtype}_h{hidden}",
        dict(dtype=dtype, weight_dtype=weight_dtype, **_norm(node)),
        bytes=f"{row_count(node)} * {4 * hidden * ITEM_BYTES[dtype]} + {hidden * ITEM_BYTES[weight_dtype]}",
        flops=f"{row_count(node)} * {5 * hidden}",
    )  # fmt: skip


def linear(node: fx.Node, target: Target) -> KernelSpec:
    dtype, out_dtype = dtype_of(node, "x"), result_dtype(node)
    columns, length = _sizes(node, "weight", 0, 1)
    has_bias = named_arguments(node)["bias"] is not None
    args = [pointer("x", dtype), pointer("weight", dtype), pointer("out", out_dtype), rows_arg(node)]
    if has_bias:
        args.insert(2, pointer("bias", dtype))
    chunks = -(-length // MAX_CHUNK)
    chunk = -(-length // (64 * chunks)) * 64
    item, count = ITEM_BYTES[dtype], row_count(node)
    row_bytes = length * item + columns * ITEM_BYTES[out_dtype]
    return _spec(
        "linear", tuple(args), f"{dtype}_n{columns}_k{length}",
        dict(dtype=dtype, out_dtype=out_dtype, bias=has_bias, N=columns, K=length, CHUNK=chunk),
        bytes=f"{count} * {row_bytes} + {columns * (length + has_bias) * item}",
        flops=f"{count} * {2 * columns * length}",
    )  # fmt: skip


def rope(node: fx.Node, target: Target) -> KernelSpec:
    dtype, table_dtype = dtype_of(node, "x"), dtype_of(node, "cos")
    heads, head_dim = _sizes(node, "x", 2, 3)
    rotary_dim = static_size(node, "cos", -1)
    args = (
        pointer("x", dtype), pointer("cos", table_dtype), pointer("sin", table_dtype),
        pointer("out", dtype), scalar("num_rows", token_count(node)),
    )  # fmt: skip
    values = dict(dtype=dtype, table_dtype=table_dtype, interleaved=_interleaved(node))
    width = heads * head_dim
    return _spec(
        "rope", args, f"{dtype}_h{heads}_d{head_dim}",
        values | dict(HEADS=heads, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim),
        bytes=f"T * {2 * width * ITEM_BYTES[dtype] + 2 * rotary_dim * ITEM_BYTES[table_dtype]}",
        flops=f"T * {3 * heads * rotary_dim}",
    )  # fmt: skip


def act_mul(node: fx.Node, target: Target) -> KernelSpec:
    dtype, width = dtype_of(node, "gate_up"), static_size(node, "gate_up", -1) // 2
    activation = named_arguments(node)["activation"]
    args = (pointer("gate_up", dtype), pointer("out", dtype), rows_arg(node))
    return _spec(
        "act_mul", args, f"{dtype}_{activation}_w{width}",
        dict(dtype=dtype, activation=activation, WIDTH=width),
        bytes=f"{row_count(node)} * {3 * width * ITEM_BYTES[dtype]}",
        flops=f"{row_count(node)} * {16 * width}",
    )  # fmt: skip


def gather_logits(node: fx.Node, target: Target) -> KernelSpec:
    dtype, width = dtype_of(node, "hidden"), static_size(node, "hidden", -1)
    args = (
        pointer("hidden", dtype), pointer("logit_rows", "i64"), pointer("out", dtype),
        scalar("num_tokens", "T"), rows_arg(node),
    )  # fmt: skip
    return _spec(
        "gather_logits", args, f"{dtype}_w{width}", dict(dtype=dtype, WIDTH=width),
        bytes=f"{row_count(node)} * {2 * width * ITEM_BYTES[dtype] + 8}",
    )  # fmt: skip


def add(node: fx.Node, target: Target) -> KernelSpec:
    dtype, width = dtype_of(node, "x"), static_size(node, "x", -1)
    args = (pointer("x", dtype), pointer("y", dtype), pointer("out", dtype), rows_arg(node))
    return _spec(
        "add", args, f"{dtype}_w{width}", dict(dtype=dtype, WIDTH=width),
        bytes=f"{row_count(node)} * {3 * width * ITEM_BYTES[dtype]}", flops=f"{row_count(node)} * {width}",
    )  # fmt: skip


def layer_norm(node: fx.Node, target: Target) -> KernelSpec:
    dtype, hidden, given = dtype_of(node, "x"), static_size(node, "x", -1), named_arguments(node)
    present = [name for name in ("weight", "bias") if given[name] is not None]
    weight_dtype = dtype_of(node, present[0]) if present else dtype
    args = (
        pointer("x", dtype), *(pointer(name, weight_dtype) for name in present), pointer("out", dtype),
        rows_arg(node),
    )  # fmt: skip
    values: dict[str, Param] = dict(
        dtype=dtype, weight_dtype=weight_dtype, HIDDEN=hidden, EPS=float(given["eps"])
    )
    return _spec(
        "layer_norm", args, f"{dtype}_h{hidden}",
        values | {name: name in present for name in ("weight", "bias")},
        bytes=f"({row_count(node)}) * {2 * hidden * ITEM_BYTES[dtype]}",
        flops=f"({row_count(node)}) * {8 * hidden}",
    )  # fmt: skip


CPP_CALLS = {"exp": "exp_fp32", "tanh": "std::tanh"}


def pointwise(node: fx.Node, target: Target) -> KernelSpec:
    given, out_dtype = named_arguments(node), result_dtype(node)
    names = [name for name in NAMES if given[name] is not None]
    width, expression = static_size(node, "a", -1), given["expression"]
    kinds = {name: kind(tensor(node, name), tensor(node, "a")) for name in names}
    body = write(expression, lambda value: f"{value!r}f", lambda name, x: f"{CPP_CALLS.get(name, name)}({x})")
    item = (
        sum(ITEM_BYTES[dtype_of(node, name)] for name in names if kinds[name] == "rows")
        + ITEM_BYTES[out_dtype]
    )
    return _spec(
        "pointwise",
        (*(pointer(name, dtype_of(node, name)) for name in names), pointer("out", out_dtype), rows_arg(node)),
        f"{out_dtype}_w{width}",
        dict(
            expression=expression, body=body, out_dtype=out_dtype, WIDTH=width, OPERATIONS=operations(expression) + 1,
            operands=";".join(f"{name} {dtype_of(node, name)} {kinds[name]}" for name in names),
        ),
        bytes=f"({row_count(node)}) * {width * item}",
        flops=f"({row_count(node)}) * {width * operations(expression)}",
    )  # fmt: skip


def floats(*groups: str) -> Callable[[fx.Node, Target], str | None]:
    """Refuses arguments other than fp32 and bf16; each group "x weight" lists arguments of one dtype."""

    def reject(node: fx.Node, target: Target) -> str | None:
        for group in groups:
            names = [name for name in group.split() if named_arguments(node)[name] is not None]
            dtypes = [str(tensor(node, name).dtype).removeprefix("torch.") for name in names]
            if names and set(dtypes) not in ({"float32"}, {"bfloat16"}):
                found = ", ".join(f"{name} {dtype}" for name, dtype in zip(names, dtypes, strict=True))
                return f"expected fp32 or bf16, one for all, got {found}"
        return None

    return reject


def unknown_activation(node: fx.Node, target: Target) -> str | None:
    activation = named_arguments(node)["activation"]
    if activation not in ACTIVATIONS:
        return f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
    return floats("gate_up")(node, target)


ROWS: tuple[Row, ...] = (
    Row("embedding", "embedding", floats("weight"), embedding),
    Row("rms_norm", "rms_norm", floats("x", "weight"), rms_norm),
    Row("add_rms_norm", "add_rms_norm", floats("x residual", "weight"), add_rms_norm),
    Row("linear", "linear", floats("x weight bias"), linear),
    Row("rope", "rope", floats("x", "cos sin"), rope),
    Row("act_mul", "act_mul", unknown_activation, act_mul),
    Row("gather_logits", "gather_logits", floats("hidden"), gather_logits),
    Row("add", "add", floats("x y"), add),
    Row("layer_norm", "layer_norm", floats("x", "weight bias"), layer_norm),
    Row("pointwise", "pointwise", floats("a", "b", "c", "d"), pointwise),
)


def _spec(
    op: str, args: tuple[Arg, ...], label: str, values: Mapping[str, Param], bytes: str, flops: str = "0"
) -> KernelSpec:
    parameters = tuple(values.items())
    return KernelSpec(op, f"cpp/{op}.cpp.jinja", parameters, args, bytes=bytes, flops=flops, label=label)


def scalar(name: str, value: Param) -> Arg:
    """A size of the step."""
    return Arg(name, "scalar", "i64", value=value)


def rows_arg(node: fx.Node) -> Arg:
    """How many rows the kernel makes."""
    return scalar("num_rows", row_count(node))


def _sizes(node: fx.Node, name: str, *axes: int) -> tuple[int, ...]:
    return tuple(static_size(node, name, axis) for axis in axes)


def _norm(node: fx.Node) -> dict[str, Param]:
    given = named_arguments(node)
    return dict(HIDDEN=static_size(node, "x", -1), EPS=float(given["eps"]), OFFSET=float(given["offset"]))


def _interleaved(node: fx.Node) -> str:
    """As C++ spells a truth value."""
    return "true" if named_arguments(node)["interleaved"] else "false"
