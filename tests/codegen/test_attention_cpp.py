"""The C++ paged attention: against the reference in fp64, with poison wherever nobody may read.

Of quantised pages, against the reference over what their bytes stand for, decoded by ml_dtypes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, guarded, rounding
from lowered import LoweredGraph
from pages import decode, encode, multiplier_of
from torch import Tensor

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.errors import CodegenError


@dataclass(frozen=True)
class Case:
    """A shape of attention."""

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    value_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    pages: str = ""

    @cached_property
    def spec(self) -> KernelSpec:
        graph = LoweredGraph()
        graph.input("input_ids")
        names = ("page_table", "seq_lens", "cu_seqlens_q")
        page_table, seq_lens, cu_seqlens_q = (graph.input(name) for name in names)
        dtype = {"": self.cache_dtype, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}[self.pages]
        pack = 2 if self.pages == "nvfp4" else 1
        sizes = {"k": self.head_dim, "v": self.value_dim}
        k_cache, v_cache = (
            graph.cache(f"{kind}_cache_0", self.kv_heads, self.page_size, size // pack, dtype)
            for kind, size in sizes.items()
        )
        extra: dict[str, Any] = {}
        if self.pages == "nvfp4":
            extra = {
                f"{kind}_scales": graph.cache(
                    f"{kind}_scales_0", self.kv_heads, self.page_size, size // 16, torch.float8_e4m3fn
                )
                for kind, size in sizes.items()
            }
        if self.pages:
            extra["multipliers"] = graph.weight("multipliers", torch.ones(2))
        q = graph.tokens("q", (self.heads, self.head_dim), self.dtype)
        sinks = graph.weight("sinks", torch.zeros(self.heads)) if self.sinks else None
        slopes = graph.weight("slopes", torch.zeros(self.heads)) if self.slopes else None
        return cpp_spec(
            graph.call(
                "paged_attention", q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, sinks,
                self.head_dim**-0.5, self.window, self.softcap, slopes, **extra,
            )
        )  # fmt: skip


BF16 = torch.bfloat16
CASES = {
    "smollm": Case(),
    "smollm_page_64": Case(page_size=64),
    "smollm_bf16": Case(dtype=BF16, cache_dtype=BF16),
    "fp32_over_bf16_pages": Case(cache_dtype=BF16),
    "bf16_over_fp32_pages": Case(heads=4, kv_heads=4, dtype=BF16),
    "no_groups": Case(heads=4, kv_heads=4, head_dim=80, value_dim=80),
    "one_kv_head": Case(heads=8, kv_heads=1, head_dim=32, value_dim=32),
    "odd_dims": Case(heads=2, kv_heads=2, head_dim=7, value_dim=13),
    "odd_dims_bf16": Case(heads=2, kv_heads=1, head_dim=7, value_dim=13, dtype=BF16, cache_dtype=BF16),
    "wide_group": Case(heads=32, kv_heads=1, head_dim=16, value_dim=48),
    "window": Case(window=5),
    "window_of_one": Case(window=1),
    "wide_window": Case(window=100, page_size=64),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True),
    "slopes": Case(slopes=True),
    "everything": Case(
        heads=6, kv_heads=2, window=9, softcap=3.0, sinks=True, slopes=True, dtype=BF16, cache_dtype=BF16
    ),
    "fp8": Case(pages="fp8"),
    "fp8_odd_dims": Case(heads=2, kv_heads=1, head_dim=7, value_dim=13, dtype=BF16, pages="fp8"),
    "nvfp4": Case(pages="nvfp4"),
    "nvfp4_wide": Case(heads=2, kv_heads=1, head_dim=272, value_dim=144, pages="nvfp4"),
    "nvfp4_everything": Case(
        heads=6, kv_heads=2, head_dim=48, value_dim=16, window=9, softcap=3.0, sinks=True, slopes=True, dtype=BF16,
        pages="nvfp4",
    ),
}  # fmt: skip
# Per request: new tokens, whole context.
STEPS = {
    "one_token": [(1, 1)],
    "prefill": [(129, 129)],
    "ragged": [(3, 3), (1, 37), (0, 20), (17, 17), (1, 64), (1, 65), (5, 133)],
    "chunk": [(17, 200)],
}


@pytest.fixture(scope="module", params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    return KernelLibrary([case.spec for case in CASES.values()], request.param)


@dataclass
class Inputs:
    """The tensors of a step: pages in shuffled order, poison in every row that no request owns.

    extra  of quantised pages: scales of NVFP4, then the multipliers
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    sinks: Tensor | None
    slopes: Tensor | None
    extra: tuple[Tensor, ...] = ()

    @property
    def reference(self) -> tuple[Tensor | None, ...]:
        """As the op takes them over pages in fp64."""
        caches = [self.k_cache.double(), self.v_cache.double()]
        if self.extra:
            *scales, multipliers = self.extra
            pairs = zip(
                (self.k_cache, self.v_cache), scales or (None, None), multipliers.tolist(), strict=True
            )
            caches = [decode(*pair) for pair in pairs]
        return (
            self.q[None].double(), *caches, self.page_table, self.seq_lens, self.cu_seqlens_q, self.sinks,
        )  # fmt: skip


