"""The C++ router and mixture of experts: against the references in fp64, and bitwise the same in any batch."""

import ctypes
import operator

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, guarded, rounding
from experts import (
    NAMES,
    RENUMBERED,
    Layer,
    Routing,
    map_spec,
    moe_spec,
    parameters,
    router_spec,
    with_holes,
)
from lowered import LoweredGraph
from torch import Tensor, fx

from octavo.codegen.build_cpp import build_program
from octavo.codegen.emit import emit
from octavo.codegen.render import render, render_template
from octavo.codegen.row import op_name
from octavo.compiler.errors import CodegenError
from octavo.compiler.expression import evaluate
from octavo.compiler.host import build_shared_library
from octavo.compiler.program import DIMS
from octavo.passes.plan_memory import plan_memory

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = (FP32, BF16)
Given = tuple[Tensor, Tensor, Tensor]  # x, experts, weights


ROUTERS = (
    Routing(8, 2, "softmax"),
    Routing(8, 8, "softmax", renormalize=False),
    Routing(7, 3, "softmax_selected", renormalize=False, has_bias=True),
    Routing(1, 1, "sigmoid", renormalize=False, scaling=0.5),
    Routing(64, 8, "sigmoid", num_groups=8, top_groups=3, group_score="top2_sum", scaling=2.5, has_bias=True),
    Routing(15, 6, "softmax", num_groups=5, top_groups=1, renormalize=False, has_bias=True),
    Routing(128, 6, "softmax", num_groups=4, top_groups=2),
    Routing(6, 3, "unit", renormalize=False, scaling=0.5, has_bias=True),
)


LAYERS = (
    Layer(4, 2, 64, 48),
    Layer(7, 3, 37, 29, "gelu", has_bias=True),
    Layer(5, 1, 101, 13, "gelu_tanh"),
    Layer(3, 3, 16, 7, "relu", limit=0.5),
    Layer(8, 4, 96, 40, "swiglu_oai", limit=1.5, alpha=1.702, has_bias=True),
    Layer(2, 2, 2880, 773, "swiglu_oai", limit=7.0, alpha=1.702, has_bias=True),
)


@pytest.fixture(scope="module", params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    specs = [router_spec(routing, dtype) for routing in ROUTERS for dtype in DTYPES]
    specs.append(map_spec(4, 2))
    return KernelLibrary([*specs, *(moe_spec(layer, d) for layer in LAYERS for d in DTYPES)], request.param)


def route(
    kernels: KernelLibrary, routing: Routing, logits: Tensor, bias: Tensor | None, num_threads: int = 2
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], routing.top_k)
    weights, experts = guarded(torch.zeros(shape)), torch.full(shape, -1)
    given = [logits, *([] if bias is None else [bias]), weights, experts]
    assert kernels(router_spec(routing, logits.dtype), given, [logits.shape[0]], num_threads) == 0
    return weights, experts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTERS, ids=lambda r: f"{r.scoring}-{r.experts}")
