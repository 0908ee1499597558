"""The passes in order, some with their reason, and the loop that runs, checks and proves them."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from octavo.compiler.capture import Captured
from octavo.compiler.dump import settle
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.errors import IllegalGraphError, OctavoError, OptionError, PassError
from octavo.compiler.layer_folding import fold, unfold
from octavo.compiler.legality import Stage, check, is_attention, op
from octavo.compiler.options import CompileOptions
from octavo.compiler.origin import module_path
from octavo.compiler.paging_rules import check_paging
from octavo.compiler.program import FEATURES
from octavo.compiler.type_rules import check_types
from octavo.compiler.verify import Evidence, prove_report
from octavo.passes.absorb_mla import absorb_mla
from octavo.passes.canonicalize import canonicalize
from octavo.passes.eliminate_dead_code import eliminate_dead_code
from octavo.passes.fold_constants import fold_constants
from octavo.passes.fold_position_tables import fold_position_tables
from octavo.passes.fuse_add_norm import fuse_add_norm
from octavo.passes.fuse_attention import fuse_attention
from octavo.passes.fuse_gated_mlp import fuse_gated_mlp
from octavo.passes.fuse_layer_norm import fuse_layer_norm
from octavo.passes.fuse_mla import fuse_mla
from octavo.passes.fuse_moe import fuse_moe
from octavo.passes.fuse_pair_rope import fuse_pair_rope
from octavo.passes.fuse_partial_rope import fuse_partial_rope
from octavo.passes.fuse_rms_norm import fuse_rms_norm
from octavo.passes.fuse_rope import fuse_rope
from octavo.passes.fuse_rope_kv_write import fuse_rope_kv_write
from octavo.passes.fuse_router import fuse_router
from octavo.passes.hoist_repeats import hoist_repeats
from octavo.passes.hoist_transposes import hoist_transposes
from octavo.passes.insert_paged_kv import insert_paged_kv
from octavo.passes.join_scatters import join_scatters
from octavo.passes.lower_elementwise import lower_elementwise
from octavo.passes.lower_transposes import lower_transposes
from octavo.passes.merge_gate_up import merge_gate_up
from octavo.passes.merge_qkv import merge_qkv
from octavo.passes.rewrite import stands_for
from octavo.passes.rule import Pass, PassReport, run_pass
from octavo.passes.split_linear import split_linear


@dataclass(frozen=True)
class Settings:
    """What passes need to know beyond the graph: page_size and max_model_len in tokens."""

    page_size: int
    max_model_len: int


@dataclass(frozen=True)
class Step:
    """One pass of the pipeline, the stage that the graph reaches with it, and the settings it takes."""

    run: Callable[..., PassReport]
    stage: Stage
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.run, "__name__", "pass")

    def bind(self, settings: Any) -> Pass:
        return functools.partial(self.run, **{name: getattr(settings, name) for name in self.settings})


PIPELINE: tuple[Step, ...] = (
    Step(canonicalize, "canonical"),  # assertions and copies are extra users that block every larger match
    Step(fold_constants, "canonical"),  # transposed weights are weights
    Step(join_scatters, "canonical"),  # before split_linear, which asks where parts go
    Step(split_linear, "canonical"),
    Step(fold_constants, "canonical"),  # parts of weights are weights
    Step(eliminate_dead_code, "canonical"),
    Step(fuse_moe, "canonical"),  # routers are looked for from here
    Step(fuse_router, "canonical"),  # before every pass that asks what a softmax is for
    Step(fuse_layer_norm, "canonical"),  # before rms_norm, which would take its second half
    Step(fuse_rms_norm, "canonical"),
    Step(fuse_rope, "canonical"),  # before attention: brings q and k into the tokens-first layout
    Step(fuse_pair_rope, "canonical"),
    Step(
        hoist_repeats, "canonical"
    ),  # attention looks below one repeat of its heads, and below no rotation of it
    Step(fuse_attention, "fused", ("max_model_len",)),  # masks vanish here, so only real positions remain
    Step(hoist_transposes, "fused"),  # what per-head norms and partial rotations left between transposes
    Step(fuse_partial_rope, "fused"),
    Step(fuse_mla, "fused"),
    Step(split_linear, "fused"),  # q's plain and rotated parts, which the join before attention kept together
    Step(absorb_mla, "fused"),
    Step(fuse_gated_mlp, "fused"),
    Step(fold_position_tables, "fused", ("max_model_len",)),  # after masks, which positions make too
    Step(insert_paged_kv, "paged", ("page_size",)),
    Step(merge_qkv, "paged"),
    Step(merge_gate_up, "paged"),
    Step(fuse_rope_kv_write, "paged"),  # after merge_qkv: reads the parts of the merged projection in place
    Step(fuse_add_norm, "paged"),
    Step(lower_transposes, "paged"),
    Step(lower_elementwise, "paged"),  # after every fusion that wants a plain sum
    Step(fold_constants, "paged"),  # the weights that the merges joined
    Step(eliminate_dead_code, "lowered"),
)


@dataclass
class Lowered:
    """The graph of kernel ops and what every pass did.

    precision  of a graph that was quantised: what compiler/precision_report.py says
    carving    of one whose FFNs were cut into experts: what compiler/carve_model.py says
    """

    graph_module: GraphModule
    reports: list[PassReport] = field(default_factory=list)
    num_layers: int = 0
    proof_s: float = 0.0
    precision: dict[str, Any] = field(default_factory=dict)
    carving: dict[str, Any] = field(default_factory=dict)


Progress = Callable[[str, int, int], None]


def lower(
    captured: Captured, options: CompileOptions, settings: Settings, pipeline: Sequence[Step] = PIPELINE,
    progress: Progress | None = None, dumps: DumpWriter | None = None,
) -> Lowered:  # fmt: skip
    """Run the passes; after each, the graph is canonical again, checked against its stage, proven and dumped.

    Of many equal layers the passes see a few (layer_folding), unless the graphs are dumped: those are whole.
    Raises PassError for a rewrite that is not proven or an attention that was missed, IllegalGraphError for
    what no pass replaced. Both name the pass, the node and the user's source line.
    """
    all_attentions = expected_attentions(captured)
    settle(captured.graph_module)
    if dumps is not None:
        dumps.write_start("00_capture", captured.graph_module, "as captured")
    folded = None if dumps is not None and dumps.directory is not None else fold(captured.graph_module)
    if folded is None:
        return _lower(captured.graph_module, all_attentions, options, settings, pipeline, progress, dumps)
    kept = attentions(folded.graph_module)
    folded.graph_module.meta["attentions"] = len(all_attentions)
    result = _lower(folded.graph_module, kept, options, settings, pipeline, progress, dumps)
    short = result.graph_module
    start = time.perf_counter()
    result.graph_module = unfold(folded)
    report = PassReport("unfold_layers", nodes_before=len(short.graph.nodes))
    report.nodes_after = len(result.graph_module.graph.nodes)
    report.ms = (time.perf_counter() - start) * 1e3
    report.notes["layers"] = f"{len(all_attentions)}, of which the passes saw {len(kept)}"
    result.reports.append(report)
    check(result.graph_module, pipeline[-1].stage, after=report.name)
    result.num_layers = len(all_attentions)
    return result


def lower_from(
    graph_module: GraphModule, start: int, options: CompileOptions, settings: Settings,
    pipeline: Sequence[Step] = PIPELINE, progress: Progress | None = None, dumps: DumpWriter | None = None,
) -> Lowered:  # fmt: skip
    """Run the passes behind the first `start` on a graph that was dumped there. Raises as `lower` does."""
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    expected = [n.name for n in nodes if is_attention(n) or op(n).endswith("attention")]
    return _lower(graph_module, expected, options, settings, pipeline, progress, dumps, start)


def _lower(
    graph_module: GraphModule, expected: list[str], options: CompileOptions, settings: Settings,
    pipeline: Sequence[Step], progress: Progress | None, dumps: DumpWriter | None, start: int = 0,
) -> Lowered:  # fmt: skip
    result = Lowered(graph_module, num_layers=len(expected))
    proven: dict[str, Evidence] = {}
    for index, step in enumerate(pipeline[start:], start):
        if progress is not None:
            progress(step.name, index, len(pipeline))
        try:
            report = _run_step(step, graph_module, options, settings, expected, proven, result)
        except OctavoError as error:
            if dumps is not None:
                dumps.write_failure(index, step.name, graph_module, error)
            raise
        result.reports.append(report)
        settle(graph_module)
        if dumps is not None:
            dumps.write(index + 1, report, graph_module, step.stage)
    return result


def _run_step(
    step: Step, graph_module: GraphModule, options: CompileOptions, settings: Settings,
    expected: list[str], proven: dict[str, Evidence], result: Lowered,
) -> PassReport:  # fmt: skip
    reports = apply_step(step, graph_module, settings, expected, result.reports)
    if options.verify != "off":
        start = time.perf_counter()
        for one in reports:
            prove_report(one, proven, _after(result.reports))
        result.proof_s += time.perf_counter() - start
    return reports[0]


def apply_step(
    step: Step, graph_module: GraphModule, settings: Any, expected: Sequence[str] = (),
    done: Sequence[PassReport] = (),
) -> list[PassReport]:  # fmt: skip
    """Run a pass and what tidies up after it, and check the stage. Reports of both, the pass's own first.

    expected  names of the captured graph's attentions, where all must be found
    done      reports of the passes before, for the messages of errors
    """
    report = _run_pass(step, graph_module, settings, done)
    reports = [report]
    if report.changed and step.run is not canonicalize:
        # What a pass leaves behind (reshapes of reshapes, transposes back and forth) is tidied first.
        reports.append(run_pass(canonicalize, graph_module))
        report.nodes_after, report.ms = reports[1].nodes_after, report.ms + reports[1].ms
    if expected and step.name == "fuse_attention":
        _require_attentions(graph_module, expected, report)
    _check(graph_module, step, [*done, report])
    return reports


def _run_pass(step: Step, graph_module: GraphModule, settings: Any, done: Sequence[PassReport]) -> PassReport:
    try:
        return run_pass(step.bind(settings), graph_module)
    except OctavoError:
        raise
    except Exception as error:
        raise PassError(f"{step.name}: {type(error).__name__}: {error}{_after(done)}") from error


def _after(done: Sequence[PassReport]) -> str:
    names = ", ".join(r.name for r in done)
    return f" (after: {names})" if names else ""


def _check(graph_module: GraphModule, step: Step, reports: Sequence[PassReport]) -> None:
    """The stage's check; its error tells what passes refused first up to here, the last pass first: often the cause."""
    try:
        check(graph_module, step.stage, after=step.name)
        if step.stage in ("paged", "lowered", "quantized"):
            check_paging(graph_module, after=step.name)
        if step.stage == "quantized":
            check_types(graph_module, after=step.name)
    except IllegalGraphError as error:
        refused = [f"{r.name} left {x.where}: {x.reason}" for r in reversed(reports) for x in r.rejected[:1]]
        raise IllegalGraphError("; ".join([str(error), *refused[:6]])) from None


