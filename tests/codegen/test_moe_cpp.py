"""The C++ router and mixture of experts: against the references in fp64, and bitwise the same in any batch."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, guarded, rounding
from lowered import LoweredGraph
from torch import Tensor

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.errors import CodegenError
from octavo.compiler.expression import evaluate

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = (FP32, BF16)
Given = tuple[Tensor, Tensor, Tensor]  # x, experts, weights


@dataclass(frozen=True)
class Routing:
    """Attributes of a router; has_bias stands for the argument."""

    experts: int
    top_k: int
    scoring: str
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scaling: float = 1.0
    has_bias: bool = False

    @property
    def attributes(self) -> tuple[int | str | bool | float, ...]:
        return (self.top_k, self.scoring, self.renormalize, self.num_groups, self.top_groups, self.group_score,
                self.scaling)  # fmt: skip


ROUTERS = (
    Routing(8, 2, "softmax"),
    Routing(8, 8, "softmax", renormalize=False),
    Routing(7, 3, "softmax_selected", renormalize=False, has_bias=True),
    Routing(1, 1, "sigmoid", renormalize=False, scaling=0.5),
    Routing(64, 8, "sigmoid", num_groups=8, top_groups=3, group_score="top2_sum", scaling=2.5, has_bias=True),
    Routing(15, 6, "softmax", num_groups=5, top_groups=1, renormalize=False, has_bias=True),
    Routing(128, 6, "softmax", num_groups=4, top_groups=2),
)


@cache
def router_spec(routing: Routing, dtype: torch.dtype) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    logits = graph.tokens("logits", (routing.experts,), dtype)
    bias = graph.weight("bias", torch.zeros(routing.experts)) if routing.has_bias else None
    return cpp_spec(graph.call("router", logits, bias, *routing.attributes))


@dataclass(frozen=True)
class Layer:
    """Sizes and attributes of a mixture of experts."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    has_bias: bool = False


NAMES = ("gate_up", "gate_up_bias", "down", "down_bias")
LAYERS = (
    Layer(4, 2, 64, 48),
    Layer(7, 3, 37, 29, "gelu", has_bias=True),
    Layer(5, 1, 101, 13, "gelu_tanh"),
    Layer(3, 3, 16, 7, "relu", limit=0.5),
    Layer(8, 4, 96, 40, "swiglu_oai", limit=1.5, alpha=1.702, has_bias=True),
    Layer(2, 2, 2880, 773, "swiglu_oai", limit=7.0, alpha=1.702, has_bias=True),
)


@cache
def moe_spec(layer: Layer, dtype: torch.dtype) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (layer.hidden,), dtype)
    experts = graph.tokens("experts", (layer.top_k,), torch.int64)
    weights = graph.tokens("weights", (layer.top_k,), FP32)
    given = {name: graph.weight(name, value) for name, value in parameters(layer, dtype).items()}
    values = [given.get(name) for name in NAMES]
    return cpp_spec(
        graph.call("moe", x, experts, weights, *values, layer.activation, layer.limit, layer.alpha)
    )


@cache
def parameters(layer: Layer, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(layer.hidden)
    rows = 2 * layer.intermediate
    values = {
        "gate_up": torch.randn(layer.experts, rows, layer.hidden) / layer.hidden**0.5,
        "gate_up_bias": torch.randn(layer.experts, rows),
        "down": torch.randn(layer.experts, layer.hidden, layer.intermediate) / layer.intermediate**0.5,
        "down_bias": torch.randn(layer.experts, layer.hidden),
    }
    kept = {name: value for name, value in values.items() if layer.has_bias or "bias" not in name}
    return {name: guarded(value.to(dtype)) for name, value in kept.items()}


@pytest.fixture(scope="module", params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    specs = [router_spec(routing, dtype) for routing in ROUTERS for dtype in DTYPES]
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
    for wrong in (-1, layer.experts, 2**40):
        experts[1, 0] = wrong
        given = [x, experts, weights, *parameters(layer, FP32).values(), *scratch, torch.zeros(2, 64)]
        assert kernels(spec, given, [2]) == 6


def test_bytes_count_the_experts_that_can_be_reached() -> None:
    spec = moe_spec(LAYERS[0], BF16)
    expert, token = 3 * 64 * 48 * 2, 2 * 64 * 2 + 2 * 12
    assert [evaluate(spec.bytes, {"T": t}) for t in (1, 2, 9)] == [
        token + 2 * expert, 2 * token + 4 * expert, 9 * token + 4 * expert,
    ]  # fmt: skip
    assert evaluate(spec.flops, {"T": 3}) == 3 * 2 * 2 * 3 * 64 * 48


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(8, 9, "softmax"), "top_k must be 1 to 8, the number of experts, got 9"),
        (Routing(8, 2, "tanh"), "scoring must be one of softmax, sigmoid, softmax_selected, got 'tanh'"),
        (Routing(9, 2, "softmax", num_groups=2), "experts must be a multiple of groups, got 9 and 2"),
        (Routing(8, 2, "softmax", num_groups=2, top_groups=3), "top_groups must be 1 to 2, .* got 3"),
        (
            Routing(8, 2, "softmax", num_groups=2, group_score="min"),
            "group_score must be one of top2_sum, max",
        ),
        (Routing(8, 2, "softmax", num_groups=8, group_score="top2_sum"), "got 8 experts in 8 groups"),
        (Routing(5000, 2, "softmax"), "at most 4096 experts, got 5000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_router_refuses(routing: Routing, message: str) -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    node = graph.tokens("logits", (routing.experts,), FP32)
    call = graph.graph.call_function(torch.ops.octavo.router.default, (node, None, *routing.attributes))
    call.meta["val"] = (node.meta["val"][..., :2], node.meta["val"][..., :2])
    with pytest.raises(CodegenError, match=message):
        cpp_spec(call)


def test_moe_refuses() -> None:
    with pytest.raises(CodegenError, match=r"activation must be one of silu, .*, swiglu_oai, got 'swish'"):
        moe_spec(Layer(2, 1, 16, 16, "swish"), FP32)
    with pytest.raises(CodegenError, match="expected fp32 or bf16, one for all, got x float16"):
        moe_spec(Layer(2, 1, 16, 16), torch.float16)
    graph = LoweredGraph()
    graph.input("input_ids")
    x, slots = graph.tokens("x", (16,), FP32), graph.tokens("experts", (2,), torch.int64)
    weights = [
        graph.weight("g", torch.zeros(4, 30, 16)),
        None,
        graph.weight("d", torch.zeros(4, 16, 16)),
        None,
    ]
    node = graph.call("moe", x, slots, graph.tokens("weights", (2,), FP32), *weights, "silu", 0.0, 0.0)
    with pytest.raises(
        CodegenError, match=r"gate_up must be \(4, 32, 16\) as down and x say, got \(4, 30, 16\)"
    ):
        cpp_spec(node)
