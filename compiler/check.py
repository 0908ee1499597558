"""`octavo.check`: would this model compile? Capture, passes and proofs; nothing is built and no weights are needed."""

from typing import Any

from torch import nn

from octavo.compiler.api import with_dtype
from octavo.compiler.capture import capture
from octavo.compiler.device_target import resolve_target
from octavo.compiler.options import CompileOptions, DType
from octavo.compiler.pipeline import lower, settings_of
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import Report
from octavo.compiler.step_rows import summary


def check(
    model: nn.Module, target: str = "cpu", *, dtype: DType | None = None, page_size: int | None = None,
    max_model_len: int | None = None, progress: bool | None = None,
) -> Report:  # fmt: skip
    """Every step of `octavo.compile` up to kernels, with its proofs. Weights may be on the meta device.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)   # any size, in no memory
    print(octavo.check(model))

    Raises what `octavo.compile` would: CaptureError, PassError or IllegalGraphError, naming node, module and line.
    Options are described in CompileOptions.
    """
    chosen = resolve_target(target)
    options = CompileOptions(target=target, dtype=dtype, page_size=page_size, max_model_len=max_model_len)
    with progress_bars(progress) as bars:
        bars("capture")("torch.export", 0, 1)
        captured = capture(with_dtype(model, dtype))
        settings = settings_of(captured, options, chosen.page_size)
        lowered = lower(captured, options, settings, progress=bars("passes"))
    data: dict[str, Any] = {
        "passes": summary(lowered.reports), "kernels": [], "proof_s": lowered.proof_s,
        "num_layers": lowered.num_layers, "seconds": dict(bars.seconds),
    }  # fmt: skip
    return Report(data)
