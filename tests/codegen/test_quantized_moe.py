"""Mixtures of quantised experts of the cpp family: results, that they are a token's own, and what is refused."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, guarded
from experts import Layer, with_holes
from lowered import LoweredGraph
from quantized_experts import OPS, Stack, expected, stack, tokens_of
from torch import Tensor, fx

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.render import render, render_template
from octavo.compiler.errors import CodegenError
from octavo.compiler.expression import evaluate
from octavo.compiler.host import build_shared_library
from octavo.compiler.program import DIMS

FP32, BF16 = torch.float32, torch.bfloat16
TORCH = {"fp32": FP32, "bf16": BF16, "fp8": torch.float8_e4m3fn, "u8": torch.uint8, "i32": torch.int32}
SMALL = Layer(5, 2, 96, 48)
OAI = Layer(4, 3, 144, 80, "swiglu_oai", 2.0, 1.702, has_bias=True)
# of gpt-oss: 180 blocks a row, which are no whole number of groups
WIDE = Layer(3, 1, 2880, 16)
# (layer, dtype, outer scales given, alphas)
CASES: dict[str, tuple[Layer, torch.dtype, bool, tuple[int, int]]] = {
    "static": (OAI, BF16, True, (2 * OAI.intermediate, OAI.hidden)),
    "own": (SMALL, FP32, False, (2, 1)),
    "2880": (WIDE, BF16, True, (1, 1)),
}
BUILT = [("static", "nvfp4"), ("static", "nvfp4_weight_only"), ("own", "nvfp4"), ("own", "fp8")]
MORE = [("static", "fp8"), ("2880", "nvfp4")]


@cache
def made(case: str, scheme: str) -> Stack:
    layer, dtype, static, alphas = CASES[case]
    result = stack(layer, scheme, static, alphas=alphas, dtype=dtype)
    result.tensors = {
        name: guarded(value) if value.dtype in (FP32, BF16) else value
        for name, value in result.tensors.items()
    }
    return result


def node_of(given: Stack, dtype: torch.dtype, **changed: Any) -> fx.Node:
    graph, layer = LoweredGraph(), given.layer
    graph.input("input_ids")
    tokens = (
        graph.tokens("x", (layer.hidden,), dtype),
        graph.tokens("experts", (layer.top_k,), torch.int64),
        graph.tokens("weights", (layer.top_k,), FP32),
    )
    values = [
        graph.weight(name, given.tensors[name]) if name in given.tensors else None for name in given.names
    ]
    numbers = (layer.activation, layer.limit, layer.alpha)
    return graph.call(OPS[given.scheme], *tokens, *values, *numbers, **{**given.options, **changed})


@cache
def spec_of(case: str, scheme: str) -> KernelSpec:
    return cpp_spec(node_of(made(case, scheme), CASES[case][1]))


@pytest.fixture(scope="module")
def kernels() -> KernelLibrary:
    return KernelLibrary([spec_of(*built) for built in BUILT], RUNNABLE[0])


Given = tuple[Tensor, Tensor, Tensor]


def run(kernels: KernelLibrary, case: str, scheme: str, given: Given, num_threads: int = 2) -> Tensor:
    spec, x = spec_of(case, scheme), given[0]
    scratch = {
        name: torch.full(
            [evaluate(size, {"T": len(x)}) for size in shape], 0x7F, dtype=torch.uint8
        ).to(TORCH[dtype])
        for name, dtype, shape in spec.scratch
    }  # fmt: skip
    out = torch.full_like(x, float("nan"))
    tensors = {**made(case, scheme).tensors, **scratch, "out": out}
    tensors |= dict(zip(("x", "experts", "weights"), given, strict=True))
    assert kernels(spec, [tensors[arg.name] for arg in spec.args[:-1]], [len(x)], num_threads) == 0
    return out


def inputs(case: str, count: int) -> Given:
    layer, dtype, *_ = CASES[case]
    x, experts, weights = tokens_of(layer, count, dtype)
    return guarded(x), experts, guarded(weights)


@pytest.mark.parametrize(("case", "scheme"), BUILT)
def test_results_are_those_of_the_reference(kernels: KernelLibrary, case: str, scheme: str) -> None:
    check(kernels, case, scheme)


@pytest.mark.slow
@pytest.mark.parametrize("features", RUNNABLE)
def test_results_of_all_sizes_with_the_instructions_of_every_level(features: str) -> None:
    built = [*BUILT, *MORE]
    kernels = KernelLibrary([spec_of(*one) for one in built], features)
    for case, scheme in built:
        check(kernels, case, scheme)


def check(kernels: KernelLibrary, case: str, scheme: str) -> None:
    for count in (1, 3, 20, 140):
        given = inputs(case, count)
        got, wanted = run(kernels, case, scheme, given), made(case, scheme)(*given)
        error = (got.double() - wanted.double()).abs()
        unit = 2.0**-7 if got.dtype == BF16 else 2.0**-20
        assert_nearly_all(error <= unit * wanted.abs() + 2.0**-18 * wanted.abs().max())
        # Where a code of the hidden state rounds the other way, a row is off by a step of the format.
        assert float(error.norm() / wanted.double().norm()) < 5e-3


def assert_nearly_all(within: Tensor) -> None:
    """Rows of which an element of the hidden state lay between two codes differ; there are few."""
    assert float((~within).any(-1).double().mean()) <= 0.1, within


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8"])
def test_results_are_those_of_the_book(kernels: KernelLibrary, scheme: str) -> None:
    given = inputs("own", 6)
    wanted = expected(made("own", scheme), *given)
    error = (run(kernels, "own", scheme, given).double() - wanted).abs()
    assert bool((error <= 2.0**-18 * wanted.abs().max()).all())


@pytest.mark.parametrize(("case", "scheme"), BUILT)
def test_a_token_does_not_depend_on_batch_or_threads(kernels: KernelLibrary, case: str, scheme: str) -> None:
    given = inputs(case, 70)
    alone = torch.cat([run(kernels, case, scheme, part(given, i, i + 1), 1) for i in range(70)])
    for count in (2, 5, 17, 70):
        for num_threads in (1, 2, 3):
            assert torch.equal(run(kernels, case, scheme, part(given, 0, count), num_threads), alone[:count])


@pytest.mark.parametrize(("case", "scheme"), BUILT)
def test_a_slot_without_an_expert_adds_nothing(kernels: KernelLibrary, case: str, scheme: str) -> None:
    x, experts, weights = inputs(case, 70)
    given = (x, *with_holes(experts, weights))
    result, wanted = run(kernels, case, scheme, given), made(case, scheme)(*given)
    assert not result[[1, -1]].any() and bool(result.isfinite().all())
    assert float((result.double() - wanted.double()).norm() / wanted.double().norm()) < 5e-3
    alone = torch.cat([run(kernels, case, scheme, part(given, i, i + 1), 1) for i in range(70)])
    assert torch.equal(alone, result)
    assert not run(kernels, case, scheme, (x, torch.full_like(experts, -1), weights)).any()


def part(given: Given, start: int, stop: int) -> Given:
    x, experts, weights = (tensor[start:stop].clone() for tensor in given)
    return x, experts, weights


def test_an_expert_that_does_not_exist_is_an_error(kernels: KernelLibrary) -> None:
    given = inputs("own", 2)
    for wrong in (SMALL.experts, -2):
        given[1][1, 0] = wrong
        with pytest.raises(AssertionError, match="6 == 0"):
            run(kernels, "own", "nvfp4", given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layout": "swizzled_128x4"}, "block scales must lie in the layout linear, got 'swizzled_128x4'"),
        ({"interleaved": True}, "rows of gates must come before those of ups"),
        ({"activation": "tanh"}, "activation must be one of .*swiglu_oai, got 'tanh'"),
        ({"gate_up_alpha": torch.ones(5, 3)}, "gate_up_alpha must have 1 or 2 or 96 numbers an expert, got 3"),
        ({"gate_up": torch.zeros(5, 90, 48, dtype=torch.uint8)}, r"must hold \(5, 96, 96\) .*, got \(5, 90, 96\)"),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_read_is_refused(change: dict[str, Any], said: str) -> None:
    given = stack(SMALL, "nvfp4", alphas=(2, 1))
    (name, value), options = *change.items(), {}
    if name == "activation":
        given.layer = replace(given.layer, activation=value)
    elif name in given.tensors:
        given.tensors[name] = value
    else:
        options = change
    with pytest.raises(CodegenError, match=f"no cpu kernel for nvfp4_moe .*{said}"):
        cpp_spec(node_of(given, FP32, **options))


def test_rows_of_232_elements_are_refused() -> None:
    given = stack(Layer(2, 1, 32, 16), "nvfp4")
    given.tensors["down"] = torch.zeros(2, 32, 116, dtype=torch.uint8)
    given.tensors["gate_up"] = torch.zeros(2, 464, 16, dtype=torch.uint8)
    with pytest.raises(CodegenError, match="rows must be whole blocks of 16 elements, got 232"):
        cpp_spec(node_of(given, FP32))


def test_costs_are_those_of_the_format() -> None:
    for scheme, bits in (("nvfp4", 4.5), ("fp8", 8)):
        spec = spec_of("own", scheme)
        elements = 3 * SMALL.hidden * SMALL.intermediate
        token = 2 * SMALL.hidden * 4 + 12 * SMALL.top_k
        assert evaluate(spec.bytes, {"T": 100}) == 100 * token + 5 * (elements * bits / 8 + 4 * 3)
        assert evaluate(spec.flops, {"T": 100}) == 200 * 2 * elements


@pytest.mark.slow
def test_builds_for_the_instructions_that_may_be_missing_here() -> None:
    spec = spec_of("static", "nvfp4")
    source = render_template(
        "cpp/program.cpp.jinja", version="test", dims=DIMS, kernels=[render(spec), f"void* kept = (void*){spec.name};"],
        buffers=(), segments=((),), workspace="0",
    )  # fmt: skip
    assert build_shared_library(source, "avx512_bf16").exists()


def test_a_step_without_tokens_is_no_work(kernels: KernelLibrary) -> None:
    kernels.assert_idle_without_tokens()
