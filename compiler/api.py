"""`octavo.compile`: the straight line from a model to an artifact."""

import copy
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.compiler.artifact import Artifact, check_replaceable
from octavo.compiler.build import LOWERED_GRAPH, Built, build, pack
from octavo.compiler.capture import Captured, capture
from octavo.compiler.compiled import Compiled
from octavo.compiler.dump import print_graph
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.errors import ArtifactError, OptionError
from octavo.compiler.options import CompileOptions, DType, Verify
from octavo.compiler.pipeline import (
    PIPELINE,
    Lowered,
    Settings,
    Step,
    dump_directory,
    lower,
    settings_of,
    summary,
)
from octavo.compiler.progress import progress_bars
from octavo.compiler.target import Target, load_target
from octavo.compiler.version import VERSION
from octavo.compiler.whole_model import check_whole_model

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compile(
    model: nn.Module, target: str = "cpu", *, output: Path | str | None = None, tokenizer: Any = None,
    dtype: DType | None = None, page_size: int | None = None, max_model_len: int | None = None,
    max_batch_tokens: int = 2048, verify: Verify = "full", dump: Path | str | None = None,
    progress: bool | None = None, pipeline: Sequence[Step] = PIPELINE,
) -> Compiled:  # fmt: skip
    """Compile a causal language model for a target and return the artifact, opened.

    model      any nn.Module from token ids (1, T) to logits (1, T, vocab); Hugging Face models as they are
    target     "cpu", "b200", ...: a file of compiler/targets
    output     directory of the artifact; None keeps it in a temporary one until `save`
    tokenizer  a Hugging Face tokenizer to pack with it, so that prompts may be text
    progress   show bars on standard error; None: when that is a terminal
    The other options are described in CompileOptions. The model itself is not changed.
    Raises OptionError, CaptureError, PassError, IllegalGraphError or CodegenError; each names the place.
    """
    chosen = load_target(target)
    options = CompileOptions(
        target=target,
        dtype=dtype or (None if chosen.family == "cpp" else "bf16"),
        page_size=page_size,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        verify=verify,
        dump=None if dump is None else Path(dump),
    )
    _check(options)
    if output is not None:
        check_replaceable(output)  # now, not after a minute of work
    tokenizer_files = _tokenizer_files(tokenizer)
    with progress_bars(progress) as bars:
        source = with_dtype(model, options.dtype)
        bars("capture")("torch.export", 0, 1)
        captured = capture(source)
        settings = settings_of(captured, options, chosen.page_size)
        dumps = DumpWriter(dump_directory(options, os.environ.get("OCTAVO_DUMP")))
        dumps.write_capture(captured.graph_module)
        lowered = lower(captured, options, settings, pipeline, bars("passes"), dumps)
        built = build(lowered.graph_module, chosen, settings.page_size, bars("kernels"))
        bars("pack")("weights and hashes", 0, 1)
        compiled = _pack(output, captured, lowered, built, options, settings, chosen, dumps, tokenizer_files)
        if built.missing:
            warnings.warn(
                f"{built.missing}; text is generated with the eager references, slowly", stacklevel=2
            )
        if options.verify == "full" and chosen.family == "cpp":
            bars("verify")("logits of the whole model", 0, 1)
            try:
                check_whole_model(source, compiled.artifact, compiled.runner(num_pages=64))
            except BaseException:
                shutil.rmtree(compiled.path)  # nobody shall find what was not proven
                raise
    compiled.seconds = dict(bars.seconds)
    return compiled


def _check(options: CompileOptions) -> None:
    for name in ("page_size", "max_model_len", "max_batch_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"{name}: expected 1 or more, got {value}")
    if options.page_size is not None and options.page_size & (options.page_size - 1):
        raise OptionError(f"page_size: expected a power of two, got {options.page_size}")
    if options.verify not in ("off", "sites", "full"):
        raise OptionError(f"verify: expected off, sites or full, got {options.verify!r}")
    if options.dtype not in (None, "fp32", "bf16"):
        raise OptionError(f"dtype: expected fp32 or bf16, got {options.dtype!r}")


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
    output: Path | str | None, captured: Captured, lowered: Lowered, built: Built, options: CompileOptions,
    settings: Settings, target: Target, dumps: DumpWriter, tokenizer_files: Mapping[str, bytes],
) -> Compiled:  # fmt: skip
    temporary = tempfile.TemporaryDirectory(prefix="octavo-") if output is None else None
    path = Path(temporary.name) / "artifact" if temporary is not None else Path(str(output))
    logits = built.program.of_kind("output")[0]
    model = {
        **captured.model_info, "vocab_size": logits.shape[-1], "num_layers": lowered.num_layers,
        "max_model_len": settings.max_model_len, "max_batch_tokens": options.max_batch_tokens,
    }  # fmt: skip
    manifest = {
        "octavo_version": VERSION, "target": target.name, "model": model,
        "options": {**asdict(options), "dump": None, "page_size": settings.page_size},
        "provenance": {"capture_route": captured.route, "torch": torch.__version__},
    }  # fmt: skip
    report = {"passes": summary([*lowered.reports, built.plan]), "kernels": built.kernels, "memory": built.plan.notes,
              "selections": built.selections, "proof_s": lowered.proof_s}  # fmt: skip
    texts = {
        **dumps.texts,
        LOWERED_GRAPH.removeprefix("graph/"): print_graph(lowered.graph_module, "lowered"),
    }
    dumps.write_summary(
        [f"workspace {built.plan.notes['peak']} bytes per token", f"{len(built.kernels)} kernels"]
    )
    written = pack(path, built, lowered.graph_module, manifest, report, texts, tokenizer_files)
    return Compiled(Artifact.open(written), temporary)


def _tokenizer_files(tokenizer: Any) -> Mapping[str, bytes]:
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
