"""The C++ kernels of layer_norm and pointwise against the references in fp64, functions at extreme inputs included."""

import re
from functools import cache

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, guarded, rounding
from lowered import LoweredGraph
from torch import Tensor

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.dims import dtype_name
from octavo.compiler.errors import CodegenError
from octavo.compiler.ops.pointwise import evaluate
from octavo.compiler.pointwise import FUNCTIONS

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = (FP32, BF16)
WIDTHS = (1, 7, 64, 1000)
TOKENS = (1, 3, 17)
PRESENT = ((True, True), (True, False), (False, True), (False, False))
EXPRESSIONS = (
    "a", "-a * 0.5 + 1e-3", "a + b", "(a - c) * b", "silu(a) * b - c / (1.0 + exp(d))", "20.0 * tanh(a / 20.0)",
)  # fmt: skip
MIXED = {"a": FP32, "b": BF16, "c": FP32, "d": BF16}
VECTORS, COLUMNS = ("c",), ("d",)
EPS = 1e-5


@cache
def norm_spec(hidden: int, dtype: torch.dtype, weights: torch.dtype, weight: bool, bias: bool) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    given = [
        graph.weight(n, torch.zeros(hidden, dtype=weights)) if p else None
        for n, p in (("w", weight), ("s", bias))
    ]
    return cpp_spec(graph.call("layer_norm", graph.tokens("x", (hidden,), dtype), *given, EPS))


@cache
def pointwise_spec(expression: str, width: int, dtype: torch.dtype, mixed: bool) -> KernelSpec:
    """Operands of `dtype` or of MIXED; c is a vector, d a column."""
    graph = LoweredGraph()
    graph.input("input_ids")
    operands: list[object] = []
    for name in "abcd":
        kind = MIXED[name] if mixed else dtype
        used = name == "a" or name in names(expression)
        vector = name in VECTORS
        made = (
            graph.weight(name, torch.zeros(width, dtype=kind))
            if vector
            else graph.tokens(name, (1 if name in COLUMNS else width,), kind)
        )
        operands.append(made if used else None)
    return cpp_spec(graph.call("pointwise", *operands, expression, dtype_name(torch.zeros(1, dtype=dtype))))


def names(expression: str) -> list[str]:
    return re.findall(r"\b[a-d]\b", expression)