def make_inputs(case: Case, requests: list[tuple[int, int]]) -> Inputs:
    torch.manual_seed(len(requests))
    new, lengths = (torch.tensor(column) for column in zip(*requests, strict=True))
    pages = -(-lengths // case.page_size)
    columns = int(pages.max()) + 2
    num_pages = int(pages.sum()) + 3
    order = torch.randperm(num_pages - 1) + 1
    table = torch.full(
        (len(requests), columns), -7, dtype=torch.int32
    )  # never a page: reading one is an error
    k_cache = torch.full((num_pages, case.kv_heads, case.page_size, case.head_dim), float("nan"))
    v_cache = torch.full((num_pages, case.kv_heads, case.page_size, case.value_dim), float("nan"))
    for r, length in enumerate(lengths.tolist()):
        table[r, : pages[r]] = order[: pages[r]].int()
        order = order[pages[r] :]
        for i in range(length):
            page, row = table[r, i // case.page_size], i % case.page_size
            k_cache[page, :, row] = torch.randn(case.kv_heads, case.head_dim)
            v_cache[page, :, row] = torch.randn(case.kv_heads, case.value_dim)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0))).int()
    q = torch.randn(int(new.sum()), case.heads, case.head_dim).to(case.dtype)
    (keys, values), extra = _as_pages(case, k_cache, v_cache)
    return Inputs(
        guarded(q), keys, values, table, lengths.int(), starts,
        torch.randn(case.heads) if case.sinks else None,
        torch.rand(case.heads) if case.slopes else None, extra,
    )  # fmt: skip


