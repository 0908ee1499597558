"""Which pass changes what a model computes, and which of its rewrites: `octavo bisect`.

Proofs are off. The captured graph must give the model's own logits; then the graph after every pass, executed
in fp64 so that no rounding hides a small error, must give those of the captured graph. The rewrites of the
first pass that does not are proven one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from torch import Tensor, nn
from torch.fx import GraphModule

from octavo.compiler.api import with_dtype
from octavo.compiler.capture import Captured, capture, reference_logits
from octavo.compiler.dump import print_graph
from octavo.compiler.errors import OctavoError, PassError
from octavo.compiler.fresh_inputs import Chunk, is_cache, step_inputs
from octavo.compiler.options import CompileOptions, DType
from octavo.compiler.pipeline import PIPELINE, Settings, Step, apply_step, expected_attentions, settings_of
from octavo.compiler.report import plain_table
from octavo.compiler.reproducer import write_graphs, write_reproducer
from octavo.compiler.verify import Evidence, prove_report
from octavo.compiler.whole_model import BOUND
from octavo.compiler.wide import Wide
from octavo.passes.rewrite import Site
from octavo.passes.rule import PassReport

CAPTURE = "capture"
PAGE_SIZE = 4  # small, so that short sequences cross pages
LENGTHS, FIRST = (9, 14, 5), (4, 13, 5)  # tokens of three sequences, and of them in the first of two steps
# Relative to the largest logit, for passes that store no results.
WIDE_BOUND = 1e-5

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Row:
    """Largest error after a pass, relative to the largest logit; nan where the graph could not be run."""

    name: str
    error: float
    bound: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Verdict:
    """What bisection found.

    guilty      the first pass at fault ("capture" if the graph was wrong from the beginning), or None
    site        its rewrite that is not equal to what it replaced; None if each by itself is
    reason      what is wrong, in a sentence
    reproducer  a program that shows it, or a directory with the graphs before and after
    """

    rows: tuple[Row, ...]
    guilty: str | None = None
    site: Site | None = None
    reason: str = ""
    reproducer: Path | None = None

    @property
    def is_clean(self) -> bool:
        return self.guilty is None

    def table(self) -> RenderableType:
        """pass, error, bound, verdict."""
        table = plain_table("pass", "error", "bound", "verdict", left=("pass", "verdict"))
        for row in self.rows:
            verdict = "right" if row.is_right and row.name != self.guilty else "wrong"
            table.add_row(row.name, f"{row.error:.1e}", f"{row.bound:.0e}", verdict)
        return table

    def text(self) -> str:
        """The finding in a sentence or two."""
        if self.guilty is None:
            return "every pass is right"
        where = "" if self.reproducer is None else f"\nsee {self.reproducer}"
        return f"{self.guilty} is at fault: {self.reason}{where}"


def bisect(
    model: nn.Module,
    pipeline: Sequence[Step] = PIPELINE,
    *,
    dtype: DType | None = None,
    page_size: int | None = None,
    max_model_len: int | None = None,
    output: Path | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Find the first pass of `pipeline` that changes the logits of `model`, and the site.

    dtype, page_size, max_model_len  as in `octavo.compile`; pages are small unless given
    output  directory for a reproducer, made when something is found; None writes none
    Raises CaptureError, OptionError or PassError for a model that `octavo.compile` does not take.
    """
    source = with_dtype(model, dtype)
    captured = capture(source)
    options = CompileOptions(page_size=page_size, max_model_len=max_model_len, verify="off")
    settings = settings_of(captured, options, PAGE_SIZE)
    search = _Search(captured.graph_module, settings, expected_attentions(captured), output)
    search.compare_with(source, captured)
    if not search.rows[0].is_right:
        return search.verdict(CAPTURE, "the captured graph does not give the model's logits")
    for index, step in enumerate(pipeline):
        if progress is not None:
            progress(step.name, index, len(pipeline))
        verdict = search.take(step)
        if verdict is not None:
            return verdict
    # Logits hide what weighs little in them, so a clean table alone does not clear the rewrites.
    return search.first_unproven(search.reports) or search.verdict(None)


