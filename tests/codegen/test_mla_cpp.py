"""The C++ kernels of latent attention: against the reference in fp64, with poison wherever nobody may read."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, guarded, rounding
from lowered import LoweredGraph
from torch import Tensor, fx

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.errors import CodegenError

FP32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
MULTIPLIER = torch.tensor([0.0093])  # of pages of E4M3
octavo = torch.ops.octavo


@dataclass(frozen=True)
class Case:
    """A shape of latent attention."""

    heads: int = 4
    rank: int = 32
    rope_dim: int = 8
    page_size: int = 16
    dtype: torch.dtype = FP32
    cache_dtype: torch.dtype = FP32
    window: int = 0
    softcap: float = 0.0

    @cached_property
    def attention(self) -> KernelSpec:
        graph = LoweredGraph()
        graph.input("input_ids")
        widths = {"q_latent": self.rank, "q_rope": self.rope_dim}
        queries = [graph.tokens(name, (self.heads, width), self.dtype) for name, width in widths.items()]
        cache = graph.cache("k_cache_0", 1, self.page_size, self.rank + self.rope_dim, self.cache_dtype)
        step = [graph.input(name) for name in ("page_table", "seq_lens", "cu_seqlens_q")]
        extra = {"multiplier": graph.weight("multiplier", MULTIPLIER)} if self.cache_dtype is E4M3 else {}
        options = (0.2, self.window, self.softcap)
        return cpp_spec(graph.call("paged_mla_attention", *queries, cache, *step, *options, **extra))

    @cached_property
    def write(self) -> KernelSpec:
        graph = LoweredGraph()
        graph.input("input_ids")
        parts = [
            graph.tokens(n, (w,), self.dtype) for n, w in (("latent", self.rank), ("k_rope", self.rope_dim))
        ]
        cache = graph.cache("k_cache_0", 1, self.page_size, self.rank + self.rope_dim, self.cache_dtype)
        return cpp_spec(graph.call("latent_write", *parts, cache, graph.input("slot_mapping")))


CASES = {
    "tiny": Case(),
    "page_64": Case(page_size=64),
    "bf16": Case(dtype=BF16, cache_dtype=BF16),
    "fp32_over_bf16_pages": Case(cache_dtype=BF16),
    "bf16_over_fp32_pages": Case(dtype=BF16),
    "odd_sizes": Case(heads=5, rank=13, rope_dim=7),
    "odd_sizes_bf16": Case(heads=3, rank=37, rope_dim=5, dtype=BF16, cache_dtype=BF16),
    "several_groups_of_heads": Case(heads=40, rank=24),
    "deepseek": Case(heads=128, rank=512, rope_dim=64, page_size=64, dtype=BF16, cache_dtype=BF16),
    "window": Case(window=5),
    "softcap": Case(softcap=2.0),
    "both": Case(heads=6, window=9, softcap=3.0, dtype=BF16, cache_dtype=BF16),
    "fp8": Case(rank=48, cache_dtype=E4M3),
    "fp8_odd_sizes": Case(heads=6, rank=37, rope_dim=5, window=9, softcap=3.0, dtype=BF16, cache_dtype=E4M3),
}
# Per request: new tokens, whole context.
STEPS = {
    "one_token": [(1, 1)],
    "prefill": [(67, 67)],
    "ragged": [(3, 3), (1, 37), (0, 20), (17, 17), (1, 64), (1, 65), (5, 133)],
}


def product(heads: int, n: int, k: int, dtype: torch.dtype) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (heads, k), dtype)
    return cpp_spec(graph.call("head_linear", x, graph.weight("w", torch.zeros(heads, n, k, dtype=dtype))))


PRODUCTS = {
    (heads, n, k, dtype): product(heads, n, k, dtype)
    for heads, n, k in ((3, 5, 7), (4, 100, 32), (2, 32, 900))
    for dtype in (FP32, BF16)
}


@pytest.fixture(scope="module", params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    specs = [case.attention for case in CASES.values()]
    specs += [case.write for case in CASES.values() if case.cache_dtype is not E4M3]
    return KernelLibrary([*specs, *PRODUCTS.values()], request.param)


@dataclass
class Step:
    """The tensors of a step: pages in shuffled order, poison in every row that no request owns."""

    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor


def make_step(case: Case, requests: list[tuple[int, int]]) -> Step:
    torch.manual_seed(len(requests))
    new, lengths = (torch.tensor(column) for column in zip(*requests, strict=True))
    pages = -(-lengths // case.page_size)
    num_pages = int(pages.sum()) + 3
    order = torch.randperm(num_pages - 1) + 1
    # Never a page: reading one is an error.
    table = torch.full((len(requests), int(pages.max()) + 2), -7, dtype=torch.int32)
    cache = torch.full((num_pages, 1, case.page_size, case.rank + case.rope_dim), float("nan"))
    for r, length in enumerate(lengths.tolist()):
        table[r, : pages[r]] = order[: pages[r]].int()
        order = order[pages[r] :]
        for i in range(length):
            cache[table[r, i // case.page_size], 0, i % case.page_size] = torch.randn(cache.shape[3])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0))).int()
    q_latent, q_rope = (
        guarded(torch.randn(int(new.sum()), case.heads, width).to(case.dtype))
        for width in (case.rank, case.rope_dim)
    )
    if case.cache_dtype is E4M3:
        cache = cache / MULTIPLIER
    return Step(q_latent, q_rope, cache.to(case.cache_dtype), table, lengths.int(), starts)


def run(kernels: KernelLibrary, case: Case, step: Step, num_threads: int = 2) -> tuple[int, Tensor]:
    out = guarded(torch.zeros_like(step.q_latent))
    sizes = [step.q_latent.shape[0], *step.page_table.shape, step.cache.shape[0]]
    extra = [MULTIPLIER] if case.cache_dtype is E4M3 else []
    return kernels(case.attention, [*vars(step).values(), *extra, out], sizes, num_threads), out


@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_matches_fp64(kernels: KernelLibrary, case: Case, requests: list[tuple[int, int]]) -> None:
    step = make_step(case, requests)
    code, out = run(kernels, case, step)
    assert code == 0
    cache = step.cache.double() * (MULTIPLIER.double() if case.cache_dtype is E4M3 else 1.0)
    wide = (step.q_latent[None].double(), step.q_rope[None].double(), cache)
    table = (step.page_table, step.seq_lens, step.cu_seqlens_q)
    expected = octavo.paged_mla_attention(*wide, *table, 0.2, case.window, case.softcap)[0]
    # Scores up to some 30 carry an error of some 1e-5 into the weights, which sum to 1; values are below 5.
    assert ((out.double() - expected).abs() <= 1e-4 + expected.abs() * rounding(case.dtype)).all()


@pytest.mark.parametrize(
    "name", ["tiny", "bf16", "several_groups_of_heads", "window", "both", "fp8_odd_sizes"]
)
def test_a_token_does_not_depend_on_batch_or_threads(kernels: KernelLibrary, name: str) -> None:
    case = CASES[name]
    step = make_step(case, [(70, 70), (9, 133)])
    _, together = run(kernels, case, step)
    assert torch.equal(run(kernels, case, step, 1)[1], together)
    for token in (0, 1, 4, 16, 63, 64, 69):
        one = slice(token, token + 1)
        alone = Step(
            step.q_latent[one].clone(), step.q_rope[one].clone(), step.cache, step.page_table[:1].clone(),
            torch.tensor([token + 1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32),
        )  # fmt: skip
        assert torch.equal(run(kernels, case, alone)[1][0], together[token])


def test_a_page_outside_of_the_pool_is_an_error(kernels: KernelLibrary) -> None:
    step = make_step(CASES["tiny"], [(1, 37)])
    step.page_table[0, 1] = step.cache.shape[0]
    assert run(kernels, CASES["tiny"], step)[0] == 4


@pytest.mark.parametrize(
    "name", ["tiny", "bf16", "fp32_over_bf16_pages", "bf16_over_fp32_pages", "odd_sizes"]
)
def test_write_keeps_every_bit(kernels: KernelLibrary, name: str) -> None:
    case = CASES[name]
    latent, k_rope = (torch.randn(4, width).to(case.dtype) for width in (case.rank, case.rope_dim))
    caches = [
        torch.full((3, 1, case.page_size, case.rank + case.rope_dim), 7.0).to(case.cache_dtype) for _ in "ab"
    ]
    slots = torch.tensor([case.page_size + 3, -1, 0, 2 * case.page_size + 1])
    assert kernels(case.write, [latent, k_rope, caches[0], slots], [4, 3]) == 0
    octavo.latent_write(latent[None], k_rope[None], caches[1], slots)
    assert torch.equal(caches[0], caches[1])
    slots[0] = 3 * case.page_size
    assert kernels(case.write, [latent, k_rope, caches[0], slots], [4, 3]) == 2


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_a_product_for_each_head(
    kernels: KernelLibrary, shape: tuple[int, int, int, torch.dtype], tokens: int
) -> None:
    heads, n, k, dtype = shape
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, heads, k).to(dtype), torch.randn(heads, n, k).to(dtype)
    out = guarded(torch.zeros(tokens, heads, n, dtype=dtype))
    assert kernels(PRODUCTS[shape], [guarded(x), guarded(weight), out], [tokens]) == 0
    expected = octavo.head_linear(x[None].double(), weight.double())[0]
    bound = 2e-6 * k**0.5 * expected.abs().max() + expected.abs() * rounding(dtype)
    assert ((out.double() - expected).abs() <= bound).all()


def test_other_dtypes_are_refused() -> None:
    def node() -> fx.Node:
        graph = LoweredGraph()
        graph.input("input_ids")
        x = graph.tokens("x", (3, 7), torch.float16)
        return graph.call("head_linear", x, graph.weight("w", torch.zeros(3, 5, 7, dtype=torch.float16)))

    with pytest.raises(
        CodegenError, match="expected fp32 or bf16, one for all, got x float16, weight float16"
    ):
        cpp_spec(node())


def test_a_step_without_tokens_is_no_work(kernels: KernelLibrary) -> None:
    kernels.assert_idle_without_tokens()
