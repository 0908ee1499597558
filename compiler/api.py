"""`octavo.compile`: the straight line from a model to an artifact."""

import copy
import json
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from octavo.compiler.artifact import Artifact, check_replaceable
from octavo.compiler.build import LOWERED_GRAPH, Built, add_step_times, build, pack
from octavo.compiler.calibration_data import Calibration, sequences_of
from octavo.compiler.capture import capture
from octavo.compiler.carve_model import CARVE, carve_model
from octavo.compiler.carving import check_carve
from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.checkpoints.quantize_given import REST, quantize_given
from octavo.compiler.checkpoints.sources import Sources
from octavo.compiler.compiled import Compiled
from octavo.compiler.device_target import resolve_target
from octavo.compiler.drafts.head import draft_facts, target_ids_file
from octavo.compiler.dump import print_graph
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.errors import ArtifactError, OctavoError, OptionError
from octavo.compiler.graph_model import GraphModel, copy_graph
from octavo.compiler.meta_model import has_values
from octavo.compiler.options import (
    ONE_RANK,
    CarveConfig,
    CompileOptions,
    DType,
    Mode,
    Parallel,
    QuantConfig,
    Verify,
)
from octavo.compiler.parallelize import check_parallel, parallelize
from octavo.compiler.pipeline import (
    PIPELINE,
    Lowered,
    Settings,
    Step,
    dump_directory,
    lower,
    settings_of,
)
from octavo.compiler.precision import PrecisionPlan
from octavo.compiler.progress import Bars, progress_bars
from octavo.compiler.quant_options import quant_config
from octavo.compiler.quantize_model import quantize_model, quantize_on
from octavo.compiler.quantizing import BEFORE
from octavo.compiler.step_rows import summary
from octavo.compiler.target import Target
from octavo.compiler.target_formats import check_target, layout_of
from octavo.compiler.verify_quantized import prove_quantized
from octavo.compiler.version import VERSION
from octavo.compiler.whole_model import check_quantized_model, check_whole_model

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
MAX_BATCH_TOKENS = 2048
CALIBRATION = "calibration.json"  # of a dump
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compile(
    model: nn.Module, target: str = "cpu", *, output: Path | str | None = None, tokenizer: Any = None,
    dtype: DType | None = None, page_size: int | None = None, max_model_len: int | None = None,
    max_batch_tokens: int = MAX_BATCH_TOKENS, verify: Verify = "full", dump: Path | str | None = None,
    dump_weights: bool = True, progress: bool | None = None, pipeline: Sequence[Step] = PIPELINE,
    quantize: Mode | QuantConfig | Checkpoint | None = None, calibration: Calibration | None = None,
    deterministic: bool = False, parallel: Parallel = ONE_RANK, carve: CarveConfig | None = None,
    features: Sequence[int] | None = None, trees: bool = False,
) -> Compiled:  # fmt: skip
    """Compile a causal language model for a target and return the artifact, opened.

    model      any nn.Module from token ids (1, T) to logits (1, T, vocab); Hugging Face models as they are
    target     "cpu", "b200", ...: a file of compiler/targets; "auto": that of the GPU that is here, or cpu
    output     directory of the artifact; None keeps it in a temporary one, which goes with the artifact
    tokenizer  a Hugging Face tokenizer to pack with it, so that prompts may be text
    dump_weights  write the weights beside the graphs of `dump`, so that `octavo.resume` can go on from any
    progress   show bars on standard error; None: when that is a terminal
    quantize   "nvfp4", "nvfp4_weight_only", "fp8", "auto", "auto_weight_only", or a QuantConfig, which says what
               each means; or the checkpoint of a model of `octavo.load_model`, whose codes and
               scales are then kept as they are
    calibration  text like that which will be served, or its token ids; one or several. None: a text that comes with
               Octavo, for which there must be a tokenizer. Some thousand tokens are enough. Beside a checkpoint only
               what quantisation moves is measured on it
    features   hidden states for draft heads, numbered as in Hugging Face; see CompileOptions
    carve      cut dense gated FFNs into experts, by what calibration shows: another function, unless all are active
    The other options are described in CompileOptions. The model itself is not changed.
    Raises OptionError, CaptureError, PassError, IllegalGraphError or CodegenError; each names the place.
    """
    chosen = resolve_target(target)
    checkpoint = quantize if isinstance(quantize, Checkpoint) else None
    options = CompileOptions(
        target=chosen.name,
        dtype=dtype or (None if chosen.family == "cpp" else "bf16"),
        page_size=page_size,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        verify=verify,
        dump=None if dump is None else Path(dump),
        quantize=REST if isinstance(quantize, Checkpoint) else quant_config(quantize),
        checkpoint=None if checkpoint is None else checkpoint.name,
        deterministic=deterministic,
        parallel=parallel,
        carve=carve,
        features=None if features is None else tuple(features),
        trees=trees,
    )
    check_options(options)
    if checkpoint is not None and carve is not None:
        raise OptionError(f"carve: expected none, as the products of {checkpoint.name} are kept as they are")
    if checkpoint is not None:
        check_formats(checkpoint, chosen)
    elif options.quantize is not None:
        check_target(options.quantize.mode, chosen)
    if output is not None:
        check_replaceable(output)  # now, not after a minute of work
    if not has_values(model):
        raise OptionError(
            "model: its weights have no values (meta device), so no artifact can hold them; load a checkpoint "
            "into it, or use octavo.check(model), which captures, rewrites and proves without weights, and with "
            "parallel=... plans what ranks would hold and send"
        )
    tokenizer_files = {**tokenizer_files_of(tokenizer), **target_ids_file(model)}
    with progress_bars(progress) as bars:
        source = with_dtype(model, options.dtype)
        bars("capture")("torch.export", 0, 1)
        captured = capture(source, options.features)
        settings = settings_of(captured, options, chosen.page_size)
        sequences = sequences_of(options, calibration, tokenizer, settings.max_model_len)
        job = Job(
            chosen, options, settings, captured.model_info, captured.route, sequences=sequences,
            given=None if checkpoint is None else (checkpoint, weights_dtype(model)),
            provenance={"draft": facts} if (facts := draft_facts(model)) else {},
        )  # fmt: skip
        dumps = DumpWriter(dump_directory(options, os.environ.get("OCTAVO_DUMP")), dump_weights, job.facts())
        dumps.write_files({**tokenizer_files, **calibration_file(sequences)})
        lowered = lower(captured, options, settings, pipeline, bars("passes"), dumps)
        compiled = finish(job, lowered, dumps, bars, output, tokenizer_files, source)
    compiled.seconds = dict(bars.seconds)
    return compiled