@dataclass
class _Search:
    """What is known after some passes.

    prompts, expected  ids (1, T), and logits (T, vocab) of each in fp64
    text               of the graph as it is now
    """

    graph_module: GraphModule
    settings: Settings
    attentions: list[str]
    output: Path | None
    rows: list[Row] = field(default_factory=list)
    prompts: list[Tensor] = field(default_factory=list)
    expected: list[Tensor] = field(default_factory=list)
    text: str = ""
    reports: list[tuple[str, PassReport]] = field(default_factory=list)
    proven: dict[str, Evidence] = field(default_factory=dict)

    def compare_with(self, model: nn.Module, captured: Captured) -> None:
        """The first row: the captured graph against the model, both in the model's dtype."""
        generator = torch.Generator().manual_seed(0)
        vocab_size = captured.graph_module.graph.output_node().args[0][0].meta["val"].shape[-1]  # type: ignore[index, union-attr]
        lengths = [min(length, self.settings.max_model_len) for length in LENGTHS]
        self.prompts = [torch.randint(0, int(vocab_size), (1, n), generator=generator) for n in lengths]
        with torch.no_grad():
            own = [reference_logits(model, p)[0] for p in self.prompts]
            got = [self.graph_module(p, torch.arange(p.shape[1])[None])[0][0] for p in self.prompts]
        is_narrow = any(p.dtype is torch.bfloat16 for p in model.parameters())
        self.rows.append(Row(CAPTURE, relative_error(own, got), BOUND["bf16" if is_narrow else "fp32"]))
        self.expected = wide_logits(self.graph_module, self.prompts, self.settings.page_size)

    def take(self, step: Step) -> Verdict | None:
        """Run a pass and the graph after it; a verdict ends the search."""
        before = self.text or print_graph(self.graph_module)
        try:
            done = [report for _, report in self.reports]
            reports = apply_step(step, self.graph_module, self.settings, self.attentions, done)
            self.text = print_graph(self.graph_module)
            if self.text == before:  # most passes find nothing in most models
                self._unchanged(step.name, reports)
                return None
            got = wide_logits(self.graph_module, self.prompts, self.settings.page_size)
        except OctavoError as error:
            return self._failed(step.name, str(error))
        except Exception as error:  # a wrong rewrite can break the graph in any way
            return self._failed(step.name, f"the graph after it fails: {type(error).__name__}: {error}")
        self.reports += [(step.name, report) for report in reports]
        is_rounding = any(_stores_results(report) for report in reports)
        bound = self.rows[0].bound if is_rounding else WIDE_BOUND
        self.rows.append(Row(step.name, relative_error(self.expected, got), bound))
        if self.rows[-1].is_right:
            # Stored results were rounded to the model's dtype: from here on these are the logits to keep.
            self.expected = got if is_rounding else self.expected
            return None
        return self.first_unproven([(step.name, report) for report in reports]) or self.verdict(
            step.name,
            "each rewrite by itself is right, so the fault is in how the rest of the graph uses the results",
            reproducer=self.output and write_graphs(self.output, step.name, before, self.graph_module),
        )

    def _unchanged(self, name: str, reports: Sequence[PassReport]) -> None:
        self.reports += [(name, report) for report in reports]
        self.rows.append(Row(name, self.rows[-1].error, self.rows[-1].bound))

    def _failed(self, name: str, reason: str) -> Verdict:
        self.rows.append(Row(name, float("nan"), WIDE_BOUND))
        return self.verdict(name, reason)

    def first_unproven(self, reports: Sequence[tuple[str, PassReport]]) -> Verdict | None:
        """The first rewrite that is not equal to what it replaced, with a program that shows it."""
        for name, report in reports:
            for site in report.sites:
                one = PassReport(report.name, report.exactness, [site])
                try:
                    prove_report(one, self.proven)
                except PassError as error:
                    program = self.output and write_reproducer(self.output, one, str(error))
                    return self.verdict(name, str(error), site, program)
        return None

    def verdict(
        self, guilty: str | None, reason: str = "", site: Site | None = None, reproducer: Path | None = None
    ) -> Verdict:
        return Verdict(tuple(self.rows), guilty, site, reason, reproducer)


def _stores_results(report: PassReport) -> bool:
    """Whether the pass computed values in the model's dtype and kept them as weights."""
    return any(site.table is not None for site in report.sites) or bool(report.notes.get("folded"))


class _WideGraph(Wide):
    """Runs a whole graph in fp64, weights too, which are widened once for all its runs."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.weights: dict[str, Tensor] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in self.weights:
            value = super().get_attr(target, args, kwargs)
            self.weights[target] = value.double() if value.dtype.is_floating_point else value
        return self.weights[target]


def wide_logits(graph_module: GraphModule, prompts: Sequence[Tensor], page_size: int) -> list[Tensor]:
    """Logits (T, vocab) of every prompt (1, T) in fp64: one by one, or together over pages, in two steps."""
    inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    runner = _WideGraph(graph_module)
    with torch.no_grad():
        if "slot_mapping" not in [n.name for n in inputs]:
            return [runner.run(p, torch.arange(p.shape[1])[None])[0][0] for p in prompts]
        longest = max(p.shape[1] for p in prompts)
        values: dict[str, Tensor] = {}
        rows: list[list[Tensor]] = [[] for _ in prompts]
        for chunks in _two_steps([p.shape[1] for p in prompts]):
            generator = torch.Generator().manual_seed(1)
            step = step_inputs(chunks, page_size, len(prompts), generator, longest)
            values |= step.tensors
            values["input_ids"] = torch.cat(
                [prompts[c.request][:, c.start : c.start + c.length] for c in chunks], 1
            )
            values["logit_rows"] = torch.arange(values["input_ids"].shape[1])
            for node in inputs:
                if is_cache(node.name) and node.name not in values:
                    shape = (step.num_pages, *node.meta["val"].shape[1:])
                    # Rows that are read before they are written show as NaN in the logits.
                    values[node.name] = torch.full(shape, float("nan"), dtype=torch.float64)
            logits = runner.run(*(values[n.name] for n in inputs))[0][0]
            for chunk, part in zip(chunks, logits.split([c.length for c in chunks]), strict=True):
                rows[chunk.request].append(part)
    return [torch.cat(parts) for parts in rows]


def _two_steps(lengths: Sequence[int]) -> list[list[Chunk]]:
    """The first tokens of every sequence, then the rest of those that have one."""
    firsts = [min(first, length) for first, length in zip(FIRST, lengths, strict=True)]
    rest = [Chunk(i, f, n - f) for i, (f, n) in enumerate(zip(firsts, lengths, strict=True)) if n > f]
    return [[Chunk(i, 0, first) for i, first in enumerate(firsts)], rest]


def relative_error(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest expected value; nan if a value is."""
    worst = 0.0
    for wanted, value in zip(expected, got, strict=True):
        if wanted.shape != value.shape:
            return float("nan")
        error = float((wanted.double() - value.double()).abs().max() / wanted.double().abs().max())
        worst = error if error != error else max(worst, error)
        if worst != worst:
            return worst
    return worst
