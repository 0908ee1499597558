"""The tiny Llama compiled with pages in a chosen format, their multipliers from its own keys."""

from functools import cache

import torch
from models import LONGEST, tiny
from pages import LARGEST
from stages import before, logits, tokens

from octavo.compiler.api import Job, finish
from octavo.compiler.artifact import Artifact
from octavo.compiler.capture import capture
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.options import CompileOptions, PageFormat
from octavo.compiler.pipeline import Settings, Step, apply_step, lower
from octavo.compiler.precision import PagePrecision, PrecisionPlan
from octavo.compiler.progress import progress_bars
from octavo.compiler.quantizing import QuantSettings
from octavo.compiler.target import load_target
from octavo.passes.quantize_kv import quantize_kv


@cache
def multipliers(format: PageFormat) -> PrecisionPlan:
    """Of every layer: what carries the largest key and value of one text, with room for others."""
    pages: dict[str, torch.Tensor] = {}
    logits(before(""), tokens(40), pages)
    values = {
        name: 1.25 * float(rows.nan_to_num().abs().max()) / LARGEST[format] for name, rows in pages.items()
    }
    layers = range(len(values) // 2)
    return PrecisionPlan(
        pages={i: PagePrecision(format, values[f"k_cache_{i}"], values[f"v_cache_{i}"]) for i in layers}
    )


@cache
def paged_artifact(
    format: PageFormat, target: str = "cpu", dtype: torch.dtype = torch.float32, page_size: int = 4
) -> Artifact:
    """ "bf16" leaves pages in the model's dtype."""
    model = tiny("llama", dtype)
    options, settings = CompileOptions(verify="off"), Settings(page_size, LONGEST)
    captured = capture(model)
    lowered = lower(captured, options, settings)
    if format != "bf16":
        plan = multipliers(format)
        step = Step(quantize_kv, "quantized", ("plan",))
        given = QuantSettings(plan, None, "linear")  # type: ignore[arg-type]
        lowered.reports += apply_step(step, lowered.graph_module, given)
    job = Job(load_target(target), options, settings, captured.model_info, captured.route)
    with progress_bars(False) as bars:
        return finish(job, lowered, DumpWriter(None, False, {}), bars, None, {}, model).artifact
