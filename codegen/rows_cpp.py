"""The selection table of the cpp family. One row per op: what differs between CPUs, the C++ text decides."""

from collections.abc import Callable, Mapping

from torch import fx

from octavo.codegen.kernel import Arg, KernelSpec, Param
from octavo.codegen.row import Row, arguments, result_dtype, row_count, static_size, tensor, token_count
from octavo.compiler.dims import dtype_name
from octavo.compiler.ops.pointwise import kind
from octavo.compiler.pointwise import ACTIVATIONS, NAMES, operations, write
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

# Elements of K that one dot product takes at most: the rows of a tile then fit the first-level cache.
MAX_CHUNK = 768
# Query rows (tokens times heads of a group) that share each key.
QUERY_ROWS = 16


def embedding(node: fx.Node, target: Target) -> KernelSpec:
    dtype = _dtype(node, "weight")
    rows, width = _sizes(node, "weight", 0, 1)
    count = row_count(node)
    args = (_pointer("ids", "i64"), _pointer("weight", dtype), _pointer("out", dtype), _rows(node))
    return _spec(
        "embedding", args, f"{dtype}_w{width}", dict(dtype=dtype, ROWS=rows, WIDTH=width),
        bytes=f"{count} * {2 * width * ITEM_BYTES[dtype] + 8}",
    )  # fmt: skip


def rms_norm(node: fx.Node, target: Target) -> KernelSpec:
    dtype, weight_dtype, hidden = _dtype(node, "x"), _dtype(node, "weight"), static_size(node, "x", -1)
    args = (_pointer("x", dtype), _pointer("weight", weight_dtype), _pointer("out", dtype), _rows(node))
    return _spec(
        "rms_norm", args, f"{dtype}_h{hidden}", dict(dtype=dtype, weight_dtype=weight_dtype, **_norm(node)),
        bytes=f"{row_count(node)} * {2 * hidden * ITEM_BYTES[dtype]} + {hidden * ITEM_BYTES[weight_dtype]}",
        flops=f"{row_count(node)} * {4 * hidden}",
    )  # fmt: skip


def add_rms_norm(node: fx.Node, target: Target) -> KernelSpec:
    dtype, weight_dtype, hidden = _dtype(node, "x"), _dtype(node, "weight"), static_size(node, "x", -1)
    args = (
        _pointer("x", dtype), _pointer("residual", dtype), _pointer("weight", weight_dtype),
        _pointer("out_0", dtype), _pointer("out_1", dtype), _rows(node),
    )  # fmt: skip
    return _spec(
        "add_rms_norm", args, f"{dtype}_h{hidden}",
        dict(dtype=dtype, weight_dtype=weight_dtype, **_norm(node)),
        bytes=f"{row_count(node)} * {4 * hidden * ITEM_BYTES[dtype]} + {hidden * ITEM_BYTES[weight_dtype]}",
        flops=f"{row_count(node)} * {5 * hidden}",
    )  # fmt: skip


def linear(node: fx.Node, target: Target) -> KernelSpec:
    dtype, out_dtype = _dtype(node, "x"), result_dtype(node)
    columns, length = _sizes(node, "weight", 0, 1)
    has_bias = arguments(node)["bias"] is not None
    args = [_pointer("x", dtype), _pointer("weight", dtype), _pointer("out", out_dtype), _rows(node)]
    if has_bias:
        args.insert(2, _pointer("bias", dtype))
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
    dtype, table_dtype = _dtype(node, "x"), _dtype(node, "cos")
    heads, head_dim = _sizes(node, "x", 2, 3)
    rotary_dim = static_size(node, "cos", -1)
    args = (
        _pointer("x", dtype), _pointer("cos", table_dtype), _pointer("sin", table_dtype),
        _pointer("out", dtype), _scalar("num_rows", token_count(node)),
    )  # fmt: skip
    values = dict(dtype=dtype, table_dtype=table_dtype, interleaved=_interleaved(node))
    width = heads * head_dim
    return _spec(
        "rope", args, f"{dtype}_h{heads}_d{head_dim}",
        values | dict(HEADS=heads, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim),
        bytes=f"T * {2 * width * ITEM_BYTES[dtype] + 2 * rotary_dim * ITEM_BYTES[table_dtype]}",
        flops=f"T * {3 * heads * rotary_dim}",
    )  # fmt: skip