@dataclass(frozen=True)
class Job:
    """What is compiled and how, beside the graph.

    provenance  of a graph that was dumped before
    sequences   of calibration tokens, where there are some
    plan, steps_done  of a graph that was dumped between the steps that quantise: their plan, and how many were done of
                these and the pipeline's
    given       the checkpoint whose products are kept, and the dtype that its weights were decoded to
    """

    target: Target
    options: CompileOptions
    settings: Settings
    model_info: Mapping[str, Any]
    route: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    sequences: Sequence[Sequence[int]] | None = None
    plan: PrecisionPlan | None = None
    steps_done: int = 0
    given: tuple[Checkpoint, torch.dtype] | None = None

    def facts(self) -> dict[str, Any]:
        """What `summary.json` says of it, from which `octavo.resume` goes on."""
        return {
            "octavo_version": VERSION, "torch": torch.__version__, "target": self.target.name,
            "model": dict(self.model_info), "options": {**asdict(self.options), "dump": None},
            "settings": asdict(self.settings), "capture_route": self.route, **self.provenance,
        }  # fmt: skip


def finish(
    job: Job, lowered: Lowered, dumps: DumpWriter, bars: Bars, output: Path | str | None,
    tokenizer_files: Mapping[str, bytes], reference: nn.Module,
) -> Compiled:  # fmt: skip
    """Lowered graph -> carved and quantised, where asked for -> artifact, opened, and compared with `reference`."""
    job = _carved(job, lowered, bars, dumps)
    job = _quantized(job, lowered, dumps, bars, reference)
    whole = _spread(job, lowered, bars, dumps)
    try:
        given = lowered.graph_module, job.target, job.settings.page_size
        built = build(*given, bars("kernels"), job.options.deterministic, job.options.trees)
        add_step_times(built, job.target)
    except OctavoError as error:
        dumps.fail("kernels", error)
        raise
    bars("pack")("weights and hashes", 0, 1)
    compiled = _pack(output, job, lowered, built, dumps, tokenizer_files)
    if built.missing:
        warnings.warn(f"{built.missing}; text is generated with the eager references, slowly", stacklevel=3)
    if job.options.verify == "full" and job.target.family == "cpp":
        bars("verify")("logits of the whole model", 0, 1)
        try:
            _judge(job, whole, compiled, reference)
        except BaseException as error:
            shutil.rmtree(compiled.path)  # nobody shall find what was not proven
            if isinstance(error, OctavoError):
                dumps.fail("verify", error)
            raise
    return compiled


