"""Lowered graph -> the graph that every rank runs, checked, and proven by running all ranks beside the whole graph.

It comes last, on kernels and quantised weights: a model is captured, proven, calibrated and quantised once, whole, and
its weights stay whole in the artifact, where each rank finds its pieces (program.Shard). So experts move between ranks
by taking other pieces, and a graph for another mesh needs no other weights.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.check_placements import check_placements
from octavo.compiler.errors import OptionError, PassError
from octavo.compiler.fresh_inputs import StepInputs, empty_pages, whole_sequences
from octavo.compiler.graph_model import Moved, copy_graph
from octavo.compiler.legality import QUANTIZED_KERNELS, check, named_arguments, op
from octavo.compiler.mesh import ONE_RANK
from octavo.compiler.ops.collectives import WIRES
from octavo.compiler.options import Parallel
from octavo.compiler.page_groups import page_windows
from octavo.compiler.simulate import simulate
from octavo.compiler.type_rules import check_types
from octavo.passes.insert_collectives import insert_collectives
from octavo.passes.overlap_shared_expert import overlap_shared_expert
from octavo.passes.rule import PassReport, Proof, run_pass
from octavo.passes.shard_experts import shard_experts
from octavo.passes.shard_tensors import shard_tensors
from octavo.passes.sharding import shards

PASSES: tuple[Callable[..., PassReport], ...] = (
    shard_experts, shard_tensors, insert_collectives, overlap_shared_expert,
)  # fmt: skip
LENGTHS = (5, 3, 0)  # tokens that the proof runs, by the coordinate along dp
# Largest difference of logits over the largest logit, where both graphs are run in fp64. Quantised graphs run as they
# are: their room is what one rounding of every product does to them, times ROOM, but no less than the dtype's FLOORS.
BOUND = 1e-9
FLOORS = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
ROOM = 4.0
NO_TOKENS = StepInputs(
    {
        "input_ids": torch.zeros(1, 0, dtype=torch.int64), "positions": torch.zeros(1, 0, dtype=torch.int64),
        "slot_mapping": torch.zeros(0, dtype=torch.int64), "page_table": torch.zeros(0, 1, dtype=torch.int32),
        "seq_lens": torch.zeros(0, dtype=torch.int32), "cu_seqlens_q": torch.zeros(1, dtype=torch.int32),
        "logit_rows": torch.zeros(0, dtype=torch.int64),
    },
    2,
)  # fmt: skip
Convert = Callable[[Tensor], Tensor]


def check_parallel(parallel: Parallel) -> None:
    """Raises OptionError for sizes that make no mesh."""
    for name in ("ep", "tp", "dp"):
        if getattr(parallel, name) < 1:
            raise OptionError(f"parallel: {name}: expected 1 or more, got {getattr(parallel, name)}")
    if parallel.ep > 1 and parallel.ep % (parallel.tp * parallel.dp):
        raise OptionError(
            f"parallel: ep: experts are spread over all ranks, so ep must be a multiple of tp * dp = "
            f"{parallel.tp * parallel.dp}, got {parallel.ep}"
        )
    if parallel.dp > 1 and parallel.ep == 1:
        raise OptionError(
            f"parallel: dp={parallel.dp} without ep: ranks that share no experts share nothing; start {parallel.dp} "
            f"engines of an artifact without dp, or add ep={parallel.tp * parallel.dp}"
        )
    if parallel.redundant_experts < 0 or (parallel.redundant_experts and parallel.ep == 1):
        raise OptionError(
            f"parallel: redundant_experts: expected 0, or more with ep above 1, got {parallel.redundant_experts}"
        )
    if parallel.wire not in WIRES:
        raise OptionError(f"parallel: wire: expected one of {', '.join(WIRES)}, got {parallel.wire!r}")
    if parallel.wire != "model" and parallel.dp == 1:
        raise OptionError(
            f"parallel: wire={parallel.wire!r}: tokens travel to experts only with dp above 1; leave it out"
        )


def parallelize(
    graph_module: GraphModule, parallel: Parallel, page_size: int, whole: GraphModule | None
) -> list[PassReport]:
    """Rewrite a lowered graph, in place, into that of every rank; none where there is only one.

    whole  a copy of the graph: all ranks run in this process, and their logits are compared with those of the copy, in
           fp64 where nothing is quantised. None: not proven, as where weights have no values (meta device)
    Raises OptionError where the model has nothing to spread, IllegalGraphError, and PassError where the logits differ.
    """
    if parallel.world == 1:
        return []
    reports = [run_pass(functools.partial(one, parallel=parallel), graph_module) for one in PASSES]
    if parallel.ep > 1 and not graph_module.meta.get("expert_layers"):
        raise OptionError(
            f"parallel: ep={parallel.ep}: the model has no mixture of experts; use tp, or carve its FFNs (carve=...)"
        )
    if not shards(graph_module):
        reasons = "; ".join(f"{r.where}: {r.reason}" for report in reports for r in report.rejected[:2])
        raise OptionError(
            f"parallel: nothing of the model can be spread with {parallel}: {reasons or 'no match'}"
        )
    graph_module.meta["mesh"] = parallel.mesh
    check(graph_module, "parallel", after="overlap_shared_expert")
    check_types(graph_module, after="overlap_shared_expert")
    check_placements(graph_module, parallel.mesh, after="overlap_shared_expert")
    if whole is not None:
        reports.append(
            run_pass(lambda ranks: prove_parallel(whole, ranks, parallel, page_size), graph_module)
        )
    return reports


def prove_parallel(whole: GraphModule, ranks: GraphModule, parallel: Parallel, page_size: int) -> PassReport:
    """Run both on random tokens. Raises PassError where they differ. What rows lose on the wire is no part of it."""
    report = PassReport("simulate_ranks", "reassociates")
    mesh, plain = parallel.mesh, not any(op(n) in QUANTIZED_KERNELS for n in whole.graph.nodes)
    convert = _wide if plain else _as_it_is
    prompts = [_prompt(whole, mesh.coordinates(rank)["dp"]) for rank in range(mesh.world)]
    rows = torch.tensor(
        [d for d in range(mesh.dp) for _ in range(len(prompts[mesh.rank(d)]))], dtype=torch.int64
    )
    with torch.no_grad():
        given = [_inputs(ranks, prompt, page_size, rows, convert) for prompt in prompts]
        got = [outputs[0] for outputs in simulate(_on_plain_wire(ranks), mesh, given, convert)]
        alone = {d: _alone(whole, prompts[mesh.rank(d)], page_size, convert) for d in range(mesh.dp)}
        bound = BOUND if plain else _unrest(whole, prompts[0], page_size, alone[0])
    worst = 0.0
    for rank, logits in enumerate(got):
        wanted = alone[mesh.coordinates(rank)["dp"]]
        if wanted.numel():
            error = float((logits - wanted).abs().max() / wanted.abs().max())
            worst = max(worst, error) if error == error else math.nan
    if not worst <= bound:
        raise PassError(
            f"simulate_ranks: logits of {mesh.world} ranks ({mesh}) differ from those of the whole graph by "
            f"{worst:.2e} of the largest, bound {bound:.0e}; a value is summed, cut or sent wrongly"
        )
    report.proof = Proof(1, worst, bound)
    report.notes["ranks"] = f"{mesh.world}, worst {worst:.1e} of the largest logit, bound {bound:.0e}"
    return report


def _alone(whole: GraphModule, prompt: list[int], page_size: int, convert: Convert) -> Tensor:
    """Logits of the whole graph on one prompt."""
    none = torch.zeros(0, dtype=torch.int64)
    return simulate(whole, ONE_RANK, [_inputs(whole, prompt, page_size, none, convert)], convert)[0][0]


def _unrest(whole: GraphModule, prompt: list[int], page_size: int, logits: Tensor) -> float:
    """How far logits move where products are off by one rounding, with room: a code that flips moves later ones."""
    none = torch.zeros(0, dtype=torch.int64)
    names = [n.name for n in whole.graph.nodes if n.op == "placeholder"]
    moved = []
    for seed in (1, 2, 3):
        inputs = _inputs(whole, prompt, page_size, none, _as_it_is)
        moved.append(Moved(whole, seed).run(*(inputs[name] for name in names))[0])
    floor = FLOORS[logits.dtype]
    return max(floor, *(ROOM * float((one - logits).abs().max() / logits.abs().max()) for one in moved))


def _prompt(whole: GraphModule, d: int) -> list[int]:
    """Random tokens of the requests of one coordinate along dp; some have none."""
    (ids,) = (n for n in whole.graph.nodes if n.op == "placeholder" and n.name == "input_ids")
    table = next(named_arguments(user)["weight"] for user in ids.users if op(user) == "octavo::embedding")
    generator = torch.Generator().manual_seed(d)
    made: list[int] = torch.randint(
        table.meta["val"].shape[0], (LENGTHS[d % len(LENGTHS)],), generator=generator
    ).tolist()
    return made


def _inputs(
    graph_module: GraphModule, prompt: list[int], page_size: int, row_ranks: Tensor, convert: Convert
) -> dict[str, Tensor]:
    """A step of one sequence from its start, and empty pages."""
    step = whole_sequences([prompt], page_size, page_windows(graph_module.graph)) if prompt else NO_TOKENS
    given = {**step.tensors, "row_ranks": row_ranks}
    inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    return {
        n.name: given[n.name] if n.name in given else convert(empty_pages(n, step.num_pages)) for n in inputs
    }


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _on_plain_wire(graph_module: GraphModule) -> GraphModule:
    """The same graph, in which tokens travel as they are."""
    plain = copy_graph(graph_module)
    for node in plain.graph.nodes:
        if op(node) == "octavo::dispatch":
            node.args = (*node.args[:4], None, node.args[5], "model", node.args[7])
    return plain