def attentions(graph_module: GraphModule) -> list[str]:
    return [n.name for n in graph_module.graph.nodes if n.op == "call_function" and is_attention(n)]


def expected_attentions(captured: Captured) -> list[str]:
    """Names of the nodes that are attention in the captured graph: what must be paged in the end."""
    found = attentions(captured.graph_module)
    layers = captured.model_info["num_layers"]
    if not found and _reads_features(captured.graph_module):
        return []  # a draft head without state of its own: everything it knows of earlier tokens is in the features
    if not found:
        raise PassError(
            f"capture: {captured.model_info['name']} has no attention: no softmax over keys, no "
            "scaled_dot_product_attention and no call of its library's attention interface; a paged cache "
            "serves causal attention only"
        )
    # More than layers: layers with several attentions, each of which gets pages of its own.
    if captured.route == "interface" and layers is not None and len(found) < layers:
        raise PassError(
            f"capture: {captured.model_info['name']} has {layers} layers by its configuration and attention in "
            f"{len(found)} ({', '.join(_modules(captured.graph_module, found)[:4])}); layers with other state "
            "cannot be paged"
        )
    return found


def _reads_features(graph_module: GraphModule) -> bool:
    return any(node.name == FEATURES for node in graph_module.graph.find_nodes(op="placeholder"))