def _carved(job: Job, lowered: Lowered, bars: Bars, dumps: DumpWriter) -> Job:
    """Cut FFNs into experts in place, if the options say so and it is not done; the job then knows how it was done."""
    config = job.options.carve
    if config is None or job.steps_done > len(PIPELINE):
        return job
    assert job.sequences is not None, "carve comes with calibration tokens"
    given = job.sequences, job.settings.page_size, bars, job.options.verify != "off", dumps
    try:
        reports, lowered.carving = carve_model(lowered.graph_module, config, *given)
    except OctavoError as error:
        if dumps.error is None:
            dumps.fail(CARVE.name, error)
        raise
    lowered.reports += reports
    told = {name: lowered.carving[name] for name in ("config", "calibration")}
    return replace(job, provenance={**job.provenance, "carving": told})


def _quantized(job: Job, lowered: Lowered, dumps: DumpWriter, bars: Bars, model: nn.Module) -> Job:
    """Quantise the graph in place as the options say; the job then knows how it was done."""
    config = job.options.quantize
    if config is None:
        return job
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}
    sources = None if job.steps_done else Sources(lowered.graph_module, shapes)
    layout = layout_of(job.target)
    prove = None if job.options.verify == "off" else prove_quantized
    try:
        rest = (job.sequences, job.settings.page_size, layout, bars, prove, dumps)
        if job.given is not None:
            reports, provenance, lowered.precision = quantize_given(
                lowered.graph_module, job.given[0], job.given[1], *rest
            )
        elif job.plan is None:
            reports, provenance, lowered.precision = quantize_model(lowered.graph_module, config, *rest)
        else:
            done = job.steps_done - BEFORE
            reports, provenance, _ = quantize_on(lowered.graph_module, config, job.plan, done, *rest)
    except OctavoError as error:
        if dumps.error is None:
            dumps.fail("quantize", error)
        raise
    lowered.reports += reports
    if sources is not None:
        provenance["sources"] = sources.as_dict(provenance["plan"])
    return replace(job, provenance={**job.provenance, "quantization": provenance})


def _spread(job: Job, lowered: Lowered, bars: Bars, dumps: DumpWriter) -> GraphModule:
    """Make of the graph, in place, that of every rank. Returns the whole one."""
    parallel = job.options.parallel
    if parallel.world == 1:
        return lowered.graph_module
    whole = copy_graph(lowered.graph_module)
    bars("parallelize")(f"{parallel.world} ranks", 0, 1)
    try:
        lowered.reports += parallelize(
            lowered.graph_module,
            parallel,
            job.settings.page_size,
            None if job.options.verify == "off" else whole,
        )
    except OctavoError as error:
        dumps.fail("parallelize", error)
        raise
    return whole


def _judge(job: Job, whole: GraphModule, compiled: Compiled, reference: nn.Module) -> None:
    """Logits of the artifact: as the model's, or where it was made to compute something else, as those of its graph."""
    runner = compiled.runner(num_pages=64 * len(compiled.artifact.program.page_windows))
    carve = job.options.carve
    # a graph makes its features without being asked
    features = None if isinstance(reference, GraphModel) else job.options.features
    if job.options.quantize is None and (carve is None or carve.is_whole):
        check_whole_model(reference, compiled.artifact, runner, features)
    else:
        given = whole, job.settings.page_size
        moved = (GraphModel(*given, seed) for seed in (1, 2, 3))  # made only where they are asked
        check_quantized_model(reference, GraphModel(*given), compiled.artifact, runner, moved, features)


def calibration_file(sequences: Sequence[Sequence[int]] | None) -> dict[str, bytes]:
    """What `octavo.resume` calibrates with."""
    return {} if sequences is None else {CALIBRATION: json.dumps(sequences).encode()}


