"""The passes that quantise, in order, behind the pipeline: on the whole graph of kernels, when every layer is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule

from octavo.compiler.dump import settle
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.errors import OctavoError
from octavo.compiler.observed import Observed
from octavo.compiler.options import QuantConfig
from octavo.compiler.pipeline import PIPELINE, Progress, Step, apply_step
from octavo.compiler.precision import PrecisionPlan, WeightQuantizer, plan_to_json
from octavo.compiler.verify import Evidence, prove_report
from octavo.compiler.verify_quantized import prove_quantized
from octavo.passes.assign_precision import Choice, assign_precision
from octavo.passes.balance_channels import Balance
from octavo.passes.fuse_act_quantize import fuse_act_quantize
from octavo.passes.fuse_norm_quantize import fuse_norm_quantize
from octavo.passes.quantize_kv import quantize_kv
from octavo.passes.quantize_linear import quantize_linear
from octavo.passes.quantize_moe import quantize_moe
from octavo.passes.rule import PassReport, Prove


@dataclass(frozen=True)
class QuantSettings:
    """What the passes read beyond the graph.

    plan      assign_precision fills it by `config` where it says nothing
    layout    of block scales, as the target's kernels take them
    observed  what calibration saw, where config asks for static scales or quantised pages
    choices   modes "auto": the format of every product that may be quantised
    prove     proves sites that quantise; None: nothing is proven
    balance   how weights are scaled before they are quantised
    """

    plan: PrecisionPlan
    quantizer: WeightQuantizer
    layout: str
    progress: Progress | None = None
    config: QuantConfig = field(default_factory=lambda: QuantConfig("bf16"))
    observed: Observed | None = None
    choices: Mapping[str, Choice] | None = None
    prove: Prove | None = prove_quantized
    balance: Balance = field(default_factory=Balance)


BEFORE = len(PIPELINE) + 1  # steps in front of these: the pipeline's, and the one that carves
PRECISION = "precision.json"  # beside the graphs of a dump: the plan
QUANTIZE: tuple[Step, ...] = (
    Step(assign_precision, "quantized", ("config", "observed", "plan", "choices", "layout")),
    # Fused products (qkv, gate and up) are one by now, so they share the scales of their weight.
    Step(quantize_linear, "quantized", ("plan", "quantizer", "layout", "progress", "prove", "balance")),
    Step(quantize_moe, "quantized", ("plan", "quantizer", "layout", "progress", "prove")),
    Step(quantize_kv, "quantized", ("plan",)),
    # Last, when it is settled who reads what as codes.
    Step(fuse_norm_quantize, "quantized"),
    Step(fuse_act_quantize, "quantized"),
)


def quantize(
    graph_module: GraphModule, settings: QuantSettings, steps: Sequence[Step] = QUANTIZE,
    dumps: DumpWriter | None = None, start: int = 0,
) -> list[PassReport]:  # fmt: skip
    """Run the steps behind the first `start` on a lowered graph, in place; returns what each did.

    dumps  gets the graph after each step that changed it, numbered behind the pipeline's, and PRECISION
    Raises as `lower` does.
    """
    done: list[PassReport] = []
    proven: dict[str, Evidence] = {}
    for index, step in enumerate(steps[start:], BEFORE + start):
        context = f" (after: {', '.join(r.name for r in done)})" if done else ""
        try:
            reports = apply_step(step, graph_module, settings, (), done)
            if settings.prove is not None:
                _prove(reports, settings.prove, proven, context)
        except OctavoError as error:
            if dumps is not None:
                dumps.write_failure(index, step.name, graph_module, error)
            raise
        done.append(reports[0])
        settle(graph_module)
        if dumps is not None:
            dumps.write(index + 1, reports[0], graph_module, step.stage)
            dumps.write_files({PRECISION: plan_to_json(settings.plan)})
    return done


def _prove(reports: Sequence[PassReport], prove: Prove, proven: dict[str, Evidence], context: str) -> None:
    """What passes with weights have not proven while they made it: pages, and fusions, which keep every bit."""
    for report in reports:
        if report.exactness != "quantizes":
            prove_report(report, proven, context)
        elif not report.proof.sites:
            first = {site.key: site for site in reversed(report.sites)}  # of each kind
            for site in first.values():
                prove(report, site, ())
