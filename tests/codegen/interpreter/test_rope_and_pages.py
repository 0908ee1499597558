"""Rotary embedding and the writes to pages, against the dialect's references."""

from collections.abc import Callable

import pytest
import torch

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.specs_triton import Heads, kv_write_spec, rope_kv_write_spec, rope_spec
from octavo.compiler.ops.paging import kv_write, rope_kv_write
from octavo.compiler.ops.rope import rope

Launch = Callable[[KernelSpec, dict[str, torch.Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# the last token of a page, the first of the next, one that is not kept, page 1
SLOTS = torch.tensor([63, 128, -1, 70])


def normal(*shape: int, dtype: str = "bf16") -> torch.Tensor:
    return torch.randn(shape).to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("num_heads", "head_dim", "rotary_dim"), [(9, 64, 64), (3, 128, 32), (40, 96, 96)])
def test_rope(
    launch: Launch, assert_rounds_to: Check, dtype: str, interleaved: bool, num_heads: int, head_dim: int,
    rotary_dim: int,
) -> None:  # fmt: skip
    x = normal(3, num_heads, head_dim, dtype=dtype)
    cos, sin = normal(3, rotary_dim, dtype=dtype), normal(3, rotary_dim, dtype=dtype)
    out = torch.full_like(x, float("nan"))
    spec = rope_spec("T", num_heads, head_dim, rotary_dim, dtype, interleaved)
    launch(spec, {"x": x, "cos": cos, "sin": sin, "out": out}, {"T": 3})
    expected = rope(x[None].double(), cos[None].double(), sin[None].double(), interleaved)[0]
    assert_rounds_to(out, expected, sums=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [Heads(9, 3, 64, 64, 64), Heads(8, 1, 96, 32, 64), Heads(5, 5, 16, 16, 64)])
def test_kv_write_touches_only_its_slots(launch: Launch, dtype: str, heads: Heads) -> None:
    k = normal(4, heads.num_kv_heads, heads.head_dim, dtype=dtype)
    v = normal(4, heads.num_kv_heads, heads.value_dim, dtype=dtype)
    caches = [
        normal(4, heads.num_kv_heads, 64, size, dtype=dtype) for size in (heads.head_dim, heads.value_dim)
    ]
    expected = [cache.clone() for cache in caches]
    kv_write(k[None], v[None], expected[0], expected[1], SLOTS)
    tensors = {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "slot_mapping": SLOTS}
    launch(kv_write_spec("T", heads, dtype), tensors, {"T": 4})
    assert torch.equal(caches[0], expected[0]) and torch.equal(caches[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "rotary_dim"),
    [(Heads(9, 3, 64, 64, 64), 64), (Heads(8, 1, 128, 32, 16), 32), (Heads(2, 2, 80, 80, 64), 80)],
)
def test_rope_kv_write(
    launch: Launch, assert_rounds_to: Check, dtype: str, interleaved: bool, heads: Heads, rotary_dim: int
) -> None:
    kv_width = heads.num_kv_heads * (heads.head_dim + heads.value_dim)
    qkv = normal(4, heads.num_heads * heads.head_dim + kv_width, dtype=dtype)
    tables = [normal(30, rotary_dim, dtype=dtype), normal(30, rotary_dim, dtype=dtype)]
    positions = torch.tensor([7, 8, 29, 0])
    pages = 256 // heads.page_size
    shape = (pages, heads.num_kv_heads, heads.page_size)
    caches = [normal(*shape, size, dtype=dtype) for size in (heads.head_dim, heads.value_dim)]
    wide = [cache.double() for cache in caches]
    cos, sin = (table.double() for table in tables)
    expected = rope_kv_write(
        qkv[None].double(), cos, sin, positions[None], SLOTS, wide[0], wide[1], heads.num_heads, interleaved
    )
    out = torch.full((4, heads.num_heads, heads.head_dim), float("nan"), dtype=qkv.dtype)
    tensors = {
        "qkv": qkv, "cos_table": tables[0], "sin_table": tables[1], "positions": positions,
        "slot_mapping": SLOTS, "k_cache": caches[0], "v_cache": caches[1], "out": out,
    }  # fmt: skip
    launch(rope_kv_write_spec("T", heads, rotary_dim, dtype, interleaved), tensors, {"T": 4})
    assert_rounds_to(out, expected[0], sums=0.01)
    assert_rounds_to(caches[0], wide[0], sums=0.01)
    assert torch.equal(caches[1], wide[1].to(caches[1].dtype))
