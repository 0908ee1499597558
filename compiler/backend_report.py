"""What the torch.compile backend did: one entry for each graph it was given, and why each graph ended."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import CompileContext

from octavo.passes.rule import PassReport

LOG = logging.getLogger("octavo.backend")


@dataclass(frozen=True)
class GraphBreak:
    """Why TorchDynamo ended a graph before the end of the function, and the user's own line there."""

    reason: str
    where: str


@dataclass
class CompiledGraph:
    """One graph that TorchDynamo handed over.

    compile_id    TorchDynamo's "frame/compilation": equal frames with other numbers are recompilations
    inputs        shapes and dtypes of the inputs that are no weights
    passes        reports of the passes that ran; empty where the graph was left alone
    left_alone    why the graph was not rewritten, or ""
    """

    compile_id: str
    inputs: str
    graph_break: GraphBreak | None = None
    passes: list[PassReport] = field(default_factory=list)
    left_alone: str = ""
    seconds: float = 0.0

    @property
    def rewritten(self) -> dict[str, int]:
        """Rewritten sites by pass, without those of tidying up."""
        found = {report.name: report.matched for report in self.passes if report.matched}
        return {name: count for name, count in found.items() if name != "canonicalize"}

    def __str__(self) -> str:
        what = ", ".join(f"{name} {count}" for name, count in self.rewritten.items()) or "nothing to rewrite"
        proven = sum(report.proof.sites for report in self.passes)
        lines = [f"graph {self.compile_id} ({self.inputs}), {self.seconds:.1f} s: {self.left_alone or what}"]
        if proven:
            lines.append(f"  {proven} distinct sites proven")
        for report in self.passes:
            lines += [f"  {report.name} left {r.where}: {r.reason}" for r in report.rejected]
        if self.graph_break is not None:
            lines.append(f"  ends early at {self.graph_break.where}: {self.graph_break.reason}")
        return "\n".join(lines)


@dataclass(frozen=True)
class BackendReport:
    """Every graph compiled since the process began or `torch.compiler.reset()`. Prints as text."""

    graphs: tuple[CompiledGraph, ...]

    @property
    def graph_breaks(self) -> list[GraphBreak]:
        """One for each place: recompiling a function meets its breaks again."""
        return list(dict.fromkeys(g.graph_break for g in self.graphs if g.graph_break is not None))

    def __str__(self) -> str:
        head = f"octavo backend: {len(self.graphs)} graphs compiled, {len(self.graph_breaks)} graph breaks"
        return "\n".join([head, *map(str, self.graphs)])


_GRAPHS: list[CompiledGraph] = []


def backend_report() -> BackendReport:
    """What `torch.compile(..., backend="octavo")` compiled so far, where graphs broke, and what was left alone."""
    return BackendReport(tuple(_GRAPHS))


def forget() -> None:
    """Start over. `torch.compiler.reset()` calls this for backends that were used."""
    _GRAPHS.clear()


def begin(graph_module: torch.fx.GraphModule, example_inputs: Any) -> CompiledGraph:
    """The entry of a graph from TorchDynamo. It counts once `finish` has it: tracing may start over."""
    compile_id = str(CompileContext.current_compile_id())
    return CompiledGraph(compile_id, _inputs(example_inputs), _graph_break(graph_module))


def finish(entry: CompiledGraph) -> None:
    """Put the entry into the report; a graph break is logged."""
    _GRAPHS.append(entry)
    if entry.graph_break is not None:
        LOG.warning("graph break at %s: %s", entry.graph_break.where, entry.graph_break.reason)


def _inputs(example_inputs: Any) -> str:
    is_weight: Callable[[Any], bool] = lambda value: isinstance(value, torch.nn.Parameter)  # noqa: E731
    tensors = [v for v in example_inputs if isinstance(v, torch.Tensor) and v.dim() and not is_weight(v)]
    shown = [f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in tensors[:4]]
    return ", ".join([*shown, *(["..."] if len(tensors) > 4 else [])])


def _graph_break(graph_module: torch.fx.GraphModule) -> GraphBreak | None:
    reason: Any = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frames = [frame for frame in reason.user_stack if "/torch/" not in frame.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
    # The first two lines say what cannot be traced and why; hints and links follow.
    lines = [line.strip().removeprefix("Explanation: ") for line in reason.reason.strip().splitlines()]
    return GraphBreak(": ".join(lines[:2]), where)
