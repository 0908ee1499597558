"""The C++ writes to quantised pages: byte for byte what ml_dtypes makes of keys and values in the model's dtype."""

from functools import cache
from typing import Any

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, guarded
from lowered import LoweredGraph
from pages import decode, encode
from torch import Tensor

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.errors import CodegenError

FP32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
NUM_PAGES, POSITIONS, TOKENS = 5, 50, (1, 3, 17)
# Page, then: heads, kv_heads, head_dim, value_dim, rotary_dim, page_size, interleaved, dtype.
SHAPES: dict[str, tuple[str, int, int, int, int, int, int, bool, torch.dtype]] = {
    "fp8": ("fp8", 9, 3, 64, 64, 64, 16, False, BF16),
    "fp8_odd": ("fp8", 8, 1, 10, 7, 6, 16, False, FP32),
    "nvfp4": ("nvfp4", 9, 3, 64, 64, 64, 16, False, BF16),
    "nvfp4_wide": ("nvfp4", 2, 1, 144, 16, 144, 4, True, FP32),
    "nvfp4_partly_rotated": ("nvfp4", 4, 4, 32, 48, 8, 16, False, FP32),
}


@cache
def spec(op: str, name: str, plain: bool = False) -> KernelSpec:
    pages, heads, kv_heads, head_dim, value_dim, rotary_dim, page_size, interleaved, dtype = SHAPES[name]
    graph = LoweredGraph()
    graph.input("input_ids")
    positions, slots = graph.input("positions"), graph.input("slot_mapping")
    pack = 2 if pages == "nvfp4" and not plain else 1
    page_dtype = dtype if plain else {"fp8": E4M3, "nvfp4": torch.uint8}[pages]
    sizes = {"k": head_dim, "v": value_dim}
    caches = [
        graph.cache(f"{n}_cache_0", kv_heads, page_size, d // pack, page_dtype) for n, d in sizes.items()
    ]
    extra: dict[str, Any] = {}
    if pages == "nvfp4" and not plain:
        extra = {
            f"{n}_scales": graph.cache(f"{n}_scales_0", kv_heads, page_size, d // 16, E4M3)
            for n, d in sizes.items()
        }
    if not plain:
        extra["multipliers"] = graph.weight("multipliers", torch.ones(2))
    if op == "kv_write":
        k, v = (graph.tokens(n, (kv_heads, d), dtype) for n, d in sizes.items())
        return cpp_spec(graph.call(op, k, v, *caches, slots, **extra))
    qkv = graph.tokens("qkv", ((heads + kv_heads) * head_dim + kv_heads * value_dim,), dtype)
    tables = [graph.weight(n, torch.zeros(POSITIONS, rotary_dim)) for n in ("cos", "sin")]
    return cpp_spec(graph.call(op, qkv, *tables, positions, slots, *caches, heads, interleaved, **extra))


@cache
def latent_spec(op: str, dtype: torch.dtype) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    cache = graph.cache("k_cache_0", 1, 16, 45, E4M3)
    multiplier = graph.weight("multiplier", torch.ones(1))
    latent, k_rope = graph.tokens("latent", (40,), dtype), graph.tokens("k_rope", (5,), dtype)
    return cpp_spec(
        graph.call("latent_write", latent, k_rope, cache, graph.input("slot_mapping"), multiplier)
    )


@pytest.fixture(scope="module", params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    specs = [spec(op, name) for op in ("kv_write", "rope_kv_write") for name in SHAPES]
    specs += [spec("rope_kv_write", name, plain=True) for name in SHAPES]
    specs += [latent_spec("latent_write", dtype) for dtype in (FP32, BF16)]
    return KernelLibrary(specs, request.param)


def empty(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Pages in the model's dtype, nan, and the quantised ones: codes, then scales, of bytes that nothing writes."""
    pages, _, kv_heads, head_dim, value_dim, _, page_size, _, dtype = SHAPES[name]
    plain = [
        torch.full((NUM_PAGES, kv_heads, page_size, d), float("nan"), dtype=dtype)
        for d in (head_dim, value_dim)
    ]
    if pages == "fp8":
        return plain, [torch.full(p.shape, float("nan")).to(E4M3) for p in plain]
    codes = [torch.full((*p.shape[:3], p.shape[3] // 2), 0xA5, dtype=torch.uint8) for p in plain]
    scales = [torch.full((*p.shape[:3], p.shape[3] // 16), float("nan")).to(E4M3) for p in plain]
    return plain, [*codes, *scales]


def check(name: str, plain: list[Tensor], written: list[Tensor], multipliers: list[float]) -> None:
    """Bytes of the rows that were written; the others are as they were."""
    pages = SHAPES[name][0]
    untouched = empty(name)[1]
    for index, (rows, multiplier) in enumerate(zip(plain, multipliers, strict=True)):
        own = ~rows.isnan().any(-1)
        assert own.any() and not own.all()
        codes, scales = encode(rows, pages, multiplier)
        for part, expected in ((index, codes), (index + 2, scales)):
            if expected is None:
                continue
            got, before = written[part].view(torch.uint8), untouched[part].view(torch.uint8)
            assert torch.equal(got[own], expected.view(torch.uint8)[own])
            assert torch.equal(got[~own], before[~own])


def slots_of(tokens: int, page_size: int) -> Tensor:
    slots = torch.randperm(NUM_PAGES * page_size)[:tokens]
    if tokens > 1:
        slots[tokens // 2] = -1
    return slots


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values of many sizes: some saturate, some vanish, one row is zero and one begins with -0."""
    value = torch.randn(shape) * 2.0 ** torch.randint(-14, 4, (*shape[:-1], 1)).float()
    value[-1, ..., :16] = 0.0
    value[0, ..., 0] = -0.0
    return guarded(value.to(dtype))


@pytest.mark.parametrize("name", SHAPES)
def test_kv_write(kernels: KernelLibrary, name: str) -> None:
    _, _, kv_heads, head_dim, value_dim, _, page_size, _, dtype = SHAPES[name]
    multipliers = torch.tensor([0.007, 0.0013])
    for tokens in TOKENS:
        torch.manual_seed(tokens)
        k, v = draw(tokens, kv_heads, head_dim, dtype=dtype), draw(tokens, kv_heads, value_dim, dtype=dtype)
        slots = slots_of(tokens, page_size)
        plain, written = empty(name)
        tensors = [k, v, *written[:2], slots, *written[2:], multipliers]
        assert kernels(spec("kv_write", name), tensors, [tokens, NUM_PAGES]) == 0
        torch.ops.octavo.kv_write(k[None], v[None], *plain, slots)
        check(name, plain, written, multipliers.tolist())


@pytest.mark.parametrize("name", SHAPES)
def test_rope_kv_write_rounds_to_the_model_first(kernels: KernelLibrary, name: str) -> None:
    """Beside the kernel of plain pages, which other tests hold to fp64."""
    _, heads, kv_heads, head_dim, value_dim, rotary_dim, page_size, _, dtype = SHAPES[name]
    multipliers, angles = torch.tensor([0.011, 0.003]), torch.rand(POSITIONS, rotary_dim) * 6
    for tokens in TOKENS:
        torch.manual_seed(tokens)
        qkv = draw(tokens, (heads + kv_heads) * head_dim + kv_heads * value_dim, dtype=dtype)
        given = [
            qkv,
            angles.cos(),
            angles.sin(),
            torch.arange(tokens) * 7 % POSITIONS,
            slots_of(tokens, page_size),
        ]
        plain, written = empty(name)
        outs = [torch.empty(tokens, heads, head_dim, dtype=dtype) for _ in range(2)]
        sizes = [tokens, NUM_PAGES]
        assert kernels(spec("rope_kv_write", name, plain=True), [*given, *plain, outs[0]], sizes) == 0
        assert kernels(spec("rope_kv_write", name), [*given, *written, multipliers, outs[1]], sizes) == 0
        assert torch.equal(*outs)
        check(name, plain, written, multipliers.tolist())


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_latent_write(kernels: KernelLibrary, dtype: torch.dtype) -> None:
    latent, k_rope = draw(17, 40, dtype=dtype), draw(17, 5, dtype=dtype)
    slots, multiplier = slots_of(17, 16), torch.tensor([0.02])
    written = torch.full((NUM_PAGES, 1, 16, 45), float("nan")).to(E4M3)
    assert (
        kernels(
            latent_spec("latent_write", dtype), [latent, k_rope, written, slots, multiplier], [17, NUM_PAGES]
        )
        == 0
    )
    expected, kept = torch.full((NUM_PAGES * 16, 45), float("nan"), dtype=dtype), slots >= 0
    expected[slots[kept]] = torch.cat((latent, k_rope), -1)[kept]
    codes, _ = encode(expected, "fp8", float(multiplier))
    assert torch.equal(written.view(torch.uint8).flatten(0, 2), codes.view(torch.uint8))


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_nan_stays_nan(kernels: KernelLibrary, name: str) -> None:
    _, _, kv_heads, head_dim, value_dim, _, _, _, dtype = SHAPES[name]
    k, v = (torch.ones(1, kv_heads, d, dtype=dtype) for d in (head_dim, value_dim))
    k[0, 1, 20], v[0, 0, 0] = float("nan"), float("inf")
    _, written = empty(name)
    tensors = [k, v, *written[:2], torch.tensor([7]), *written[2:], torch.tensor([0.5, 0.5])]
    assert kernels(spec("kv_write", name), tensors, [1, NUM_PAGES]) == 0
    rows = [
        decode(c[0, :, 7], None if s is None else s[0, :, 7], 0.5)
        for c, s in zip(written[:2], written[2:] or (None, None), strict=True)
    ]
    assert rows[0][1, 20].isnan() and not rows[0][0].isnan().any() and not rows[0][2].isnan().any()
    assert rows[1][0, 0] == {"fp8": 224.0, "nvfp4": 1344.0}[name]


def test_refuses_pages_without_their_parts() -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    k, caches = graph.tokens("k", (2, 16), BF16), [graph.cache(f"{n}_cache_0", 2, 16, 16, E4M3) for n in "kv"]
    slots, multipliers = graph.input("slot_mapping"), graph.weight("m", torch.ones(2))
    with pytest.raises(CodegenError, match="expected fp32 or bf16, one for all, got k_cache float8_e4m3fn"):
        cpp_spec(graph.call("kv_write", k, k, *caches, slots))
    scales = [graph.cache(f"{n}_scales_0", 2, 16, 1, E4M3) for n in "kv"]
    with pytest.raises(CodegenError, match="expected pages of uint8, got k_cache float8_e4m3fn"):
        cpp_spec(graph.call("kv_write", k, k, *caches, slots, *scales, multipliers))


def test_a_step_without_tokens_is_no_work(kernels: KernelLibrary) -> None:
    kernels.assert_idle_without_tokens()
