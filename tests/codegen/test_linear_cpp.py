"""The C++ linear kernel: within the bound of its arithmetic, and bitwise the same however it is batched."""

from functools import cache

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, guarded, rounding
from lowered import LoweredGraph
from torch import Tensor

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.errors import CodegenError

SHAPES = ((5, 7), (16, 16), (960, 576), (37, 1000), (101, 1537), (3, 12301))  # N, K
DTYPES = (torch.float32, torch.bfloat16)


@cache
def spec_of(columns: int, length: int, dtype: torch.dtype, bias: bool, is_logits: bool = False) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (length,), dtype)
    weights = [graph.weight("w", torch.zeros(columns, length, dtype=dtype))]
    weights += [graph.weight("b", torch.zeros(columns, dtype=dtype))] if bias else []
    node = graph.call("linear", x, *weights)
    graph.finish(node if is_logits else graph.call("add", node, node))
    return cpp_spec(node)


@pytest.fixture(scope="module", params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    specs = [spec_of(n, k, dtype, bias) for n, k in SHAPES for dtype in DTYPES for bias in (False, True)]
    return KernelLibrary([*specs, spec_of(37, 1000, torch.bfloat16, False, is_logits=True)], request.param)


def run(
    kernels: KernelLibrary, spec: KernelSpec, x: Tensor, weights: list[Tensor], num_threads: int = 2
) -> Tensor:
    out_dtype = torch.float32 if dict(spec.params)["out_dtype"] == "fp32" else torch.bfloat16
    out = guarded(torch.zeros(x.shape[0], weights[0].shape[0], dtype=out_dtype))
    assert kernels(spec, [x, *weights, out], [x.shape[0]], num_threads) == 0
    return out


def operands(
    rows: int, columns: int, length: int, dtype: torch.dtype, bias: bool
) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(rows + columns + length)
    weights = [guarded(torch.randn(columns, length).to(dtype))]
    weights += [guarded(torch.randn(columns).to(dtype))] if bias else []
    return guarded(torch.randn(rows, length).to(dtype)), weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("columns", "length"), SHAPES)
def test_matches_fp64(
    kernels: KernelLibrary, columns: int, length: int, bias: bool, dtype: torch.dtype
) -> None:
    for rows in (1, 3, 17, 129):
        x, weights = operands(rows, columns, length, dtype, bias)
        out = run(kernels, spec_of(columns, length, dtype, bias), x, weights)
        wide = [t.double() for t in (x, *weights)]
        expected = torch.ops.octavo.linear(*wide)
        # Every product takes part in at most K / 4 + 20 additions: narrowest lanes, trees, chunks.
        magnitude = torch.ops.octavo.linear(*(t.abs() for t in wide))
        bound = magnitude * (length / 4 + 20) * rounding(torch.float32) + expected.abs() * rounding(dtype)
        assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "length"), SHAPES)
def test_row_does_not_depend_on_batch_or_threads(
    kernels: KernelLibrary, columns: int, length: int, dtype: torch.dtype
) -> None:
    spec = spec_of(columns, length, dtype, False)
    x, weights = operands(129, columns, length, dtype, False)
    alone = torch.cat([run(kernels, spec, x[i : i + 1].clone(), weights, 1) for i in range(129)])
    for rows in (2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64, 65, 129):
        for num_threads in (1, 2, 3):
            assert torch.equal(run(kernels, spec, x[:rows], weights, num_threads), alone[:rows])


def test_logits_of_a_bf16_model_keep_fp32(kernels: KernelLibrary) -> None:
    x, weights = operands(3, 37, 1000, torch.bfloat16, False)
    logits = run(kernels, spec_of(37, 1000, torch.bfloat16, False, is_logits=True), x, weights)
    rounded = run(kernels, spec_of(37, 1000, torch.bfloat16, False), x, weights)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.bfloat16(), rounded) and not torch.equal(logits, rounded.float())


def test_refuses_mixed_dtypes() -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (16,), torch.float32)
    weight = graph.weight("w", torch.zeros(4, 16))
    node = graph.call("linear", x, weight)
    weight.meta["val"] = graph.mode.from_tensor(torch.zeros(4, 16, dtype=torch.bfloat16), static_shapes=True)
    with pytest.raises(CodegenError, match=r"no cpu kernel for linear .*got x float32, weight bfloat16"):
        cpp_spec(node)


def test_a_step_without_tokens_is_no_work(kernels: KernelLibrary) -> None:
    kernels.assert_idle_without_tokens()
