"""All ranks of a graph in one process, against the model itself in fp64."""

from typing import Any

import pytest
import torch
import zoo
from spread import logits_of_ranks, spread

from octavo.compiler.mesh import Mesh
from octavo.compiler.options import Parallel

PROMPTS = [[3, 99, 17, 64, 5], [], [7], [120, 1, 2]]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixtral", {"ep": 3, "dp": 3}),  # four experts on three ranks
        ("mixtral", {"ep": 4, "dp": 4, "redundant_experts": 4}),
        pytest.param("gpt_oss", {"ep": 4, "dp": 2, "tp": 2}, marks=pytest.mark.slow),
        ("deepseek_v3", {"ep": 8, "dp": 2, "tp": 2}),
        pytest.param("qwen3_moe", {"ep": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_rank_has_the_logits_of_the_model(name: str, sizes: dict[str, Any]) -> None:
    """Ranks along dp have other prompts, one of them none."""
    mesh = Parallel(**sizes).mesh
    model: Any = zoo.build(name).double()
    model.set_experts_implementation("eager")  # the others take no fp64
    prompts = PROMPTS[: mesh.dp]
    results = logits_of_ranks(spread(name, **sizes), mesh, prompts)
    for rank, logits in enumerate(results):
        ids = prompts[mesh.coordinates(rank)["dp"]]
        assert logits.shape == (len(ids), zoo.SIZES["vocab_size"])
        if ids:
            with torch.no_grad():
                wanted = model(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def test_ranks_that_share_tokens_have_the_same_bits() -> None:
    mesh: Mesh = Parallel(ep=4, tp=2).mesh
    first, *others = logits_of_ranks(spread("mixtral", ep=4, tp=2), mesh, [PROMPTS[0]])
    assert all(torch.equal(first, other) for other in others)
