"""Selection rows of the cpp family for quantisation, and for products of quantised weights."""

from collections.abc import Callable

from torch import fx

from octavo.codegen.kernel import KernelSpec, Param, pointer
from octavo.codegen.moe_cpp import chunk
from octavo.codegen.row import Row, dtype_of, op_name, result_dtype, row_count, static_size
from octavo.codegen.rows_cpp import floats, rows_arg, unknown_activation
from octavo.compiler.dims import dtype_name
from octavo.compiler.legality import named_arguments
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

# Operations of one element, about: to quantise it, and to make it by a norm or an activation.
QUANTIZE_OPERATIONS, NORM_OPERATIONS, ACTIVATION_OPERATIONS = 12, 5, 16
PARTS = ("codes", "scales", "outers", "total")


def quantize(node: fx.Node, target: Target) -> KernelSpec:
    return _producer(node, ("x",), static_size(node, "x", -1), 0)


def rms_norm_quantize(node: fx.Node, target: Target) -> KernelSpec:
    return _producer(node, ("x", "weight"), static_size(node, "x", -1), NORM_OPERATIONS)


def add_rms_norm_quantize(node: fx.Node, target: Target) -> KernelSpec:
    return _producer(node, ("x", "residual", "weight"), static_size(node, "x", -1), NORM_OPERATIONS + 1)