def test_router(kernels: KernelLibrary, routing: Routing, dtype: torch.dtype) -> None:
    """Logits are far apart, or equal: only then do rounded scores have the exact ones' order."""
    for tokens in (1, 3, 129):
        torch.manual_seed(tokens)
        order = torch.rand(tokens, routing.experts).argsort(-1)
        logits = guarded((order // 2 * 0.125 - 3.0).to(dtype))
        bias = (torch.randperm(routing.experts) % 5 * 0.25 - 0.6) if routing.has_bias else None
        weights, experts = route(kernels, routing, logits, bias)
        wide = None if bias is None else bias.double()
        expected, chosen = torch.ops.octavo.router(logits[None].double(), wide, *routing.attributes)
        assert torch.equal(experts, chosen[0])
        assert torch.allclose(weights.double(), expected[0], rtol=1e-5, atol=0)


def test_router_of_equal_scores_takes_the_first(kernels: KernelLibrary) -> None:
    _, experts = route(kernels, ROUTERS[0], torch.zeros(3, 8), None)
    assert experts.tolist() == [[0, 1]] * 3
    _, experts = route(kernels, ROUTERS[4], torch.zeros(1, 64), torch.zeros(64))
    assert experts.tolist() == [list(range(8))]


def test_router_names_experts_that_exist_whatever_it_is_given(kernels: KernelLibrary) -> None:
    """NaN comes first, as torch sorts it; the weights tell."""
    for routing in ROUTERS:
        bias = torch.zeros(routing.experts) if routing.has_bias else None
        for value in (float("nan"), float("-inf"), float("inf")):
            logits = torch.zeros(2, routing.experts)
            logits[0] = value
            logits[1, -1] = value
            _, experts = route(kernels, routing, logits, bias)
            assert all(len(set(row)) == routing.top_k for row in experts.tolist())
            assert 0 <= int(experts.min()) and int(experts.max()) < routing.experts
    weights, experts = route(kernels, ROUTERS[0], torch.tensor([[0.0] * 7 + [float("nan")]]), None)
    assert weights.isnan().all()
    routing = ROUTERS[2]
    logits = torch.tensor([[0.0, 9.0, 1.0, 2.0, float("nan"), 3.0, 4.0]])
    weights, experts = route(kernels, routing, logits, torch.zeros(7))
    assert experts.tolist() == [[4, 1, 6]] and weights.isnan().all()


def mix(kernels: KernelLibrary, layer: Layer, given: Given, num_threads: int = 2) -> Tensor:
    x, experts, weights = given
    spec = moe_spec(layer, x.dtype)
    scratch = []
    for _, dtype, shape in spec.scratch:
        sizes = [evaluate(size, {"T": x.shape[0]}) for size in shape]
        kinds = {"i32": torch.int32, "fp32": FP32, "bf16": BF16}
        fill = -(2**30) if dtype == "i32" else float("nan")
        scratch.append(torch.full(sizes, fill, dtype=kinds[dtype]))
    out = guarded(torch.zeros_like(x))
    tensors = [x, experts, weights, *parameters(layer, x.dtype).values(), *scratch, out]
    assert kernels(spec, tensors, [x.shape[0]], num_threads) == 0
    return out


def inputs(layer: Layer, tokens: int, dtype: torch.dtype) -> Given:
    """x, experts and weights; experts of a token are all different, and low ones come more often."""
    torch.manual_seed(tokens)
    chance = 1.0 / (1.0 + torch.arange(layer.experts)).expand(tokens, -1)
    experts = torch.multinomial(chance, layer.top_k)
    x = guarded(torch.randn(tokens, layer.hidden).to(dtype))
    return x, experts, guarded(torch.rand(tokens, layer.top_k))


def reference(layer: Layer, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    given = {name: value.double() for name, value in parameters(layer, x.dtype).items()}
    values = [given.get(name) for name in NAMES]
    options = (layer.activation, layer.limit, layer.alpha)
    wide = (x[None].double(), experts[None], weights[None].double())
    result: Tensor = torch.ops.octavo.moe(*wide, *values, *options)[0]
    return result


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """One rounding of the result, and those of the activated rows, whose sum is as large as the largest result."""
    unit = rounding(actual.dtype)
    bound = unit * expected.abs() + (unit + 64 * rounding(FP32)) * expected.abs().max()
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda m: f"{m.activation}-{m.hidden}")
def test_moe(kernels: KernelLibrary, layer: Layer, dtype: torch.dtype) -> None:
    for tokens in (1, 3, 17, 131) if layer.hidden < 1000 else (1, 5):
        given = inputs(layer, tokens, dtype)
        assert_close(mix(kernels, layer, given), reference(layer, *given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_tokens_of_one_expert_and_one_expert_twice(kernels: KernelLibrary, dtype: torch.dtype) -> None:
    layer = LAYERS[0]
    given = inputs(layer, 150, dtype)
    for expert in (0, 3):
        given[1][:] = expert
        assert_close(mix(kernels, layer, given), reference(layer, *given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS[:2], ids=lambda m: f"{m.activation}-{m.hidden}")
def test_a_slot_without_an_expert_adds_nothing(
    kernels: KernelLibrary, layer: Layer, dtype: torch.dtype
) -> None:
    for tokens in (1, 2, 131):
        x, experts, weights = inputs(layer, tokens, dtype)
        given = (x, *with_holes(experts, weights))
        result = mix(kernels, layer, given)
        assert_close(result, reference(layer, *given))
        assert not result[-1].any() and not result[1:2].any()
        assert not mix(kernels, layer, (x, torch.full_like(experts, -1), weights)).any()
        for num_threads in (1, 3):
            assert torch.equal(mix(kernels, layer, given, num_threads), result)
            alone = torch.cat([mix(kernels, layer, part(given, i, i + 1)) for i in range(min(tokens, 9))])
            assert torch.equal(alone, result[:9])


def test_a_step_without_tokens_is_no_work(kernels: KernelLibrary) -> None:
    kernels.assert_idle_without_tokens()


def part(given: Given, start: int, stop: int) -> Given:
    x, experts, weights = (tensor[start:stop].clone() for tensor in given)
    return x, experts, weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS[:-1], ids=lambda m: f"{m.activation}-{m.hidden}")
def test_a_token_does_not_depend_on_batch_or_threads(
    kernels: KernelLibrary, layer: Layer, dtype: torch.dtype
) -> None:
    given = inputs(layer, 131, dtype)
    alone = torch.cat([mix(kernels, layer, part(given, i, i + 1), 1) for i in range(131)])
    for tokens in (2, 5, 17, 64, 131):
        for num_threads in (1, 2, 3):
            assert torch.equal(mix(kernels, layer, part(given, 0, tokens), num_threads), alone[:tokens])


def test_an_expert_that_does_not_exist_is_an_error(kernels: KernelLibrary) -> None:
    layer = LAYERS[0]
    x, experts, weights = inputs(layer, 2, FP32)
    spec = moe_spec(layer, FP32)
    scratch = [torch.zeros(2, 2, 64), torch.zeros(2, 2, 64), torch.zeros(2, 2, 64)]
    for wrong in (-2, layer.experts, 2**40, -(2**40)):
        experts[1, 0] = wrong
        given = [x, experts, weights, *parameters(layer, FP32).values(), *scratch, torch.zeros(2, 64)]
        assert kernels(spec, given, [2]) == 6


def test_experts_get_other_numbers(kernels: KernelLibrary) -> None:
    chosen, table, expected = (torch.tensor(rows) for rows in RENUMBERED)
    out = torch.zeros_like(chosen)
    assert kernels(map_spec(4, 2), [chosen, table, out], [8]) == 0
    assert torch.equal(out, expected)
    assert torch.equal(torch.ops.octavo.map_experts(chosen[None], table)[0], expected)
    for wrong in (-2, 4, 2**40):
        chosen[2, 1] = wrong
        assert kernels(map_spec(4, 2), [chosen, table, out], [8]) == 6


def small_model(layer: Layer, dtype: torch.dtype) -> fx.GraphModule:
    """Embedding, two mixtures of experts with their routers, and logits."""
    graph = LoweredGraph()
    ids, rows = graph.input("input_ids"), graph.input("logit_rows")
    torch.manual_seed(0)
    total = graph.call("embedding", ids, graph.weight("table", torch.randn(11, layer.hidden).to(dtype)))
    for i in range(2):
        gates = graph.weight(f"{i}.router", torch.randn(layer.experts, layer.hidden).to(dtype))
        routed = graph.call(
            "router", graph.call("linear", total, gates), None, layer.top_k, "softmax", True, 1, 1, "max", 1.0
        )
        weights, experts = (graph.function(operator.getitem, routed, index) for index in range(2))
        given = {
            name: graph.weight(f"{i}.{name}", value * (i + 1))
            for name, value in parameters(layer, dtype).items()
        }
        values = [given.get(name) for name in NAMES]
        mixed = graph.call(
            "moe", total, experts, weights, *values, layer.activation, layer.limit, layer.alpha
        )
        total = graph.call("add", total, mixed)
    logits = graph.call("gather_logits", total, rows)
    return graph.finish(
        graph.call("linear", logits, graph.weight("head", torch.randn(11, layer.hidden).to(dtype)))
    )


def test_step_of_a_graph_of_two_mixtures() -> None:
    """Scratch lies in the workspace behind all values, each layer's in the same place."""
    layer, tokens = LAYERS[4], 9
    module = small_model(layer, FP32)
    specs = {node: cpp_spec(node) for node in module.graph.nodes if op_name(node)}
    program = emit(module, specs, plan_memory(module.graph), 16)
    library = ctypes.CDLL(str(build_program(program, specs.values(), RUNNABLE[0])))
    ids, rows, logits = torch.arange(tokens), torch.tensor([0, 8, 3]), torch.zeros(3, 11)
    sizes = {"T": tokens, "R": 1, "L": 3, "P": 1, "num_pages": 1, "N": tokens}
    tensors = {"input_ids": ids, "logit_rows": rows, "logits": logits}
    workspace = torch.full((evaluate(program.workspace, sizes) // 4,), float("nan"))
    used = [
        tensors[b.name] if b.name in tensors else operator.attrgetter(b.name)(module)
        for b in program.buffers
        if b.kind != "workspace"
    ]
    addresses = (ctypes.c_void_p * (len(used) + 1))(*(t.data_ptr() for t in (*used, workspace)))
    dims = (ctypes.c_int64 * len(DIMS))(*(sizes[name] for name in DIMS))
    assert library.octavo_step(dims, addresses, 2, 0) == 0
    (expected,) = module(ids[None], rows)
    assert torch.allclose(logits, expected[0], rtol=1e-4, atol=1e-4)
    orders = [buffer.offset for buffer in program.buffers if buffer.name.endswith(".order")]
    assert len(orders) == 2 and len(set(orders)) == 1


def test_more_experts_than_a_stack_holds_are_refused() -> None:
    with pytest.raises(CodegenError, match=r"no cpu kernel for router .*at most 4096 experts, got 5000"):
        router_spec(Routing(5000, 2, "softmax"), FP32)
    with pytest.raises(CodegenError, match=r"no cpu kernel for moe .*at most 4096 experts, got 5000"):
        moe_spec(Layer(5000, 1, 2, 2), FP32)


def test_builds_for_the_instructions_that_may_be_missing_here() -> None:
    specs = [router_spec(ROUTERS[4], BF16), moe_spec(LAYERS[4], BF16)]
    kept = "".join(f"void* keep_{spec.name} = (void*){spec.name};\n" for spec in specs)
    text = [*(render(spec) for spec in specs), kept]
    source = render_template(
        "cpp/program.cpp.jinja",
        version="test",
        dims=DIMS,
        kernels=text,
        buffers=(),
        segments=((),),
        workspace="0",
    )
    assert build_shared_library(source, "avx512_bf16").exists()
