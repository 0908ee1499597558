"""`octavo compile`: a model by name, or a dumped graph, -> an artifact, with its tables and times."""

import re
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from octavo.compiler import api
from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.compiled import Compiled
from octavo.compiler.device_target import resolve_target
from octavo.compiler.drafts.layer_skip import without_layers
from octavo.compiler.dump_summary import read_summary
from octavo.compiler.errors import OptionError
from octavo.compiler.models import LoadedModel, load_head, load_model
from octavo.compiler.options import ONE_RANK, CarveConfig, DType, Parallel, QuantConfig, Verify
from octavo.compiler.progress import progress_bars
from octavo.compiler.quant_options import quant_config
from octavo.compiler.report import seconds_line, size_text
from octavo.compiler.resume import resume


@dataclass(frozen=True)
class Choices:
    """What the user chose; the names are those of `octavo.compile`. output None: ./NAME-TARGET.octavo.

    model, resume_from  one of them is given
    draft_of            the target of the head that `model` then names
    skip_layers         numbers of the layers that are left out
    """

    model: str | None
    output: Path | None
    target: str | None
    dtype: DType | None
    page_size: int | None
    max_model_len: int | None
    max_batch_tokens: int | None
    verify: Verify
    dump: Path | None
    dump_weights: bool
    resume_from: Path | None
    quantize: QuantConfig | None = None
    calibration: Path | None = None
    deterministic: bool | None = None
    carve: CarveConfig | None = None
    parallel: Parallel | None = None
    trees: bool | None = None
    features: tuple[int, ...] | None = None
    draft_of: str | None = None
    skip_layers: tuple[int, ...] | None = None


def run(choices: Choices) -> None:
    """Compile; tables and times go to standard error, the artifact's path to standard output."""
    if choices.target is not None:
        # a name that is wrong is said before the model is loaded
        choices = replace(choices, target=resolve_target(choices.target).name)
    output = _resume(choices) if choices.resume_from is not None else _compile(choices, str(choices.model))
    print(output)


def _compile(choices: Choices, model: str) -> Path:
    target = choices.target or "cpu"
    output = choices.output or default_output(model, target)
    text = None if choices.calibration is None else text_of(choices.calibration)
    quant_config(choices.quantize)  # as the target's name: before the model is loaded
    loaded, load_s = _load(choices, model)
    compiled = api.compile(
        loaded.model,
        target,
        output=output,
        tokenizer=loaded.tokenizer,
        dtype=choices.dtype,
        page_size=choices.page_size,
        max_model_len=choices.max_model_len,
        max_batch_tokens=api.MAX_BATCH_TOKENS
        if choices.max_batch_tokens is None
        else choices.max_batch_tokens,
        verify=choices.verify,
        dump=choices.dump,
        dump_weights=choices.dump_weights,
        quantize=_formats(choices.quantize, loaded.checkpoint),
        calibration=text,
        deterministic=bool(choices.deterministic),
        carve=choices.carve,
        parallel=choices.parallel or ONE_RANK,
        trees=bool(choices.trees),
        features=choices.features,
    )
    show(compiled, {"load": load_s, **compiled.seconds}, choices.dump)
    return output


def _load(choices: Choices, name: str) -> tuple[LoadedModel, float]:
    """The model, the model without some layers, or a draft head. A head is trained for the values that it reads and
    is small, so it is compiled as it is."""
    if choices.draft_of is None:
        loaded, seconds = load(name)
        if choices.skip_layers is None:
            return loaded, seconds
        if loaded.checkpoint is not None:
            raise OptionError(f"skip_layers: expected a model of plain weights, got the quantised {name}")
        return replace(loaded, model=without_layers(loaded.model, choices.skip_layers)), seconds
    for other in ("quantize", "calibration", "carve", "parallel", "features", "skip_layers"):
        if getattr(choices, other) is not None:
            raise OptionError(f"{other}: expected none with --draft-of, as a head is compiled as it is")
    target, seconds = load(choices.draft_of)
    return LoadedModel(load_head(name, target.model)), seconds


def _formats(config: QuantConfig | None, checkpoint: Checkpoint | None) -> QuantConfig | Checkpoint | None:
    """What is quantised: as the options say, or as the model's files have it."""
    if checkpoint is None or config is None:
        return config if checkpoint is None else checkpoint
    if config.mode == "bf16":
        raise OptionError(
            f"kv: expected none, as {checkpoint.name} holds quantised weights, and products and pages are as its "
            "configuration says; --quantize quantises its decoded values again"
        )
    warnings.warn(f"{checkpoint.name}: its quantised weights are decoded and quantised again", stacklevel=2)
    return config


def _resume(choices: Choices) -> Path:
    path = Path(str(choices.resume_from))
    of_model = (
        "dtype", "page_size", "max_model_len", "quantize", "deterministic", "carve", "parallel", "features", "draft_of",
        "skip_layers",
    )  # fmt: skip
    for name in of_model:
        if getattr(choices, name) is not None:
            raise OptionError(
                f"{name}: expected none with --from, as the graph already has it; compile MODEL again"
            )
    output = choices.output
    if output is None:
        summary = read_summary(path.parent)
        output = default_output(str(summary["model"]["name"]), choices.target or str(summary["target"]))
    compiled = resume(
        path,
        choices.target,
        output=output,
        max_batch_tokens=choices.max_batch_tokens,
        verify=choices.verify,
        dump=choices.dump,
        dump_weights=choices.dump_weights,
    )
    show(compiled, compiled.seconds, choices.dump)
    return output


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"calibration: expected a text file in UTF-8, got {path}: {error}") from None


def load(name: str) -> tuple[LoadedModel, float]:
    """A model by its name, and the seconds that it took."""
    with progress_bars() as bars:
        loaded = load_model(name, bars("load"))
    return loaded, bars.seconds["load"]


def show(compiled: Compiled, seconds: dict[str, float], dump: Path | None) -> None:
    """The tables of a compilation, where its files are, and how long it took."""
    console = Console(stderr=True, highlight=False)
    report = compiled.report()
    console.print(report.pass_table())
    console.print()
    if compiled.artifact.manifest["target"] != "cpu":
        console.print(report.kernel_table())
        console.print()
    files = compiled.artifact.files
    total = sum(entry.num_bytes for entry in files.values())
    lines = {
        "times": seconds_line(seconds),
        "artifact": f"{compiled.path} ({len(files)} files, {size_text(total)})",
    }
    if dump is not None:
        lines["dumps"] = f"{dump} (graphs, diffs, summaries; `octavo view {dump}` shows them)"
    for name, text in lines.items():
        print(f"{name + ':':<10}{text}", file=sys.stderr)


def default_output(model: str, target: str) -> Path:
    """`demo` -> demo-cpu.octavo; the last part of a path without its ending."""
    path = Path(model.rsplit(":", 1)[0] if ".py:" in model else model)
    stem = path.stem if path.suffix in (".gguf", ".py") else path.resolve().name
    return Path(f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', stem) or 'model'}-{target}.octavo")
