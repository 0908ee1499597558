"""The router, and the launches of a mixture of experts, against the dialect's references in fp64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.moe import Mixture, Numbering, Router
from octavo.codegen.moe_triton import map_spec, moe_spec, router_spec, tma_refusal
from octavo.compiler.ops.moe import moe, router
from octavo.compiler.target import load_target

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

PLAIN = Router("T", "fp32", "", 8, 2, "softmax", True, 1, 1, "", 1.0)
ROUTERS = {
    "softmax": PLAIN,
    "bf16_all_experts": replace(PLAIN, dtype="bf16", top_k=8, renormalize=False, scaling=0.5),
    "selected": replace(PLAIN, experts=7, top_k=3, scoring="softmax_selected", renormalize=False, bias_dtype="fp32"),
    "unit": replace(PLAIN, experts=6, top_k=3, scoring="unit", renormalize=False, bias_dtype="fp32", scaling=0.5),
    "one_expert": replace(PLAIN, experts=1, top_k=1, scoring="sigmoid", renormalize=False),
    "groups": replace(
        PLAIN, experts=64, top_k=8, scoring="sigmoid", bias_dtype="bf16", groups=8, top_groups=3,
        group_score="top2_sum", scaling=2.5,
    ),
    "odd_groups": replace(PLAIN, experts=15, top_k=6, renormalize=False, groups=5, top_groups=1, group_score="max"),
}  # fmt: skip


def route(launch: Launch, given: Router, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], given.top_k)
    tensors = {"logits": logits, "bias": bias, "out_0": torch.full(shape, float("nan"))}
    tensors["out_1"] = torch.full(shape, -1)
    launch(router_spec(given), tensors, {"T": logits.shape[0]})
    return tensors["out_0"], tensors["out_1"]


@pytest.mark.parametrize("variant", ROUTERS)
def test_router(launch: Launch, variant: str) -> None:
    """Logits are far apart, or equal: only then do rounded scores have the exact ones' order."""
    given, tokens = ROUTERS[variant], 5
    order = torch.rand(tokens, given.experts).argsort(-1)
    logits = (order // 2 * 0.125 - 3.0).to(DTYPES[given.dtype])
    # all choices are below zero: what is left out must be less than that
    bias = (torch.randperm(given.experts) % 5 * 0.25 - 3.0).to(DTYPES[given.bias_dtype or "fp32"])
    weights, experts = route(launch, given, logits, bias)
    expected, chosen = router(
        logits.double(), bias.double() if given.bias_dtype else None, given.top_k, given.scoring,
        given.renormalize, given.groups, given.top_groups, given.group_score, given.scaling,
    )  # fmt: skip
    assert torch.equal(experts, chosen)
    assert torch.allclose(weights.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("variant", ROUTERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_router_names_experts_that_exist_whatever_it_is_given(
    launch: Launch, variant: str, value: float
) -> None:
    given = ROUTERS[variant]
    logits = torch.zeros(2, given.experts)
    logits[0], logits[1, -1] = value, value
    bias = torch.zeros(given.experts, dtype=DTYPES[given.bias_dtype or "fp32"])
    _, experts = route(launch, given, logits.to(DTYPES[given.dtype]), bias)
    assert all(len(set(row)) == given.top_k for row in experts.tolist())
    assert 0 <= int(experts.min()) and int(experts.max()) < given.experts


LAYER = Mixture("T", "bf16", "", "", 4, 2, 64, 48, 64, "silu", 0.0, 0.0)
LAYERS = {
    "silu": LAYER,
    "odd": replace(LAYER, experts=7, top_k=3, hidden=37, intermediate=29, out=37, activation="gelu"),
    "one_of_five": replace(LAYER, experts=5, top_k=1, hidden=104, intermediate=8, out=101, activation="gelu_tanh"),
    "relu": replace(LAYER, experts=3, top_k=3, activation="relu", limit=0.5),
    "oai": replace(
        LAYER, experts=8, top_k=4, hidden=96, intermediate=40, out=96, activation="swiglu_oai", limit=1.5, alpha=1.702,
        gate_up_bias="bf16", down_bias="fp32",
    ),
    "wide": replace(LAYER, experts=2, top_k=2, hidden=264, intermediate=136, out=264),
    "fp32": replace(LAYER, dtype="fp32", gate_up_bias="fp32", down_bias="fp32"),
    "fp32_odd": replace(LAYER, dtype="fp32", experts=3, hidden=45, intermediate=71, out=33),
}  # fmt: skip


def can_tma(layer: Mixture) -> bool:
    return tma_refusal(layer, load_target("b200")) is None


STEMS = ["moe_sort", "moe_linear", "moe_linear", "moe_combine"]


def run(launch: Launch, layer: Mixture, experts: Tensor, is_tma: bool = False) -> tuple[Tensor, Tensor]:
    """The result and its fp64 reference, for one seed of all else."""
    dtype, tokens = DTYPES[layer.dtype], experts.shape[0]
    rows = 2 * layer.intermediate
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "gate_up": (draw(layer.experts, rows, layer.hidden) / layer.hidden**0.5).to(dtype),
        "down": (draw(layer.experts, layer.out, layer.intermediate) / layer.intermediate**0.5).to(dtype),
        "gate_up_bias": draw(layer.experts, rows).to(DTYPES[layer.gate_up_bias or "fp32"]),
        "down_bias": draw(layer.experts, layer.out).to(DTYPES[layer.down_bias or "fp32"]),
        # what a slot without an expert weighs does not matter
        "weights": draw(tokens, layer.top_k).abs().masked_fill(experts < 0, float("nan")),
        "x": draw(tokens, layer.hidden).to(dtype),
        "experts": experts,
        "out": torch.full((tokens, layer.out), float("nan"), dtype=dtype),
    }
    ran = launch(moe_spec(layer, is_tma), tensors, {"T": tokens})
    assert [template.split("/")[1].split(".")[0] for template in ran] == STEMS
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    expected = moe(
        wide["x"], experts, wide["weights"], wide["gate_up"], wide["gate_up_bias"] if layer.gate_up_bias else None,
        wide["down"], wide["down_bias"] if layer.down_bias else None, layer.activation, layer.limit, layer.alpha,
    )  # fmt: skip
    return tensors["out"], expected


def skewed(layer: Mixture, tokens: int) -> Tensor:
    """A token's experts are all different, and low ones come more often."""
    chance = 1.0 / (1.0 + torch.arange(layer.experts)).expand(tokens, -1)
    return torch.multinomial(chance, layer.top_k)


@pytest.mark.parametrize(
    ("variant", "tokens", "is_tma"),
    [(name, 1, can_tma(layer)) for name, layer in LAYERS.items()]
    + [(name, 7, False) for name in LAYERS]
    + [("oai", 23, True), ("wide", 19, True), ("one_of_five", 11, True)],
)
def test_moe_of_few_tokens(
    launch: Launch, assert_rounds_to: Check, variant: str, tokens: int, is_tma: bool
) -> None:
    layer = LAYERS[variant]
    assert_rounds_to(*run(launch, layer, skewed(layer, tokens), is_tma), sums=1.0)


@pytest.mark.parametrize("variant", ["silu", "odd", "wide", "fp32"])
def test_moe_of_many_tokens(launch: Launch, assert_rounds_to: Check, variant: str) -> None:
    layer = LAYERS[variant]
    tokens = 32 * layer.experts // layer.top_k + 1
    assert_rounds_to(*run(launch, layer, skewed(layer, tokens), can_tma(layer)), sums=1.0)


@pytest.mark.parametrize(
    ("variant", "tokens", "is_tma"),
    [("silu", 7, True), ("odd", 7, False), ("fp32", 7, False), ("silu", 65, True), ("oai", 3, False)],
)
def test_slots_without_an_expert_add_nothing(
    launch: Launch, assert_rounds_to: Check, variant: str, tokens: int, is_tma: bool
) -> None:
    """Few tokens and many; every third slot, the second token and the last, and then all."""
    layer = LAYERS[variant]
    experts = skewed(layer, tokens)
    experts.flatten()[::3] = -1
    experts[1], experts[-1] = -1, -1
    out, expected = run(launch, layer, experts, is_tma)
    assert_rounds_to(out, expected, sums=1.0)
    assert not out[[1, -1]].any() and out[0].any()
    assert not run(launch, layer, torch.full_like(experts, -1), is_tma)[0].any()


def test_experts_get_other_numbers(launch: Launch) -> None:
    """Those that the table does not have, nobody's."""
    chosen = torch.randint(-1, 5, (300, 2), generator=torch.Generator().manual_seed(1))
    table, out = torch.tensor([7, -1, 0, 2**40, 3]), torch.full((300, 2), -7)
    chosen[3], chosen[5, 1] = torch.tensor([5, -2]), 2**40
    launch(map_spec(Numbering("T * 2", 5)), {"experts": chosen, "table": table, "out": out}, {"T": 300})
    numbers = dict(enumerate(table.tolist()))
    assert out.flatten().tolist() == [numbers.get(e, -1) for e in chosen.flatten().tolist()]


@pytest.mark.parametrize("tokens", [5, 67])
def test_all_tokens_of_one_expert_and_one_expert_twice(
    launch: Launch, assert_rounds_to: Check, tokens: int
) -> None:
    for expert in (0, 3):
        assert_rounds_to(*run(launch, LAYER, torch.full((tokens, 2), expert), is_tma=True), sums=1.0)


def test_a_sort_of_several_blocks_is_stable(launch: Launch) -> None:
    layer = replace(LAYER, experts=7)
    experts = torch.randint(0, 6, (1200, 2))  # none for the last
    sort = replace(moe_spec(layer, is_tma=False), also=())
    tensors = {"experts": experts}
    order, starts = torch.full((2400,), -1, dtype=torch.int32), torch.full((8,), -1, dtype=torch.int32)
    launch(replace(sort, scratch=()), {**tensors, "order": order, "starts": starts}, {"T": 1200})
    expected = experts.flatten().sort(stable=True)
    assert torch.equal(order.long(), expected.indices)
    assert torch.equal(starts.long(), torch.searchsorted(expected.values, torch.arange(8)))