def _modules(graph_module: GraphModule, names: Sequence[str]) -> list[str]:
    """Paths of the modules that call these nodes."""
    return [module_path(node) for node in graph_module.graph.nodes if node.name in names]


def _require_attentions(graph_module: GraphModule, expected: Sequence[str], report: PassReport) -> None:
    """As many octavo.attention as the model has attentions, or an error that names those that were missed."""
    found = [n for n in graph_module.graph.nodes if n.op == "call_function" and op(n) == "octavo::attention"]
    num_found = sum(stands_for(n) for n in found)
    num_expected = graph_module.meta.get("attentions", len(expected))
    report.notes["attentions"] = f"{num_found} of {num_expected}"
    if len(found) != len(expected):
        reasons = [f"{r.where}: {r.reason}" for r in (*report.rejected, *report.near_misses)]
        raise PassError(
            f"{report.name}: expected {len(expected)} attentions, got {len(found)}; missed: "
            + ("; ".join(reasons[:4]) or "no place came near the pattern")
        )


def settings_of(captured: Captured, options: CompileOptions, default_page_size: int) -> Settings:
    """Sizes that the user gave, or the model's and the target's."""
    longest = captured.model_info["max_model_len"]
    wanted = options.max_model_len or longest or DEFAULT_MODEL_LEN
    if longest is not None and wanted > longest:
        raise OptionError(
            f"max_model_len: the model's positions end at {longest}, got {wanted}; choose at most that"
        )
    return Settings(options.page_size or default_page_size, wanted)


# Longest sequence of a model that does not say: hand-written modules without learned positions.
DEFAULT_MODEL_LEN = 2048


def dump_directory(options: CompileOptions, environment: str | None) -> Path | None:
    """Where dumps go: the option, or the environment variable OCTAVO_DUMP."""
    return options.dump or (Path(environment) if environment else None)
