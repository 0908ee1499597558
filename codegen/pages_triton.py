"""Selection rows of the Triton family for pages of keys and values; mla_rows_triton has those of latents."""

from torch import fx

from octavo.codegen.attention_triton import MAX_TREE, Attention, attention_spec
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.kv_quantize_triton import kv_write_quantize_spec, rope_kv_write_quantize_spec
from octavo.codegen.page_nodes import page_format, row_width
from octavo.codegen.row import Row, dtype_of, has_tree, static_size, token_count
from octavo.codegen.specs_triton import Heads, kv_write_spec, rope_kv_write_spec
from octavo.compiler.legality import named_arguments
from octavo.compiler.target import Target

# Rows of a prefill tile, which must hold at least one token's query heads of a kv head.
MAX_GROUP = 128


def kv_write(node: fx.Node, target: Target) -> KernelSpec:
    # the op has no result to count the rows of; every token of the step is written
    heads, dtype, pages = heads_of(node, static_size(node, "k", 2)), dtype_of(node, "k"), page_format(node)
    return (
        kv_write_quantize_spec("T", heads, dtype, pages, target)
        if pages
        else kv_write_spec("T", heads, dtype)
    )


def rope_kv_write(node: fx.Node, target: Target) -> KernelSpec:
    given, pages = named_arguments(node), page_format(node)
    heads, rotary_dim = heads_of(node, given["num_heads"]), static_size(node, "cos_table", 1)
    options = (token_count(node), heads, rotary_dim, dtype_of(node, "qkv"), given["interleaved"])
    return rope_kv_write_quantize_spec(*options, pages, target) if pages else rope_kv_write_spec(*options)


def paged_attention(node: fx.Node, target: Target) -> KernelSpec:
    given = named_arguments(node)
    attention = Attention(
        heads=heads_of(node, static_size(node, "q", 2)),
        dtype=dtype_of(node, "q"),
        scale=given["scale"],
        window=given["window"],
        softcap=given["softcap"],
        sinks=given["sinks"] is not None,
        slopes=given["slopes"] is not None,
        pages=page_format(node),
        tree=has_tree(node),
    )
    return attention_spec(attention, target)


def heads_of(node: fx.Node, num_heads: int) -> Heads:
    """Shapes of an op that has k_cache and v_cache arguments, in elements."""
    kv_heads, page_size = (static_size(node, "k_cache", axis) for axis in (1, 2))
    return Heads(num_heads, kv_heads, row_width(node, "k"), row_width(node, "v"), page_size)


def lacks_e4m3(node: fx.Node, target: Target) -> str | None:
    """Refuses quantised pages where no instruction converts E4M3."""
    if not page_format(node) or (target.arch or 0) >= 90:
        return None
    return f"E4M3 needs sm_90 or newer, {target.name} is sm_{target.arch}; pages of bf16 serve"


def attention_refusal(node: fx.Node, target: Target) -> str | None:
    group, given = static_size(node, "q", 2) // static_size(node, "k_cache", 1), named_arguments(node)
    if group > MAX_GROUP:
        return f"at most {MAX_GROUP} query heads may share a kv head, got {group}"
    if has_tree(node) and (given["slopes"] is not None or 0 < given["window"] < MAX_TREE):
        return f"trees of drafts need a window of {MAX_TREE} tokens at least and no slopes, got {given['window']}"
    if page_format(node) and dtype_of(node, "q") == "fp32":
        return "queries of fp32 would be multiplied in fp16 with quantised pages; compile with dtype='bf16'"
    return lacks_e4m3(node, target)


ROWS: tuple[Row, ...] = (
    Row("kv_write", "kv_write", lacks_e4m3, kv_write),
    Row("rope_kv_write", "rope_kv_write", lacks_e4m3, rope_kv_write),
    Row("paged_attention", "paged_attention", attention_refusal, paged_attention),
)