def _as_pages(case: Case, *rows: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Caches in the case's format, and what comes with them."""
    if not case.pages:
        return [one.to(case.cache_dtype) for one in rows], ()
    multipliers = [multiplier_of(one, case.pages) for one in rows]
    parts = [encode(one, case.pages, m) for one, m in zip(rows, multipliers, strict=True)]
    scales = [scale for _, scale in parts if scale is not None]
    return [codes for codes, _ in parts], (*scales, torch.tensor(multipliers))


def run(kernels: KernelLibrary, case: Case, inputs: Inputs, num_threads: int = 2) -> tuple[int, Tensor]:
    tensors = [
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.page_table,
        inputs.seq_lens,
        inputs.cu_seqlens_q,
    ]
    tensors += [extra for extra in (inputs.sinks, inputs.slopes, *inputs.extra) if extra is not None]
    out = guarded(torch.zeros(inputs.q.shape[0], case.heads, case.value_dim, dtype=case.dtype))
    sizes = [inputs.q.shape[0], *inputs.page_table.shape, inputs.k_cache.shape[0]]
    return kernels(case.spec, [*tensors, out], sizes, num_threads), out


@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_fp64(kernels: KernelLibrary, case: Case, requests: list[tuple[int, int]]) -> None:
    inputs = make_inputs(case, requests)
    code, out = run(kernels, case, inputs)
    assert code == 0
    options = (case.head_dim**-0.5, case.window, case.softcap, inputs.slopes)
    expected = torch.ops.octavo.paged_attention(*inputs.reference, *options)[0]
    # Scores below 8 carry an error of some 1e-6 into the weights, which sum to 1; values are below 5.
    bound = 2e-5 + expected.abs() * rounding(case.dtype)
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    "name",
    [
        "smollm",
        "smollm_bf16",
        "one_kv_head",
        "odd_dims_bf16",
        "window",
        "everything",
        "fp8",
        "nvfp4_everything",
    ],
)
def test_token_does_not_depend_on_batch_or_threads(kernels: KernelLibrary, name: str) -> None:
    case = CASES[name]
    requests = [(70, 70), (9, 133)]
    inputs = make_inputs(case, requests)
    _, together = run(kernels, case, inputs)
    assert torch.equal(run(kernels, case, inputs, 1)[1], together)
    for token in (0, 1, 4, 5, 15, 16, 63, 64, 69):
        alone = Inputs(
            inputs.q[token : token + 1].clone(), inputs.k_cache, inputs.v_cache, inputs.page_table[:1],
            torch.tensor([token + 1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32),
            inputs.sinks, inputs.slopes, inputs.extra,
        )  # fmt: skip
        assert torch.equal(run(kernels, case, alone)[1][0], together[token])


def test_page_size_does_not_change_a_bit(kernels: KernelLibrary) -> None:
    small, large = CASES["smollm"], CASES["smollm_page_64"]
    results = []
    for case in (small, large):
        inputs = make_inputs(case, [(133, 133)])
        torch.manual_seed(1)
        keys, values = (
            torch.randn(133, case.kv_heads, case.head_dim),
            torch.randn(133, case.kv_heads, case.value_dim),
        )
        position = torch.arange(133)
        pages = inputs.page_table[0, position // case.page_size].long()
        inputs.k_cache[pages, :, position % case.page_size] = keys
        inputs.v_cache[pages, :, position % case.page_size] = values
        inputs.q = torch.randn(133, case.heads, case.head_dim)
        results.append(run(kernels, case, inputs)[1])
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["smollm", "fp8", "nvfp4"])
def test_later_tokens_never_reach_earlier_ones(kernels: KernelLibrary, name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case, [(129, 129)])
    _, clean = run(kernels, case, inputs)
    page, row = inputs.page_table[0, 100 // case.page_size], 100 % case.page_size
    for cache in (inputs.k_cache, inputs.v_cache) if case.pages != "nvfp4" else inputs.extra[:2]:
        cache[page, :, row] = float("nan")
    _, poisoned = run(kernels, case, inputs)
    assert torch.equal(poisoned[:100], clean[:100])
    assert poisoned[100:].isnan().all()


def test_says_what_is_wrong_with_a_step(kernels: KernelLibrary) -> None:
    case = CASES["smollm"]
    inputs = make_inputs(case, [(3, 40)])
    inputs.page_table[0, 2] = inputs.k_cache.shape[0]
    assert run(kernels, case, inputs)[0] == 4  # a page outside of the pool
    inputs.page_table[0, 2] = -1
    assert run(kernels, case, inputs)[0] == 4
    for lengths, starts in (([2], [0, 3]), ([500], [0, 3]), ([40], [0, 2]), ([40], [1, 3])):
        inputs = make_inputs(case, [(3, 40)])
        inputs.seq_lens[:], inputs.cu_seqlens_q[:] = torch.tensor(lengths), torch.tensor(starts)
        assert run(kernels, case, inputs)[0] == 5  # lengths that disagree


def test_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(CodegenError, match="heads must be a multiple of kv heads, got 5 and 3"):
        _ = Case(heads=5).spec


def test_a_step_without_tokens_is_no_work(kernels: KernelLibrary) -> None:
    kernels.assert_idle_without_tokens()