def act_mul_quantize(node: fx.Node, target: Target) -> KernelSpec:
    return _producer(node, ("gate_up",), static_size(node, "gate_up", -1) // 2, ACTIVATION_OPERATIONS)


def _producer(node: fx.Node, names: tuple[str, ...], width: int, operations: int) -> KernelSpec:
    """A kernel that makes rows of `width` elements of what it reads, `names`, and quantises them."""
    given, count, op = named_arguments(node), row_count(node), str(op_name(node))
    dtype, outer = dtype_of(node, names[0]), given["outer"]
    results = dict(zip(_parts(node), map(dtype_name, node.meta["val"]), strict=True))
    places = {part: f"out_{index}" for index, part in enumerate(results)}
    values: dict[str, Param] = dict(dtype=dtype, format=given["format"], WIDTH=width)
    values |= {part: places.get(part, "nullptr") for part in PARTS if part != "codes"}
    values["outer"] = "nullptr" if outer is None else "outer"
    if "weight" in names:
        values |= dict(weight_dtype=dtype_of(node, "weight"), EPS=float(given["eps"]))
        values["OFFSET"] = float(given["offset"])
    if "activation" in given:
        values["activation"] = given["activation"]
    inputs = [
        pointer(name, dtype_of(node, name)) for name in (*names, *(["outer"] if outer is not None else []))
    ]
    outputs = [pointer(places[part], results[part]) for part in results]
    moved = sum(static_size(node, n, -1) * ITEM_BYTES[dtype_of(node, n)] for n in names if n != "weight")
    moved += sum(value.shape[-1] * ITEM_BYTES[dtype_name(value)] for value in node.meta["val"])
    return KernelSpec(
        op, f"cpp/{op}.cpp.jinja", tuple(values.items()), (*inputs, *outputs, rows_arg(node)),
        bytes=f"({count}) * {moved}", flops=f"({count}) * {width * (QUANTIZE_OPERATIONS + operations)}",
        label=f"{given['format']}_{dtype}_w{width}",
    )  # fmt: skip


def _parts(node: fx.Node) -> list[str]:
    given = named_arguments(node)
    parts = ["codes"]
    parts += ["scales"] if given["format"] == "nvfp4" else []
    parts += ["outers"] if given["outer"] is None else []
    return [*parts, "total"] if "residual" in given else parts


def nvfp4_linear(node: fx.Node, target: Target) -> KernelSpec:
    columns, length = static_size(node, "weight", 0), 2 * static_size(node, "weight", 1)
    return _product(node, ("x", "x_scale", "weight", "weight_scale"), columns, length, {})


def nvfp4_weight_linear(node: fx.Node, target: Target) -> KernelSpec:
    columns, length = static_size(node, "weight", 0), 2 * static_size(node, "weight", 1)
    more: dict[str, Param] = dict(dtype=dtype_of(node, "x"), CHUNK=chunk(length))
    return _product(node, ("x", "weight", "weight_scale"), columns, length, more)


def fp8_linear(node: fx.Node, target: Target) -> KernelSpec:
    columns, length = static_size(node, "weight", 0), static_size(node, "weight", 1)
    return _product(node, ("x", "weight"), columns, length, dict(CHUNK=chunk(length)))


def _product(
    node: fx.Node, names: tuple[str, ...], columns: int, length: int, more: dict[str, Param]
) -> KernelSpec:
    given, count, out_dtype = named_arguments(node), row_count(node), result_dtype(node)
    op = str(op_name(node))
    optional = [name for name in ("row_scale", "bias") if given.get(name) is not None]
    pointers = [pointer(name, dtype_of(node, name)) for name in (*names, "alpha", *optional)]
    values: dict[str, Param] = dict(
        out_dtype=out_dtype, N=columns, K=length, ALPHAS=static_size(node, "alpha", 0)
    )
    values |= {name: name in optional for name in ("row_scale", "bias")}
    sides: dict[bool, int] = {False: columns * ITEM_BYTES[out_dtype], True: 4 * static_size(node, "alpha", 0)}
    for name in names:
        row = static_size(node, name, -1) * ITEM_BYTES[dtype_of(node, name)]
        is_weight = name.startswith("weight")
        sides[is_weight] += columns * row if is_weight else row
    return KernelSpec(
        op, f"cpp/{op}.cpp.jinja", tuple((values | more).items()),
        (*pointers, pointer("out", out_dtype), rows_arg(node)),
        bytes=f"({count}) * {sides[False]} + {sides[True]}", flops=f"({count}) * {2 * columns * length}",
        label=f"{dtype_of(node, 'x')}_n{columns}_k{length}",
    )  # fmt: skip


def linear_scales(
    *others: Callable[[fx.Node, Target], str | None],
) -> Callable[[fx.Node, Target], str | None]:
    """Refuses block scales in tiles, and what any of the others refuses."""

    def reject(node: fx.Node, target: Target) -> str | None:
        layout = named_arguments(node).get("layout", "linear")
        if layout != "linear":
            return f"block scales must lie in the layout linear, got {layout!r}"
        return next((reason for other in others if (reason := other(node, target))), None)

    return reject


def uneven_blocks(node: fx.Node, target: Target) -> str | None:
    length, blocks = 2 * static_size(node, "weight", 1), static_size(node, "weight_scale", -1)
    if length != blocks * BLOCK_ELEMENTS:
        return f"expected a block scale for {BLOCK_ELEMENTS} elements of {length}, got {blocks}"
    return None


ROWS: tuple[Row, ...] = (
    Row("quantize", "quantize", linear_scales(floats("x", "outer")), quantize),
    Row("rms_norm_quantize", "rms_norm_quantize", linear_scales(floats("x", "weight")), rms_norm_quantize),
    Row(
        "add_rms_norm_quantize",
        "add_rms_norm_quantize",
        linear_scales(floats("x residual", "weight")),
        add_rms_norm_quantize,
    ),
    Row("act_mul_quantize", "act_mul_quantize", linear_scales(unknown_activation), act_mul_quantize),
    Row("nvfp4_linear", "nvfp4_linear", linear_scales(uneven_blocks, floats("bias")), nvfp4_linear),
    Row(
        "nvfp4_weight_linear",
        "nvfp4_weight_linear",
        linear_scales(uneven_blocks, floats("x", "bias")),
        nvfp4_weight_linear,
    ),
    Row("fp8_linear", "fp8_linear", floats("bias"), fp8_linear),
)