def check_options(options: CompileOptions) -> None:
    for name in ("page_size", "max_model_len", "max_batch_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"{name}: expected 1 or more, got {value}")
    if options.page_size is not None and options.page_size & (options.page_size - 1):
        raise OptionError(f"page_size: expected a power of two, got {options.page_size}")
    if options.verify not in ("off", "sites", "full"):
        raise OptionError(f"verify: expected off, sites or full, got {options.verify!r}")
    check_parallel(options.parallel)
    if options.dtype not in (None, "fp32", "bf16"):
        raise OptionError(f"dtype: expected fp32 or bf16, got {options.dtype!r}")
    if options.carve is not None:
        check_carve(options.carve)
    if options.trees and (options.parallel.world > 1 or (options.deterministic and options.target != "cpu")):
        raise OptionError(
            "trees: expected one rank, and on a GPU not deterministic, as a token of a tree meets its keys in another "
            f"order there than alone; got {options.parallel.world} ranks, deterministic={options.deterministic}"
        )


def check_formats(checkpoint: Checkpoint, target: Target) -> None:
    """Raises OptionError for the first module in a format that the target's tensor cores cannot serve."""
    for module, group in checkpoint.groups.items():
        check_target(group.format, target, f"{checkpoint.name}: {module}")


def weights_dtype(model: nn.Module) -> torch.dtype:
    """Of the model's matrices."""
    return next(p.dtype for p in model.parameters() if p.dim() >= 2 and p.is_floating_point())


def with_dtype(model: nn.Module, dtype: str | None) -> nn.Module:
    """The model itself, or a copy with parameters of the dtype. Buffers keep theirs: angles need fp32."""
    wanted = None if dtype is None else DTYPES[dtype]
    if wanted is None or all(p.dtype == wanted for p in model.parameters() if p.is_floating_point()):
        return model
    converted = copy.deepcopy(model)
    for parameter in converted.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(wanted)
    return converted


def _pack(
    output: Path | str | None, job: Job, lowered: Lowered, built: Built, dumps: DumpWriter,
    tokenizer_files: Mapping[str, bytes],
) -> Compiled:  # fmt: skip
    temporary = tempfile.mkdtemp(prefix="octavo-") if output is None else None
    path = Path(temporary) / "artifact" if temporary is not None else Path(str(output))
    model = {
        **job.model_info, "vocab_size": built.program.logits.shape[-1], "num_layers": lowered.num_layers,
        "max_model_len": job.settings.max_model_len, "max_batch_tokens": job.options.max_batch_tokens,
    }  # fmt: skip
    manifest = {
        "octavo_version": VERSION, "target": job.target.name, "model": model,
        "options": {**asdict(job.options), "dump": None, "page_size": job.settings.page_size},
        "provenance": {"capture_route": job.route, "torch": torch.__version__, **job.provenance},
    }  # fmt: skip
    passes = summary([*lowered.reports, built.grouped, built.plan])
    report = {"passes": passes, "kernels": built.kernels, "memory": built.plan.notes,
              "selections": built.selections, "proof_s": lowered.proof_s,
              **({"precision": lowered.precision} if lowered.precision else {}),
              **({"carving": lowered.carving} if lowered.carving else {})}  # fmt: skip
    texts = {
        **dumps.texts,
        LOWERED_GRAPH.removeprefix("graph/"): print_graph(lowered.graph_module, "lowered"),
    }
    dumps.write_summary(
        [f"workspace {built.plan.notes['peak']} bytes per token", f"{len(built.kernels)} kernels"]
    )
    written = pack(path, built, lowered.graph_module, manifest, report, texts, tokenizer_files)
    artifact = Artifact.open(written)
    if temporary is not None:
        weakref.finalize(artifact, shutil.rmtree, temporary, ignore_errors=True)
    return Compiled(artifact)


def tokenizer_files_of(tokenizer: Any) -> Mapping[str, bytes]:
    """The files that a tokenizer saves of itself, under tokenizer/."""
    if tokenizer is None:
        return {}
    if not hasattr(tokenizer, "save_pretrained"):
        raise OptionError(f"tokenizer: expected a Hugging Face tokenizer, got {type(tokenizer).__name__}")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {f"tokenizer/{f.name}": f.read_bytes() for f in sorted(Path(folder).iterdir()) if f.is_file()}
    if "tokenizer/tokenizer.json" not in files:
        raise ArtifactError("tokenizer: it saves no tokenizer.json; use a fast tokenizer (use_fast=True)")
    return files
