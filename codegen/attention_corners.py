"""Corners of paged attention: the layers of models that are served, and the edges of what its templates take."""

from typing import Any

from octavo.codegen.attention_triton import Attention, attention_spec
from octavo.codegen.corner import Corner
from octavo.codegen.specs_triton import Heads


def _corner(name: str, heads: int, kv_heads: int, dim: int, page_size: int = 64, **rest: Any) -> Corner:
    dtype = rest.pop("dtype", "bf16")
    layer = Attention(Heads(heads, kv_heads, dim, dim, page_size), dtype, dim**-0.5, **rest)
    return Corner(f"attention {name}", lambda target: attention_spec(layer, target))


CORNERS: tuple[Corner, ...] = (
    _corner("Llama-3-8B", 32, 8, 128),
    _corner("Llama-3-8B, FP8 pages", 32, 8, 128, pages="fp8"),
    _corner("Llama-3-8B, NVFP4 pages", 32, 8, 128, pages="nvfp4"),
    _corner("Llama-3-8B, a tree of drafts", 32, 8, 128, tree=True, query_length=8),
    _corner("Llama-3-8B, a tree of drafts, NVFP4 pages", 32, 8, 128, pages="nvfp4", tree=True, query_length=8),
    _corner("Llama-3-70B, drafts", 64, 8, 128, query_length=4),
    _corner("Llama-3-70B, pages of 16", 64, 8, 128, page_size=16),
    _corner("gpt-oss, window", 64, 8, 64, window=128, sinks=True),
    _corner("gpt-oss, window, FP8 pages", 64, 8, 64, window=128, sinks=True, pages="fp8"),
    _corner("gpt-oss, whole context", 64, 8, 64, sinks=True),
    _corner("Gemma 2, window", 8, 4, 256, window=4096, softcap=50.0),
    _corner("Gemma 2, FP8 pages", 8, 4, 256, softcap=50.0, pages="fp8"),
    _corner("one to one, pages of 128", 16, 16, 64, page_size=128),
    _corner("one kv head, pages of 32", 32, 1, 128, page_size=32),
    _corner("128 heads to one, FP8 pages", 128, 1, 128, pages="fp8"),
    _corner("71 heads to one", 71, 1, 64),
    _corner("slopes", 32, 32, 128, slopes=True),
    _corner("heads of 80, pages of 32", 32, 32, 80, page_size=32),
    _corner("heads of 80, NVFP4 pages", 32, 32, 80, pages="nvfp4"),
    _corner("heads of 96, NVFP4 pages of 16", 32, 32, 96, page_size=16, pages="nvfp4"),
    _corner("fp32, pages of 16", 9, 3, 64, page_size=16, dtype="fp32"),
    _corner("fp32, heads of 128", 32, 8, 128, dtype="fp32"),
)  # fmt: skip
