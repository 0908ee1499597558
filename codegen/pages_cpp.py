"""Selection rows of the cpp family for pages of keys and values; mla_cpp has those of latents."""

from collections.abc import Callable

from torch import fx

from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.page_nodes import page_format, row_width
from octavo.codegen.quantized_cpp import QUANTIZE_OPERATIONS
from octavo.codegen.row import Row, dtype_of, has_tree, static_size, tensor, tree_argument
from octavo.codegen.rows_cpp import QUERY_ROWS, floats, scalar
from octavo.compiler.legality import named_arguments
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

# Bytes of an element, its share of a block scale included.
PAGE_BYTES = {"fp8": 1.0, "nvfp4": 0.5 + 1 / BLOCK_ELEMENTS}


def kv_write(node: fx.Node, target: Target) -> KernelSpec:
    dtype, cache = dtype_of(node, "k"), _cache(node)
    args = (
        pointer("k", dtype), pointer("v", dtype), *_caches(node), pointer("slot_mapping", "i64"),
        *_scales(node), scalar("num_tokens", "T"), scalar("num_pages", "num_pages"),
    )  # fmt: skip
    width = _kv_width(node)
    return _spec(
        "kv_write", args, f"{dtype}_{_page_name(node)}_h{cache['KV_HEADS']}", {"dtype": dtype, **cache},
        bytes=f"T * {width * ITEM_BYTES[dtype] + _token_bytes(node) + 8}",
        flops=f"T * {width * QUANTIZE_OPERATIONS}" if cache["pages"] else "0",
    )  # fmt: skip


def rope_kv_write(node: fx.Node, target: Target) -> KernelSpec:
    dtype, table_dtype = dtype_of(node, "qkv"), dtype_of(node, "cos_table")
    cache, heads = _cache(node), named_arguments(node)["num_heads"]
    positions, rotary_dim = (static_size(node, "cos_table", axis) for axis in (0, 1))
    args = (
        pointer("qkv", dtype), pointer("cos_table", table_dtype), pointer("sin_table", table_dtype),
        pointer("positions", "i64"), pointer("slot_mapping", "i64"), *_caches(node), *_scales(node),
        pointer("out", dtype), scalar("num_tokens", "T"), scalar("num_pages", "num_pages"),
    )  # fmt: skip
    values: dict[str, Param] = dict(
        dtype=dtype, table_dtype=table_dtype, HEADS=heads, ROTARY_DIM=rotary_dim, POSITIONS=positions, **cache
    )
    values["interleaved"] = "true" if named_arguments(node)["interleaved"] else "false"
    q_width, kv_width = heads * int(cache["HEAD_DIM"]), _kv_width(node)
    moved = (2 * q_width + kv_width) * ITEM_BYTES[dtype] + _token_bytes(node)
    operations = 3 * (heads + int(cache["KV_HEADS"])) * rotary_dim
    return _spec(
        "rope_kv_write", args,
        f"{dtype}_{_page_name(node)}_h{heads}_{cache['KV_HEADS']}_d{cache['HEAD_DIM']}", values,
        bytes=f"T * {moved + 2 * rotary_dim * ITEM_BYTES[table_dtype] + 16}",
        flops=f"T * {operations + (kv_width * QUANTIZE_OPERATIONS if cache['pages'] else 0)}",
    )  # fmt: skip