@pytest.fixture(scope="module", params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    specs = [norm_spec(h, d, w, *p) for h in WIDTHS for d in DTYPES for w in DTYPES for p in PRESENT]
    specs += [
        pointwise_spec(e, w, d, m) for e in EXPRESSIONS for w in WIDTHS for d in DTYPES for m in (False, True)
    ]
    specs += [pointwise_spec(f"{name}(a)", 64, FP32, False) for name in FUNCTIONS]
    return KernelLibrary(specs, request.param)


def draw(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    torch.manual_seed(sum(shape))
    return guarded(torch.randn(shape).to(dtype))


def assert_close(actual: Tensor, expected: Tensor, magnitude: Tensor | float, units: int = 16) -> None:
    """One rounding to actual's dtype, and `units` of fp32 relative to the magnitude of what was added up."""
    bound = expected.abs() * rounding(actual.dtype) * 1.001 + magnitude * units * rounding(FP32)
    error = (actual.double() - expected).abs()
    assert bool((error <= bound).all()), (
        f"{float((error / bound).nan_to_num(torch.inf).max()):.3g} times the bound"
    )


@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("present", PRESENT, ids=str)
def test_layer_norm(
    kernels: KernelLibrary, hidden: int, dtype: torch.dtype, weights: torch.dtype, present: tuple[bool, bool]
) -> None:
    weight, bias = (draw(hidden, dtype=weights) if p else None for p in present)
    given = [t for t in (weight, bias) if t is not None]
    for tokens in TOKENS:
        x = guarded(draw(tokens, hidden, dtype=dtype) * 3 + 2)  # a mean that counts
        out = torch.full((tokens, hidden), float("nan"), dtype=dtype)
        assert kernels(norm_spec(hidden, dtype, weights, *present), [x, *given, out], [tokens]) == 0
        wide = [None if t is None else t.double() for t in (weight, bias)]
        expected = torch.ops.octavo.layer_norm(x.double(), *wide, EPS)
        # What cancels in x - mean is up to 20 and is scaled by up to 1 / sqrt(EPS) where a row has no variance.
        factor = 1.0 if weight is None else weight.double().abs()
        scale = x.double().var(-1, unbiased=False, keepdim=True).add(EPS).rsqrt()
        assert_close(out, expected, expected.abs() + factor * scale * 20)


def test_layer_norm_of_a_large_mean_keeps_the_variance(kernels: KernelLibrary) -> None:
    x = guarded(draw(3, 1000) + 1e4)  # the mean of squares would lose 1 of 1e8
    out = torch.empty_like(x)
    assert kernels(norm_spec(1000, FP32, FP32, False, False), [x, out], [3]) == 0
    assert (out.double() - torch.ops.octavo.layer_norm(x.double(), None, None, EPS)).abs().max() < 2e-3


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_pointwise(
    kernels: KernelLibrary, expression: str, width: int, dtype: torch.dtype, mixed: bool
) -> None:
    spec = pointwise_spec(expression, width, dtype, mixed)
    for tokens in TOKENS:
        used = {}
        for seed, arg in enumerate(spec.args[:-2]):
            shape = (width,) if arg.name in VECTORS else (tokens, 1 if arg.name in COLUMNS else width)
            kind = MIXED[arg.name] if mixed else dtype
            torch.manual_seed(seed)
            used[arg.name] = guarded(torch.randn(shape).to(kind))
        out = torch.full((tokens, width), float("nan"), dtype=dtype)
        assert kernels(spec, [*used.values(), out], [tokens]) == 0
        wide = {name: t.double() for name, t in used.items()}
        terms = sum((t.abs() for t in wide.values()), torch.ones(width, dtype=torch.float64))
        assert_close(out, evaluate(expression, wide), terms * terms)


def test_pointwise_may_write_over_its_operand(kernels: KernelLibrary) -> None:
    spec = pointwise_spec("a + b", 1000, FP32, False)
    x, y = draw(3, 1000), draw(1, 3, 1000)[0]
    expected = x + y
    assert kernels(spec, [x, y, x], [3]) == 0
    assert torch.equal(x, expected)


LARGE, SMALL, INFINITE = 3e38, 1e-38, float("inf")
EXTREMES = (0.0, -0.0, 1e-6, -1e-6, 0.5, -0.5, 1.0, 9.0, -9.0, 30.0, -30.0, 88.0, -88.0, 100.0, -100.0, 1e4, -1e4, 1e30,
            -1e30, LARGE, -LARGE, SMALL, -SMALL)  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_at_extreme_inputs(kernels: KernelLibrary, name: str) -> None:
    """Within a few roundings of fp32 of the value in fp64, or its smallest normal number; nan where that is nan."""
    x = torch.zeros(1, 64)
    x[0, : len(EXTREMES)] = torch.tensor(EXTREMES)
    x[0, 40:43] = torch.tensor([INFINITE, -INFINITE, float("nan")])
    out = torch.empty_like(x)
    assert kernels(pointwise_spec(f"{name}(a)", 64, FP32, False), [guarded(x), out], [1]) == 0
    expected = evaluate(f"{name}(a)", {"a": x.double()})
    # 1 + erf and 1 + tanh cancel in the reference, by 1e-16 of x; the kernel's forms do not.
    slack = x.double().abs().nan_to_num(0.0, 0.0, 0.0) * 1e-15 if name.startswith("gelu") else 0.0
    as_fp32 = expected.to(FP32)
    assert torch.equal(out.isnan(), as_fp32.isnan())
    assert torch.equal(out.isinf(), as_fp32.isinf())
    finite = as_fp32.isfinite()
    error = (out.double() - expected)[finite].abs()
    roundings = (
        4 if name in ("rsqrt", "sqrt", "relu", "tanh") else 16
    )  # exp is off by 2 units, and rounded arguments
    assert bool((error <= (expected.abs() * roundings * 2.0**-24 + 2.0**-126 + slack)[finite]).all())


def test_refuses_dtypes_that_no_kernel_has() -> None:
    with pytest.raises(CodegenError, match="expected fp32 or bf16, one for all, got x float16"):
        norm_spec(16, torch.float16, FP32, True, True)
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (16,), FP32)
    mixed = [graph.weight("w", torch.zeros(16)), graph.weight("s", torch.zeros(16, dtype=BF16))]
    with pytest.raises(CodegenError, match="one for all, got weight float32, bias bfloat16"):
        cpp_spec(graph.call("layer_norm", x, *mixed, EPS))


def test_heads_count_as_rows() -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (9, 64), FP32)
    for node in (
        graph.call("layer_norm", x, None, None, EPS),
        graph.call("pointwise", x, None, None, None, "-a", "fp32"),
    ):
        spec = cpp_spec(node)
        assert spec.args[-1].value == "9*T" and 64 in dict(spec.params).values()


def test_a_step_without_tokens_is_no_work(kernels: KernelLibrary) -> None:
    kernels.assert_idle_without_tokens()
