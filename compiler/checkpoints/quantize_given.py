"""A lowered model -> one whose products and pages are those of its quantised checkpoint: nothing is calibrated."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.checkpoints.given import GivenWeights
from octavo.compiler.checkpoints.sources import outer_runs
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.nvfp4 import E4M3_MAX
from octavo.compiler.options import QuantConfig
from octavo.compiler.precision import Format, QuantizedWeight
from octavo.compiler.precision_report import PrecisionReport
from octavo.compiler.progress import Bars
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.passes.assign_precision import assign_precision
from octavo.passes.rewrite import recipes
from octavo.passes.rule import PassReport, Prove

# Of what the checkpoint does not quantise: it stays.
REST = QuantConfig("bf16")


def quantize_given(
    graph_module: GraphModule, checkpoint: Checkpoint, dtype: torch.dtype, sequences: Sequence[Sequence[int]] | None,
    page_size: int, layout: str, bars: Bars, prove: Prove | None, dumps: DumpWriter | None = None,
) -> tuple[list[PassReport], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """As quantize_model. Returns what each pass did, what the artifact says of where its formats come from, and
    `precision` of its report, with what the checkpoint's reader noted.

    dtype      that the model's weights were decoded to
    sequences  of tokens on which the logits are compared with the model's of decoded weights; None: they are not
    Raises CheckpointError, which names the tensor.
    """
    given = GivenWeights(checkpoint, dict(recipes(graph_module)), dtype)
    plan = given.plan(graph_module, layout)
    outers: dict[str, list[list[float]]] = {}

    def noted(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        parts = given(name, weight, format)
        outers[name] = outer_runs(parts)
        return parts

    assign_precision(graph_module, REST, None, plan, None, layout)
    precision = PrecisionReport(graph_module, None, plan, noted, sequences, page_size)
    settings = QuantSettings(plan, precision.quantizer, layout, bars("quantize"), REST, None, None, prove)
    reports = quantize(graph_module, settings, dumps=dumps)
    bars("judge")("logits of held-out tokens", 0, 1)
    found = {
        **precision.finish(graph_module), "checkpoint": checkpoint.name, "notes": list(checkpoint.notes)
    }  # fmt: skip
    has_blocks = any(one.format.startswith("nvfp4") for one in plan.products.values())
    provenance = {
        "recipe": checkpoint.scheme.layout, "e4m3_max": E4M3_MAX if has_blocks else None, "config": {},
        "calibration": None, "plan": plan.as_dict(), "from_checkpoint": checkpoint.name, "outer_scales": outers,
    }  # fmt: skip
    return reports, provenance, found