def paged_attention(node: fx.Node, target: Target) -> KernelSpec:
    dtype, cache, given = dtype_of(node, "q"), _cache(node), named_arguments(node)
    heads = static_size(node, "q", 2)
    args = [pointer("q", dtype), *_caches(node)]
    args += [pointer(name, "i32") for name in ("page_table", "seq_lens", "cu_seqlens_q")]
    values: dict[str, Param] = dict(dtype=dtype, sinks=given["sinks"] is not None, **cache)
    values["read_dtype"] = "fp32" if cache["pages"] else cache["cache_dtype"]
    values["slopes"] = given["slopes"] is not None
    values["tree"] = has_tree(node)
    for name, key in (("sinks", "sink_dtype"), ("slopes", "slope_dtype")):
        if given[name] is not None:
            args.append(pointer(name, dtype_of(node, name)))
            values[key] = dtype_of(node, name)
    args += [
        *_scales(node),
        *tree_argument(node),
        pointer("out", dtype),
        *(scalar(name, name) for name in ("T", "R", "P", "num_pages")),
    ]
    group = heads // int(cache["KV_HEADS"])
    values |= dict(HEADS=heads, QUERY_TOKENS=max(1, QUERY_ROWS // group), WINDOW=given["window"])
    values |= dict(SCALE=float(given["scale"]), SOFTCAP=float(given["softcap"]))
    width = int(cache["HEAD_DIM"]) + int(cache["VALUE_DIM"])
    label = f"{dtype}_{_page_name(node)}_h{heads}_{cache['KV_HEADS']}_d{cache['HEAD_DIM']}"
    return _spec(
        "paged_attention", tuple(args), label, values,
        bytes=f"T * {heads * width * ITEM_BYTES[dtype]} + S * {_token_bytes(node)}",
        flops=f"S * {2 * heads * width}",
    )  # fmt: skip


def _cache(node: fx.Node) -> dict[str, Param]:
    """The format and the sizes of pages; k_scales and v_scales: how a kernel names them."""
    scales = {name: name if named_arguments(node)[name] is not None else "nullptr" for name in SCALES}
    return dict(
        cache_dtype=dtype_of(node, "k_cache"), pages=page_format(node),
        KV_HEADS=static_size(node, "k_cache", 1), PAGE_SIZE=static_size(node, "k_cache", 2),
        HEAD_DIM=row_width(node, "k"), VALUE_DIM=row_width(node, "v"), **scales,
    )  # fmt: skip


SCALES = ("k_scales", "v_scales")


def _caches(node: fx.Node) -> tuple[Arg, ...]:
    return tuple(pointer(name, dtype_of(node, name)) for name in ("k_cache", "v_cache"))


def _scales(node: fx.Node) -> tuple[Arg, ...]:
    """What quantised pages bring along."""
    return tuple(
        pointer(name, dtype_of(node, name))
        for name in (*SCALES, "multipliers")
        if named_arguments(node)[name] is not None
    )


def _kv_width(node: fx.Node) -> int:
    """Elements of a token's keys and values."""
    return static_size(node, "k_cache", 1) * (row_width(node, "k") + row_width(node, "v"))


def _token_bytes(node: fx.Node) -> int:
    """Bytes of a token in the pages."""
    each = PAGE_BYTES.get(page_format(node), ITEM_BYTES[dtype_of(node, "k_cache")])
    return int(_kv_width(node) * each)


def _page_name(node: fx.Node) -> str:
    return page_format(node) or dtype_of(node, "k_cache")


def page_dtypes(*floating: str) -> Callable[[fx.Node, Target], str | None]:
    """Refuses pages of a dtype without its parts, and what `floats` refuses of the other arguments."""

    def reject(node: fx.Node, target: Target) -> str | None:
        dtypes = [str(tensor(node, name).dtype).removeprefix("torch.") for name in ("k_cache", "v_cache")]
        if named_arguments(node)["multipliers"] is None:
            return floats(*floating, "k_cache v_cache")(node, target)
        wanted = "float8_e4m3fn" if named_arguments(node)["k_scales"] is None else "uint8"
        if dtypes != [wanted] * 2:
            return f"expected pages of {wanted}, got k_cache {dtypes[0]}, v_cache {dtypes[1]}"
        return floats(*floating)(node, target)

    return reject


def uneven_heads(node: fx.Node, target: Target) -> str | None:
    heads, kv_heads = static_size(node, "q", 2), static_size(node, "k_cache", 1)
    if heads % kv_heads:
        return f"heads must be a multiple of kv heads, got {heads} and {kv_heads}"
    return page_dtypes("q", "sinks")(node, target)


ROWS: tuple[Row, ...] = (
    Row("kv_write", "kv_write", page_dtypes("k v"), kv_write),
    Row("rope_kv_write", "rope_kv_write", page_dtypes("qkv", "cos_table sin_table"), rope_kv_write),
    Row("paged_attention", "paged_attention", uneven_heads, paged_attention),
)


def _spec(
    op: str, args: tuple[Arg, ...], label: str, values: dict[str, Param], bytes: str, flops: str
) -> KernelSpec:
    template, parameters = f"cpp/{op}.cpp.jinja", tuple(values.items())
    return KernelSpec(op, template, parameters, args, bytes=bytes, flops=flops, label=label)
