"""`octavo.check`: would this model compile? Capture, passes and proofs; nothing is built and no weights are needed."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from octavo.compiler.api import check_options, with_dtype
from octavo.compiler.capture import capture
from octavo.compiler.device_target import resolve_target
from octavo.compiler.meta_quantize import quantize_meta
from octavo.compiler.options import CompileOptions, DType, Mode, Parallel, QuantConfig
from octavo.compiler.pipeline import lower, settings_of
from octavo.compiler.progress import progress_bars
from octavo.compiler.quant_options import quant_config
from octavo.compiler.rank_plan import check_planned, plan_ranks
from octavo.compiler.report import Report, mesh_text
from octavo.compiler.step_rows import summary
from octavo.compiler.target_formats import check_target, layout_of


def check(
    model: nn.Module, target: str = "cpu", *, dtype: DType | None = None, page_size: int | None = None,
    max_model_len: int | None = None, max_batch_tokens: int = 2048, quantize: Mode | QuantConfig | None = None,
    parallel: Parallel | Sequence[Parallel] = (), progress: bool | None = None,
) -> Report:  # fmt: skip
    """Every step of `octavo.compile` up to kernels, with its proofs. Weights may be on the meta device.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)   # any size, in no memory
    print(octavo.check(model))
    print(octavo.check(model, "b200", quantize="nvfp4", parallel=[Parallel(ep=n, dp=n) for n in (8, 32, 72)]))

    parallel  plan what a rank of each mesh would hold and send, and whether that fits the target's memory: see
              compiler/rank_plan.py, and "plans" in the report's data
    quantize  of the plans; nothing is proven of it, as there are no values to quantise. It does not change the checks

    Raises what `octavo.compile` would: CaptureError, PassError or IllegalGraphError, naming node, module and line.
    Other options are described in CompileOptions.
    """
    chosen = resolve_target(target)
    options = CompileOptions(
        target=chosen.name, dtype=dtype or (None if chosen.family == "cpp" else "bf16"), page_size=page_size,
        max_model_len=max_model_len, max_batch_tokens=max_batch_tokens, quantize=quant_config(quantize),
    )  # fmt: skip
    parallels = (parallel,) if isinstance(parallel, Parallel) else tuple(parallel)
    for one in parallels:
        check_options(replace(options, parallel=one))
    if options.quantize is not None:
        check_target(options.quantize.mode, chosen)
        check_planned(options.quantize)
    with progress_bars(progress) as bars:
        bars("capture")("torch.export", 0, 1)
        captured = capture(with_dtype(model, options.dtype))
        settings = settings_of(captured, options, chosen.page_size)
        lowered = lower(captured, options, settings, progress=bars("passes"))
        if options.quantize is not None and parallels:
            bars("quantize")("shapes of parts", 0, 1)
            quantize_meta(lowered.graph_module, options.quantize, layout_of(chosen))
        plans = []
        for index, one in enumerate(parallels):
            bars("plan")(mesh_text(asdict(one)), index, len(parallels))
            given = (chosen, settings.page_size, settings.max_model_len, max_batch_tokens)
            plans.append(plan_ranks(lowered.graph_module, one, *given).as_row)
    data: dict[str, Any] = {
        "passes": summary(lowered.reports), "kernels": [], "proof_s": lowered.proof_s,
        "num_layers": lowered.num_layers, "seconds": dict(bars.seconds), "plans": plans,
    }  # fmt: skip
    return Report(data)
