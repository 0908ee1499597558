"""A lowered model -> one whose dense FFNs are experts: calibrate by layers, rewrite, prove, measure what it costs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.calibration import HELD_OUT_PART, digest_of
from octavo.compiler.carving import Carving, carve
from octavo.compiler.dump import settle
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.errors import OctavoError, OptionError
from octavo.compiler.expert_placement import balancedness
from octavo.compiler.options import CarveConfig
from octavo.compiler.pipeline import PIPELINE, Progress, Step, apply_step
from octavo.compiler.progress import Bars
from octavo.compiler.quality import Distribution, held_out, perplexity
from octavo.compiler.replay import Replacement, Replay, linear
from octavo.compiler.verify import prove_report
from octavo.passes.carve_moe import FFN, carve_moe, find_ffns
from octavo.passes.rewrite import Site
from octavo.passes.rule import PassReport

CARVE = Step(
    carve_moe, "lowered", ("carve", "carvings", "prove")
)  # behind the pipeline, before what quantises
CARVE_TOKENS = 8192  # all in one step: every expert's router is a regression over all of them


@dataclass(frozen=True)
class CarveSettings:
    """What the pass reads beyond the graph."""

    carve: CarveConfig
    carvings: dict[str, Carving]
    prove: Callable[[PassReport, Site], None] | None


def carve_model(
    graph_module: GraphModule, config: CarveConfig, sequences: Sequence[Sequence[int]], page_size: int, bars: Bars,
    is_proven: bool = True, dumps: DumpWriter | None = None,
) -> tuple[list[PassReport], dict[str, Any]]:  # fmt: skip
    """Carve in place. Returns what the pass did, and what is known of it: experts and loads of every layer, and how
    far the next token's distribution moved on calibration tokens that were held out.

    Raises OptionError where nothing can be carved, PassError for a form that is not what it claims to be.
    """
    pieces = held_out(sequences)
    dense = Distribution(Replay(graph_module, pieces, page_size).reference())
    carvings = carvings_of(graph_module, config, kept(sequences), page_size, bars("carve"))
    settings = CarveSettings(config, carvings, prove if is_proven else None)
    try:
        reports = apply_step(CARVE, graph_module, settings)
    except OctavoError as error:
        if dumps is not None:
            dumps.write_failure(len(PIPELINE), CARVE.name, graph_module, error)
        raise
    settle(graph_module)
    bars("judge")("logits of held-out tokens", 0, 1)
    carved = Replay(graph_module, pieces, page_size).reference()
    layers = [_row(name, one) for name, one in carvings.items()]
    both = {"dense": dense.logs, "carved": carved.log_softmax(-1)}
    found = {
        "config": asdict(config), "calibration": {"tokens": sum(map(len, sequences)), "sha256": digest_of(sequences)},
        "quality": asdict(dense.compare(carved)), 
        "perplexity": {name: perplexity(logs, pieces) for name, logs in both.items()}, "layers": layers,
    }  # fmt: skip
    reports[0].notes |= _notes(config, found)
    if dumps is not None:
        dumps.write(len(PIPELINE) + 1, reports[0], graph_module, CARVE.stage)
    return reports[:1], found


def prove(report: PassReport, site: Site) -> None:
    """Prove one site, and count it in the report."""
    one = PassReport(report.name, report.exactness, [site])
    prove_report(one, {})
    proof = report.proof
    if one.proof.worst * proof.bound >= proof.worst * one.proof.bound:
        proof.worst, proof.bound = one.proof.worst, one.proof.bound
    proof.sites += 1


def kept(sequences: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Up to CARVE_TOKENS of those that are not held out, evenly."""
    total = sum(map(len, sequences))
    left = total - total // HELD_OUT_PART
    found: list[Sequence[int]] = []
    for sequence in sequences:
        found.append(sequence[:left])
        left -= len(found[-1])
    return [s for s in found[:: -(-total // CARVE_TOKENS)] if s]


def carvings_of(
    graph_module: GraphModule, config: CarveConfig, sequences: Sequence[Sequence[int]], page_size: int,
    progress: Progress,
) -> dict[str, Carving]:  # fmt: skip
    """By the name of the down projection's weight. Each layer sees what the carved layers before it make."""
    ffns = find_ffns(graph_module, config)
    if not ffns:
        report = PassReport("carve_moe")
        find_ffns(graph_module, config, report)
        reasons = [one.reason for one in report.rejected[:1]] or [
            "there is no product of gate and up, activated"
        ]
        raise OptionError(f"carve: expected a dense gated FFN in the model, got none: {reasons[0]}")
    found: dict[str, Carving] = {}
    replay = Replay(graph_module, sequences, page_size)
    replaced: dict[Any, Replacement] = {replay.output: lambda *given: given[0].new_zeros(1, 1, 1)}
    for ffn in ffns:
        layer = _Layer(ffn, config, found, progress, len(ffns))
        replaced |= {ffn.gate_up: layer.read, ffn.down: layer.carve}
    replay.again(None, replaced)
    return found


class _Layer:
    """Stands in for the products of one FFN while the calibration tokens pass."""

    def __init__(
        self, ffn: FFN, config: CarveConfig, found: dict[str, Carving], progress: Progress, total: int
    ) -> None:
        self.name, self.config, self.found = ffn.name, config, found
        self.progress, self.total = progress, total
        self.x = torch.empty(0)

    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        self.x = x.flatten(0, -2)
        return linear(x, weight)

    def carve(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """What the carved FFN makes: its unselected neurons are zero."""
        self.progress(self.name, len(self.found), self.total)
        carving = self.found[self.name] = carve(self.x, hidden.flatten(0, -2), weight, self.config)
        return linear(hidden * carving.selected(self.x, self.config.top_k), weight)


def _row(name: str, carving: Carving) -> dict[str, Any]:
    """widths: of the shared neurons, and of an expert; loads: tokens that chose each; balanced: with the moved bias."""
    return {
        "weight": name, "widths": [len(carving.shared), carving.routed.shape[1]],
        "loads": carving.loads.tolist(), "balanced": carving.balanced.tolist(),
    }  # fmt: skip


def _notes(config: CarveConfig, found: dict[str, Any]) -> dict[str, Any]:
    """For the table of passes."""
    before, after = (
        sum(balancedness(row[name]) for row in found["layers"]) / len(found["layers"])
        for name in ("loads", "balanced")
    )
    quality, both = found["quality"], found["perplexity"]
    return {
        "active": f"{config.num_shared} shared + {config.top_k} of {config.num_routed} experts",
        "kl": f"{quality['kl']:.2g}", "top1": f"{quality['top1']:.1%}",
        "perplexity": f"{both['dense']:.3g} -> {both['carved']:.3g}",
        "balancedness": f"{before:.2f} -> {after:.2f}",
    }  # fmt: skip