def kv_write(node: fx.Node, target: Target) -> KernelSpec:
    dtype, cache_dtype = _dtype(node, "k"), _dtype(node, "k_cache")
    cache = _cache_sizes(node)
    args = (
        _pointer("k", dtype), _pointer("v", dtype), _pointer("k_cache", cache_dtype),
        _pointer("v_cache", cache_dtype), _pointer("slot_mapping", "i64"), _scalar("num_tokens", "T"),
        _scalar("num_pages", "num_pages"),
    )  # fmt: skip
    width = cache["KV_HEADS"] * (cache["HEAD_DIM"] + cache["VALUE_DIM"])
    return _spec(
        "kv_write", args, f"{dtype}_{cache_dtype}_h{cache['KV_HEADS']}",
        dict(dtype=dtype, cache_dtype=cache_dtype, **cache),
        bytes=f"T * {width * (ITEM_BYTES[dtype] + ITEM_BYTES[cache_dtype]) + 8}",
    )  # fmt: skip


def rope_kv_write(node: fx.Node, target: Target) -> KernelSpec:
    dtype, table_dtype, cache_dtype = (_dtype(node, name) for name in ("qkv", "cos_table", "k_cache"))
    cache, heads = _cache_sizes(node), arguments(node)["num_heads"]
    positions, rotary_dim = _sizes(node, "cos_table", 0, 1)
    args = (
        _pointer("qkv", dtype), _pointer("cos_table", table_dtype), _pointer("sin_table", table_dtype),
        _pointer("positions", "i64"), _pointer("slot_mapping", "i64"), _pointer("k_cache", cache_dtype),
        _pointer("v_cache", cache_dtype), _pointer("out", dtype), _scalar("num_tokens", "T"),
        _scalar("num_pages", "num_pages"),
    )  # fmt: skip
    values = dict(
        dtype=dtype, table_dtype=table_dtype, cache_dtype=cache_dtype, interleaved=_interleaved(node)
    )
    q_width = heads * cache["HEAD_DIM"]
    kv_width = cache["KV_HEADS"] * (cache["HEAD_DIM"] + cache["VALUE_DIM"])
    moved = (2 * q_width + kv_width) * ITEM_BYTES[dtype] + kv_width * ITEM_BYTES[cache_dtype]
    return _spec(
        "rope_kv_write", args, f"{dtype}_{cache_dtype}_h{heads}_{cache['KV_HEADS']}_d{cache['HEAD_DIM']}",
        values | dict(HEADS=heads, ROTARY_DIM=rotary_dim, POSITIONS=positions, **cache),
        bytes=f"T * {moved + 2 * rotary_dim * ITEM_BYTES[table_dtype] + 16}",
        flops=f"T * {3 * (heads + cache['KV_HEADS']) * rotary_dim}",
    )  # fmt: skip


