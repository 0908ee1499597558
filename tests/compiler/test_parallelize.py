"""What may be spread, what is refused, and that the proof finds what is wrong."""

from typing import Any

import pytest
import torch
from spread import PAGE_SIZE, lowered

from octavo.compiler.errors import OptionError, PassError
from octavo.compiler.graph_model import copy_graph
from octavo.compiler.options import Parallel
from octavo.compiler.parallelize import check_parallel, parallelize, prove_parallel
from octavo.passes.sharding import whole_weights


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ep": 0}, "ep: expected 1 or more, got 0"),
        ({"ep": 6, "tp": 4}, r"must be a multiple of tp \* dp = 4, got 6"),
        ({"dp": 2}, "dp=2 without ep: ranks that share no experts share nothing"),
        ({"redundant_experts": 1}, "redundant_experts: expected 0, or more with ep"),
        ({"ep": 2, "wire": "fp8"}, "tokens travel to experts only with dp"),
        ({"ep": 2, "dp": 2, "wire": "int8"}, "wire: expected one of model, fp8, nvfp4"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_parallel(Parallel(**sizes))


def test_one_rank_changes_nothing() -> None:
    graph_module = lowered("mixtral")
    before = graph_module.code
    assert parallelize(graph_module, Parallel(), PAGE_SIZE, whole=None) == []
    assert graph_module.code == before and "mesh" not in graph_module.meta


def test_a_dense_model_has_no_experts_to_spread() -> None:
    with pytest.raises(OptionError, match=r"ep=2: the model has no mixture of experts; use tp, or carve"):
        parallelize(lowered("llama"), Parallel(ep=2), PAGE_SIZE, whole=None)


def test_a_model_of_which_nothing_divides_is_refused_with_reasons() -> None:
    with pytest.raises(
        OptionError, match=r"nothing of the model can be spread .* do not divide over 7 ranks"
    ):
        parallelize(lowered("llama"), Parallel(tp=7), PAGE_SIZE, whole=None)


def test_the_proof_runs_all_ranks_and_is_reported() -> None:
    graph_module = lowered("mixtral")
    reports = parallelize(graph_module, Parallel(ep=4, tp=2, dp=2), PAGE_SIZE, copy_graph(graph_module))
    assert [r.name for r in reports] == [
        "shard_experts", "shard_tensors", "insert_collectives", "overlap_shared_expert", "simulate_ranks",
    ]  # fmt: skip
    assert reports[-1].proof.sites == 1 and 0 < reports[-1].proof.worst < reports[-1].proof.bound
    assert reports[-1].notes["ranks"].startswith("4, worst ")


def test_a_wrong_piece_is_found() -> None:
    graph_module, parallel = lowered("mixtral"), Parallel(ep=2, dp=2)
    whole = copy_graph(graph_module)
    parallelize(graph_module, parallel, PAGE_SIZE, whole=None)
    name = graph_module.meta["expert_layers"][1].weights[1]
    swapped = whole_weights(graph_module)[name][torch.tensor([1, 0, 2, 3])]
    whole_weights(graph_module)[name] = swapped
    with pytest.raises(PassError, match=r"logits of 2 ranks .* differ from those of the whole graph by"):
        prove_parallel(whole, graph_module, parallel, PAGE_SIZE)
