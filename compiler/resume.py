"""`octavo.resume`: go on compiling from a dumped graph, as it was written or as a user has edited it."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from octavo.compiler.api import CALIBRATION, Job, calibration_file, check_options, finish, tokenizer_files_of
from octavo.compiler.artifact import check_replaceable
from octavo.compiler.carve_model import CARVE
from octavo.compiler.compiled import Compiled
from octavo.compiler.device_target import resolve_target
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.dump_load import load_graph
from octavo.compiler.dump_summary import SUMMARY, read_summary
from octavo.compiler.dump_weights import DumpedWeights
from octavo.compiler.errors import IllegalGraphError, OctavoError, OptionError
from octavo.compiler.graph_model import GraphModel
from octavo.compiler.legality import check
from octavo.compiler.options import CarveConfig, CompileOptions, Parallel, QuantConfig, Verify
from octavo.compiler.pipeline import PIPELINE, Settings, Step, dump_directory, lower_from
from octavo.compiler.precision import PrecisionPlan, plan_from_json
from octavo.compiler.progress import progress_bars
from octavo.compiler.quantizing import BEFORE, PRECISION, QUANTIZE
from octavo.compiler.target import Target, load_target
from octavo.compiler.target_formats import check_target
from octavo.compiler.type_rules import check_types

_FILE = re.compile(r"(?P<step>(?P<index>\d\d)_(?P<name>\w+))(?P<note>\.[\w.-]+)?\.py")
CAPTURE = "capture"


def resume(
    path: Path | str, target: str | None = None, *, output: Path | str | None = None, tokenizer: Any = None,
    max_batch_tokens: int | None = None, verify: Verify = "full", dump: Path | str | None = None,
    dump_weights: bool = True, progress: bool | None = None, pipeline: Sequence[Step] = PIPELINE,
) -> Compiled:  # fmt: skip
    """Compile on from a graph of a dump, behind the step that its name says, and return the artifact, opened.

    path       `dump/07_fuse_rms_norm.py`; a copy may be called `07_fuse_rms_norm.mine.py`
    target     None: what the dump was made for; "auto" as in `octavo.compile`
    tokenizer  None: the one that was packed then
    verify     "full" compares the artifact with the logits of the graph in the file, not of the model
    dump       another directory than that of `path`
    Weights come from the dump's weights.safetensors, which must be as it was written; model, dtype, page size
    and lengths from its summary.json. The other options are those of `octavo.compile`.
    Raises IllegalGraphError with file and line for a text that is no graph of its stage, OptionError for a file
    that is none of a dump, and what `octavo.compile` raises.
    """
    source = _Source.of(Path(path), pipeline)
    target = None if target is None else resolve_target(target).name
    job = source.job(target, max_batch_tokens, verify, None if dump is None else Path(dump))
    check_options(job.options)
    directory = dump_directory(job.options, os.environ.get("OCTAVO_DUMP"))
    if directory is not None and directory.resolve() == source.path.parent.resolve():
        raise OptionError(
            f"dump: expected another directory than that of {path}, whose files would be replaced"
        )
    if output is not None:
        check_replaceable(output)
    tokenizer_files = tokenizer_files_of(tokenizer) if tokenizer is not None else source.files("tokenizer")
    tokenizer_files = {**tokenizer_files, **source.files("draft")}
    with progress_bars(progress) as bars:
        bars("load")(source.path.name, 0, 1)
        graph_module = source.load(pipeline)
        reference = GraphModel(graph_module, job.settings.page_size)
        dumps = DumpWriter(directory, dump_weights, job.facts())
        dumps.write_files({**tokenizer_files, **calibration_file(job.sequences)})
        dumps.write_start(source.step, graph_module, f"resumed from {source.path.name}")
        try:
            lowered = lower_from(
                graph_module, source.index, job.options, job.settings, pipeline, bars("passes"), dumps
            )
            compiled = finish(job, lowered, dumps, bars, output, tokenizer_files, reference)
        except OctavoError as error:
            raise type(error)(f"{error}{source.lines_of(str(error))}") from error
    compiled.seconds = dict(bars.seconds)
    return compiled


@dataclass(frozen=True)
class _Source:
    """A dumped graph and what its directory says of it. index: how many steps were done."""

    path: Path
    step: str
    index: int
    text: str
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path, pipeline: Sequence[Step]) -> "_Source":
        found = _FILE.fullmatch(path.name)
        if found is None or not path.is_file():
            got = "no such file" if found else "another name"
            raise OptionError(
                f"from: expected a dumped graph such as dump/07_fuse_rms_norm.py, got {path}: {got}"
            )
        if found["note"] == ".failed":
            raise OptionError(
                f"from: {path} is a graph that a pass left half done; go on from the file before it"
            )
        summary = read_summary(path.parent)
        index, name = int(found["index"]), found["name"]
        names = [CAPTURE, *(step.name for step in (*pipeline, CARVE, *QUANTIZE))]
        if index >= len(names) or names[index] != name:
            now = f"is {names[index]}" if index < len(names) else "does not exist"
            raise OptionError(
                f"from: {path} was written after step {index} {name}, which now {now} (the dump is of octavo "
                f"{summary['octavo_version']}); dump the model again"
            )
        written = {summary["start"]["file"], *(step["file"] for step in summary["steps"])}
        if f"{found['step']}.py" not in written:
            raise OptionError(f"from: {path} is not a file of the dump that {SUMMARY} describes")
        return cls(path, found["step"], index, path.read_text(encoding="utf-8"), summary)

    def job(self, target: str | None, max_batch_tokens: int | None, verify: Verify, dump: Path | None) -> Job:
        facts = self.summary
        given = {
            f.name: facts["options"][f.name] for f in fields(CompileOptions) if f.name in facts["options"]
        }
        wanted = {"target": target or facts["target"], "verify": verify, "dump": dump}
        if max_batch_tokens is not None:
            wanted["max_batch_tokens"] = max_batch_tokens
        if given.get("quantize"):
            globs = {name: tuple(given["quantize"][name]) for name in ("keep", "include")}
            wanted["quantize"] = QuantConfig(**{**given["quantize"], **globs})
        if given.get("carve"):
            wanted["carve"] = CarveConfig(**given["carve"])
        if given.get("features"):
            wanted["features"] = tuple(given["features"])
        if "parallel" in given:
            wanted["parallel"] = Parallel(**given["parallel"])
        options = CompileOptions(**{**given, **wanted})
        if options.checkpoint is not None:
            raise OptionError(
                f"from: {self.path} is of a model whose products are those of the checkpoint {options.checkpoint}, "
                "which a dump does not hold; compile it again from the checkpoint"
            )
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        entries = (facts["start"], *facts["steps"])
        is_edited = digest != next(e["sha256"] for e in entries if e["file"] == f"{self.step}.py")
        return Job(
            self.target_of(options), options, Settings(**facts["settings"]), facts["model"],
            facts["capture_route"], {"resumed_from": self.path.name, "edited": is_edited, **self.draft()},
            self.calibration(),
            self.plan(), self.index,
        )  # fmt: skip

    def draft(self) -> dict[str, Any]:
        """What the dumped model drafts with, where it is a draft."""
        return {"draft": self.summary["draft"]} if self.summary.get("draft") else {}

    def plan(self) -> PrecisionPlan | None:
        """Of a graph between the steps that quantise."""
        path = self.path.parent / PRECISION
        if self.index <= BEFORE:
            return None
        if not path.is_file():
            raise OptionError(f"from: expected {path}, the plan of a quantised graph, got no such file")
        return plan_from_json(path.read_text(encoding="utf-8"), str(path))

    def target_of(self, options: CompileOptions) -> Target:
        """The target, which must serve what is quantised, and lay out block scales that are made already alike."""
        target, before = load_target(options.target), load_target(self.summary["target"])
        if self.index > BEFORE and target.family != before.family:
            raise OptionError(
                f"from: {self.path} holds block scales as {before.name} reads them, got target {target.name}; go "
                f"on from a graph before {QUANTIZE[1].name}"
            )
        if options.quantize is not None:
            check_target(options.quantize.mode, target)
        return target

    def files(self, name: str) -> dict[str, bytes]:
        """Those of a folder of the dump, that were packed then."""
        folder = self.path.parent / name
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return {f"{name}/{file.name}": file.read_bytes() for file in files}

    def calibration(self) -> list[list[int]] | None:
        """The tokens that the dumped model was calibrated with, where it was."""
        path = self.path.parent / CALIBRATION
        return json.loads(path.read_text()) if path.is_file() else None

    def load(self, pipeline: Sequence[Step]) -> GraphModule:
        """The graph with its weights, legal at its stage."""
        facts = self.summary["weights"]
        if facts is None:
            raise OptionError(
                f"from: the dump of {self.path} has no weights: {self.summary['weights_missing']}"
            )
        graph_module = load_graph(self.text, DumpedWeights(self.path.parent, facts), str(self.path))
        stage = (*pipeline, CARVE, *QUANTIZE)[self.index - 1].stage if self.index else "captured"
        try:
            check(graph_module, stage, after=self.step)
            if stage == "quantized":
                check_types(graph_module, after=self.step)
        except IllegalGraphError as error:
            raise IllegalGraphError(f"{error}{self.lines_of(str(error))}") from None
        return graph_module

    def lines_of(self, message: str) -> str:
        """Where the text defines the nodes that a message names."""
        lines = {
            line.split(" = ")[0].strip(): n
            for n, line in enumerate(self.text.split("\n"), 1)
            if " = " in line
        }
        names = [name for name in dict.fromkeys(re.findall(r"\b\w+\b", message)) if name in lines]
        places = ", ".join(f"{self.path}:{lines[name]} ({name})" for name in names[:3])
        return f"; see {places}" if places else ""