def paged_attention(node: fx.Node, target: Target) -> KernelSpec:
    dtype, cache_dtype, cache = _dtype(node, "q"), _dtype(node, "k_cache"), _cache_sizes(node)
    given = arguments(node)
    heads = static_size(node, "q", 2)
    args = [_pointer("q", dtype), _pointer("k_cache", cache_dtype), _pointer("v_cache", cache_dtype)]
    args += [_pointer(name, "i32") for name in ("page_table", "seq_lens", "cu_seqlens_q")]
    values: dict[str, Param] = dict(dtype=dtype, cache_dtype=cache_dtype, sinks=given["sinks"] is not None)
    values["slopes"] = given["slopes"] is not None
    for name, key in (("sinks", "sink_dtype"), ("slopes", "slope_dtype")):
        if given[name] is not None:
            args.append(_pointer(name, _dtype(node, name)))
            values[key] = _dtype(node, name)
    args += [_pointer("out", dtype), *(_scalar(name, name) for name in ("T", "R", "P", "num_pages"))]
    group = heads // cache["KV_HEADS"]
    values |= dict(HEADS=heads, QUERY_TOKENS=max(1, QUERY_ROWS // group), WINDOW=given["window"])
    values |= dict(SCALE=float(given["scale"]), SOFTCAP=float(given["softcap"]), **cache)
    width = cache["HEAD_DIM"] + cache["VALUE_DIM"]
    label = f"{dtype}_{cache_dtype}_h{heads}_{cache['KV_HEADS']}_d{cache['HEAD_DIM']}"
    key_bytes = cache["KV_HEADS"] * width * ITEM_BYTES[cache_dtype]
    return _spec(
        "paged_attention", tuple(args), label, values,
        bytes=f"T * {heads * width * ITEM_BYTES[dtype]} + S * {key_bytes}",
        flops=f"S * {2 * heads * width}",
    )  # fmt: skip


def act_mul(node: fx.Node, target: Target) -> KernelSpec:
    dtype, width = _dtype(node, "gate_up"), static_size(node, "gate_up", -1) // 2
    activation = arguments(node)["activation"]
    args = (_pointer("gate_up", dtype), _pointer("out", dtype), _rows(node))
    return _spec(
        "act_mul", args, f"{dtype}_{activation}_w{width}",
        dict(dtype=dtype, activation=activation, WIDTH=width),
        bytes=f"{row_count(node)} * {3 * width * ITEM_BYTES[dtype]}",
        flops=f"{row_count(node)} * {16 * width}",
    )  # fmt: skip


def gather_logits(node: fx.Node, target: Target) -> KernelSpec:
    dtype, width = _dtype(node, "hidden"), static_size(node, "hidden", -1)
    args = (
        _pointer("hidden", dtype), _pointer("logit_rows", "i64"), _pointer("out", dtype),
        _scalar("num_tokens", "T"), _rows(node),
    )  # fmt: skip
    return _spec(
        "gather_logits", args, f"{dtype}_w{width}", dict(dtype=dtype, WIDTH=width),
        bytes=f"{row_count(node)} * {2 * width * ITEM_BYTES[dtype] + 8}",
    )  # fmt: skip


def add(node: fx.Node, target: Target) -> KernelSpec:
    dtype, width = _dtype(node, "x"), static_size(node, "x", -1)
    args = (_pointer("x", dtype), _pointer("y", dtype), _pointer("out", dtype), _rows(node))
    return _spec(
        "add", args, f"{dtype}_w{width}", dict(dtype=dtype, WIDTH=width),
        bytes=f"{row_count(node)} * {3 * width * ITEM_BYTES[dtype]}", flops=f"{row_count(node)} * {width}",
    )  # fmt: skip


def layer_norm(node: fx.Node, target: Target) -> KernelSpec:
    dtype, hidden, given = _dtype(node, "x"), static_size(node, "x", -1), arguments(node)
    present = [name for name in ("weight", "bias") if given[name] is not None]
    weight_dtype = _dtype(node, present[0]) if present else dtype
    args = (
        _pointer("x", dtype), *(_pointer(name, weight_dtype) for name in present), _pointer("out", dtype),
        _rows(node),
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
    given, out_dtype = arguments(node), result_dtype(node)
    names = [name for name in NAMES if given[name] is not None]
    width, expression = static_size(node, "a", -1), given["expression"]
    kinds = {name: kind(tensor(node, name), tensor(node, "a")) for name in names}
    body = write(expression, lambda value: f"{value!r}f", lambda name, x: f"{CPP_CALLS.get(name, name)}({x})")
    item = (
        sum(ITEM_BYTES[_dtype(node, name)] for name in names if kinds[name] == "rows") + ITEM_BYTES[out_dtype]
    )
    return _spec(
        "pointwise",
        (*(_pointer(name, _dtype(node, name)) for name in names), _pointer("out", out_dtype), _rows(node)),
        f"{out_dtype}_w{width}",
        dict(
            expression=expression, body=body, out_dtype=out_dtype, WIDTH=width, OPERATIONS=operations(expression) + 1,
            operands=";".join(f"{name} {_dtype(node, name)} {kinds[name]}" for name in names),
        ),
        bytes=f"({row_count(node)}) * {width * item}",
        flops=f"({row_count(node)}) * {width * operations(expression)}",
    )  # fmt: skip


def floats(*groups: str) -> Callable[[fx.Node, Target], str | None]:
    """Refuses arguments other than fp32 and bf16; each group "x weight" lists arguments of one dtype."""

    def reject(node: fx.Node, target: Target) -> str | None:
        for group in groups:
            names = [name for name in group.split() if arguments(node)[name] is not None]
            dtypes = [str(tensor(node, name).dtype).removeprefix("torch.") for name in names]
            if names and set(dtypes) not in ({"float32"}, {"bfloat16"}):
                found = ", ".join(f"{name} {dtype}" for name, dtype in zip(names, dtypes, strict=True))
                return f"expected fp32 or bf16, one for all, got {found}"
        return None

    return reject


def unknown_activation(node: fx.Node, target: Target) -> str | None:
    activation = arguments(node)["activation"]
    if activation not in ACTIVATIONS:
        return f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
    return floats("gate_up")(node, target)


def uneven_heads(node: fx.Node, target: Target) -> str | None:
    heads, kv_heads = static_size(node, "q", 2), static_size(node, "k_cache", 1)
    if heads % kv_heads:
        return f"heads must be a multiple of kv heads, got {heads} and {kv_heads}"
    return floats("q", "k_cache v_cache", "sinks")(node, target)


ROWS: tuple[Row, ...] = (
    Row("embedding", "embedding", floats("weight"), embedding),
    Row("rms_norm", "rms_norm", floats("x", "weight"), rms_norm),
    Row("add_rms_norm", "add_rms_norm", floats("x residual", "weight"), add_rms_norm),
    Row("linear", "linear", floats("x weight bias"), linear),
    Row("rope", "rope", floats("x", "cos sin"), rope),
    Row("kv_write", "kv_write", floats("k v", "k_cache v_cache"), kv_write),
    Row(
        "rope_kv_write",
        "rope_kv_write",
        floats("qkv", "cos_table sin_table", "k_cache v_cache"),
        rope_kv_write,
    ),
    Row("paged_attention", "paged_attention", uneven_heads, paged_attention),
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


def _pointer(name: str, dtype: str) -> Arg:
    return Arg(name, "pointer", dtype)


def _scalar(name: str, value: Param) -> Arg:
    return Arg(name, "scalar", "i64", value=value)


def _rows(node: fx.Node) -> Arg:
    return _scalar("num_rows", row_count(node))


def _dtype(node: fx.Node, name: str) -> str:
    return dtype_name(tensor(node, name))


def _sizes(node: fx.Node, name: str, *axes: int) -> tuple[int, ...]:
    return tuple(static_size(node, name, axis) for axis in axes)


def _cache_sizes(node: fx.Node) -> dict[str, int]:
    kv_heads, page_size, head_dim = _sizes(node, "k_cache", 1, 2, 3)
    return dict(
        KV_HEADS=kv_heads, PAGE_SIZE=page_size, HEAD_DIM=head_dim, VALUE_DIM=static_size(node, "v_cache", 3)
    )


def _norm(node: fx.Node) -> dict[str, Param]:
    given = arguments(node)
    return dict(HIDDEN=static_size(node, "x", -1), EPS=float(given["eps"]), OFFSET=float(given["offset"]))


def _interleaved(node: fx.Node) -> str:
    """As C++ spells a truth value."""
    return "true" if arguments(node)["interleaved"] else "false"
