"""The router of the Triton family against oracles from the papers in exact and decimal numbers."""

from collections.abc import Callable

import pytest
import torch
from experts import Routing
from routing import BIASES, LOGITS, RULES, check, draw, draw_bias
from torch import Tensor

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.moe import Router
from octavo.codegen.moe_triton import router_spec

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def spec_of(routing: Routing, dtype: str) -> KernelSpec:
    groups, bias = routing.num_groups, "fp32" if routing.has_bias else ""
    of_groups = (groups, routing.top_groups, routing.group_score if groups > 1 else "")
    return router_spec(
        Router("T", dtype, bias, routing.experts, routing.top_k, routing.scoring, routing.renormalize, *of_groups,
               routing.scaling)
    )  # fmt: skip


def compare(launch: Launch, name: str, tokens: int, seed: int) -> tuple[int, int]:
    """Tokens that were evidence, and all."""
    routing, rule = RULES[name]
    generator, used, drawn = torch.Generator().manual_seed(seed), 0, 0
    for of_logits in LOGITS:
        for i, of_bias in enumerate(BIASES if routing.has_bias else BIASES[:1]):
            dtype = ("fp32", "bf16")[(i + len(of_logits)) % 2]
            logits = draw(of_logits, routing.experts, tokens, generator).to(DTYPES[dtype])
            bias = draw_bias(of_bias, routing.experts, generator)
            shape = (tokens, routing.top_k)
            weights, experts = torch.full(shape, float("nan")), torch.full(shape, -1)
            given = {"logits": logits, "bias": bias, "out_0": weights, "out_1": experts}
            launch(spec_of(routing, dtype), given, {"T": tokens})
            used += check(routing, rule, logits, bias, weights, experts)
            drawn += tokens
    return used, drawn


@pytest.mark.parametrize("name", RULES)
def test_selection_and_weights_are_those_of_the_paper(launch: Launch, name: str) -> None:
    used, drawn = compare(launch, name, 1, 0)
    assert used >= 0.7 * drawn


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", RULES)
def test_many_draws(launch: Launch, name: str, seed: int) -> None:
    used, drawn = compare(launch, name, 12, seed)
    assert used >= 0.8 * drawn
