"""A lowered model -> one with quantised products and pages: calibrate, choose formats, run the passes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.balance_model import balance_model
from octavo.compiler.calibration import MOE, calibrate
from octavo.compiler.checkpoints.sources import outer_runs
from octavo.compiler.choose_formats import choose_formats
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.nvfp4 import RECIPE
from octavo.compiler.observed import Observed
from octavo.compiler.options import QuantConfig
from octavo.compiler.precision import Format, PrecisionPlan, QuantizedWeight, WeightQuantizer
from octavo.compiler.precision_report import PrecisionReport, Remembering
from octavo.compiler.progress import Bars
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.compiler.weight_quantizer import MethodQuantizer
from octavo.passes.assign_precision import assign_precision
from octavo.passes.balance_channels import Balance
from octavo.passes.rule import PassReport, Prove


def quantize_model(
    graph_module: GraphModule, config: QuantConfig, sequences: Sequence[Sequence[int]] | None, page_size: int,
    layout: str, bars: Bars, prove: Prove | None, dumps: DumpWriter | None = None,
) -> tuple[list[PassReport], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Quantise in place. Returns what each pass did, what the artifact says of how it was done, and `precision` of its
    report: the format of every product, what is known of it, and how far the logits of held-out tokens moved.

    sequences  of calibration tokens; None where there are none and none are needed
    layout     of block scales, "linear" or "swizzled_128x4"
    prove      None: nothing is proven
    """
    observed, report, balance = None, None, Balance()
    if sequences is not None:
        report, balance = balance_model(graph_module, config, sequences, page_size, layout, bars, prove)
        moments = config.weights == "gptq"
        observed = calibrate(graph_module, sequences, page_size, moments, bars("calibrate"), balance)
    counted = _Counted(MethodQuantizer(config.weights, observed))
    quantizer: WeightQuantizer = counted
    plan, chosen = PrecisionPlan(), None
    if config.is_auto:
        assert observed is not None and sequences is not None
        quantizer = Remembering(counted)
        chosen = choose_formats(
            graph_module, config, observed, quantizer, sequences, page_size, bars("measure")
        )
    choices = None if chosen is None else chosen.choices
    assign_precision(graph_module, config, observed, plan, choices, layout)
    rows = None if chosen is None else chosen.rows
    precision = PrecisionReport(graph_module, observed, plan, quantizer, sequences, page_size, rows, balance)
    settings = QuantSettings(
        plan, precision.quantizer, layout, bars("quantize"), config, observed, choices, prove, balance
    )
    reports = [*([report] if report else []), *quantize(graph_module, settings, dumps=dumps)]
    bars("judge")("logits of held-out tokens", 0, 1)
    found = precision.finish(graph_module, config.kl)
    return reports, _provenance(config, observed, plan, counted), found


def quantize_on(
    graph_module: GraphModule, config: QuantConfig, plan: PrecisionPlan, done: int,
    sequences: Sequence[Sequence[int]] | None, page_size: int, layout: str, bars: Bars, prove: Prove | None,
    dumps: DumpWriter | None,
) -> tuple[list[PassReport], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """As quantize_model, for a graph that was dumped behind the first `done` steps, by the plan of then.

    Experts that are still plain are calibrated again; what linears read as codes is not looked at any more.
    """
    observed = None
    if sequences is not None and graph_module.graph.find_nodes(op="call_function", target=MOE):
        observed = calibrate(graph_module, sequences, page_size, config.weights == "gptq", bars("calibrate"))
    counted = _Counted(MethodQuantizer(config.weights, observed))
    settings = QuantSettings(plan, counted, layout, bars("quantize"), config, observed, None, prove)
    reports = quantize(graph_module, settings, dumps=dumps, start=done)
    return reports, _provenance(config, observed, plan, counted), {}


class _Counted:
    """A WeightQuantizer that notes with which bounds of the block scales weights were made, and their outer scales."""

    def __init__(self, quantizer: Callable[[str, Tensor, Format], QuantizedWeight]) -> None:
        self.quantizer = quantizer
        self.bounds: set[float] = set()
        self.outers: dict[str, list[list[float]]] = {}

    def __call__(self, name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        parts = self.quantizer(name, weight, format)
        if parts.scales is not None:
            self.bounds.add(parts.e4m3_max)
            self.outers[name] = outer_runs(parts)
        return parts


def _provenance(
    config: QuantConfig, observed: Observed | None, plan: PrecisionPlan, quantizer: _Counted
) -> dict[str, Any]:
    """recipe, e4m3_max: of NVFP4 weights, the largest block scale that outer scales were made for.

    outer_scales: those of NVFP4 weights, [rows, scale] one after another; kernels have them in alpha.
    """
    calibration = None if observed is None else {"tokens": observed.tokens, "sha256": observed.digest}
    return {
        "recipe": RECIPE, "e4m3_max": max(quantizer.bounds, default=None), "config": asdict(config),
        "calibration": calibration, "plan": plan.as_dict(), "outer_scales": quantizer.outers,
    }  # fmt: skip
