"""Lowered graph -> what an artifact holds: select, plan, emit, build, pack."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from octavo.codegen.any_rows import for_any_rows
from octavo.codegen.build_cpp import program_source
from octavo.codegen.build_triton import build_kernels
from octavo.codegen.emit import emit
from octavo.codegen.evidence import evidence_row, launch_of
from octavo.codegen.kernel import Kernel, KernelSpec
from octavo.codegen.select import Selection, select
from octavo.compiler.artifact import STEP_TIMES, TYPES, Artifact
from octavo.compiler.dims import as_expression, dim_names, dtype_name, makes_logits
from octavo.compiler.errors import ToolchainError
from octavo.compiler.host import build_shared_library, host_features
from octavo.compiler.legality import COLLECTIVES, op
from octavo.compiler.program import Program
from octavo.compiler.step_cost import LOSERS, predicted_step_times
from octavo.compiler.target import Target
from octavo.compiler.type_rules import declared
from octavo.compiler.weights import Weight
from octavo.passes.group_pages import group_pages
from octavo.passes.mask_trees import mask_trees
from octavo.passes.plan_memory import plan_memory
from octavo.passes.rewrite import held
from octavo.passes.rule import PassReport, run_pass
from octavo.passes.sharding import whole_types, whole_weights

LOWERED_GRAPH = "graph/lowered.py"
Progress = Callable[[str, int, int], None]


@dataclass
class Built:
    """Program, kernels and files of an artifact, and the evidence about them.

    files     path inside the artifact -> bytes
    kernels   one row of evidence for each distinct kernel
    missing   why the host program was not built, when no compiler is there
    """

    program: Program
    files: dict[str, bytes]
    kernels: list[dict[str, Any]]
    grouped: PassReport
    plan: PassReport
    selections: list[dict[str, Any]] = field(default_factory=list)
    missing: str = ""


def build(
    graph_module: GraphModule,
    target: Target,
    page_size: int,
    progress: Progress | None = None,
    deterministic: bool = False,
    trees: bool = False,
) -> Built:
    """Group a lowered graph's pages, in place, and choose and build its kernels.

    deterministic  kernels with one order of sums for any number of rows
    trees          steps may hold trees of drafts
    Raises CodegenError for an op without a kernel.
    """
    if trees:
        run_pass(mask_trees, graph_module)
    grouped = run_pass(group_pages, graph_module)
    selections = select_all(graph_module, target)
    plan = PassReport("plan_memory", nodes_before=len(selections), nodes_after=len(selections))
    start = time.perf_counter()
    memory = plan_memory(graph_module.graph)
    plan.ms, plan.notes = (time.perf_counter() - start) * 1e3, asdict(memory)
    specs = {node: selection.spec for node, selection in selections.items()}
    if deterministic:
        specs = {node: for_any_rows(spec) for node, spec in specs.items()}
    launches = list({launch.name: launch for spec in specs.values() for launch in spec.launches}.values())
    # GPU kernels come first: which of their forms was chosen is known once all are built
    kernels = [] if target.family == "cpp" else build_kernels(launches, target, progress)
    chosen = dict(zip((launch.name for launch in launches), kernels, strict=False))
    specs = {node: _as_chosen(spec, chosen) for node, spec in specs.items()}
    program = emit(graph_module, specs, memory, page_size)
    built = Built(program, {}, [], grouped, plan, _choices(selections, specs))
    if target.family == "cpp":
        _build_host(built, program, launches, progress)
    else:
        _add_kernels(built, kernels, [launch for spec in specs.values() for launch in spec.launches])
    return built


def add_step_times(built: Built, target: Target) -> None:
    """Predict the steps of a GPU's program of one rank; collectives have no model."""
    if target.family != "cpp" and built.program.mesh.world == 1:
        names = {step.kernel for step in built.program.steps}
        records = {name: json.loads(built.files[f"kernels/{name}.json"]) for name in names}
        built.files[STEP_TIMES] = _json(predicted_step_times(built.program, records, target))


def _as_chosen(spec: KernelSpec, chosen: Mapping[str, Kernel]) -> KernelSpec:
    """The spec with every launch in the form that was built for its name; unchanged where none was built."""
    first, *others = (
        chosen[launch.name].called_as(launch) if launch.name in chosen else launch for launch in spec.launches
    )
    return replace(first, also=tuple(others))


def select_all(graph_module: GraphModule, target: Target) -> dict[Node, Selection]:
    """The kernel of every node; equal calls (those of equal layers) are asked about once."""
    names = dim_names(graph_module.graph)
    known: dict[str, Selection] = {}
    result = {}
    for node in graph_module.graph.nodes:
        if _is_kernel(node):
            key = _call_text(node, names)
            if key not in known:
                known[key] = select(node, target)
            result[node] = known[key]
    return result


def _call_text(node: Node, names: Mapping[Any, str]) -> str:
    """Everything that a row may ask of a node: its op, numbers, and the sizes and dtypes of its tensors."""

    def text(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return str(value)
        return f"{value.dtype}{[names.get(as_expression(size), str(size)) for size in value.shape]}"

    args = map_arg((node.args, node.kwargs), lambda n: text(n.meta["val"]))
    value = node.meta["val"]
    results = [text(v) for v in value] if isinstance(value, tuple | list) else text(value)
    return f"{node.target} {args} {results} {makes_logits(node)}"


def _is_kernel(node: Node) -> bool:
    return node.op == "call_function" and op(node).startswith("octavo::") and op(node) not in COLLECTIVES


def _choices(selections: Mapping[Node, Selection], specs: Mapping[Node, KernelSpec]) -> list[dict[str, Any]]:
    """Each distinct choice once, with the nodes it serves counted and the rows that were not taken."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for node, selection in selections.items():
        key = (selection.row, specs[node].name)
        row = rows.setdefault(
            key, {"row": key[0], "kernel": key[1], "nodes": 0, "skipped": list(selection.skipped)}
        )
        row["nodes"] += 1
    return list(rows.values())


def _build_host(
    built: Built, program: Program, launches: list[KernelSpec], progress: Progress | None
) -> None:
    source = program_source(program, launches)
    built.files["kernels/program.cpp"] = source.encode()
    built.kernels = [
        {"name": spec.name, "op": spec.op, "bytes": spec.bytes, "flops": spec.flops} for spec in launches
    ]
    features = host_features()
    if progress is not None:
        progress(f"C++ for {features}", 0, 1)
    try:
        library = build_shared_library(source, features)
    except ToolchainError as error:
        built.missing = str(error)
        return
    built.files["kernels/program.so"] = library.read_bytes()
    built.files["kernels/features"] = features.encode()


def _add_kernels(built: Built, kernels: list[Kernel], launches: list[KernelSpec]) -> None:
    """works: what each distinct launch of the kernel has to do; the last norm has fewer rows than the others."""
    other: dict[str, dict[str, dict[str, Any]]] = {}
    for launch in launches:
        other.setdefault(launch.name, {})[str((launch.grid, launch.when))] = launch_of(launch)
    # specs of different names may have fallen back to one
    for kernel in {kernel.spec.name: kernel for kernel in kernels}.values():
        name, work = kernel.spec.name, kernel.metadata["work"]
        own = str((kernel.spec.grid, kernel.spec.when))
        others = [{**work, **launch} for key, launch in other[name].items() if key != own]
        kernel.metadata["works"] = [work, *others]
        _add_files(built, "kernels", kernel)
        for loser in kernel.losers:
            _add_files(built, LOSERS, loser)
        built.kernels.append(evidence_row(kernel))


def _add_files(built: Built, folder: str, kernel: Kernel) -> None:
    name = kernel.spec.name
    assert kernel.binary is not None, f"{name} was not built"
    built.files[f"{folder}/{name}.py"] = kernel.source.encode()
    built.files[f"{folder}/{name}.cubin"] = kernel.binary
    built.files[f"{folder}/{name}.json"] = _json(kernel.metadata)


def pack(
    path: Path, built: Built, graph_module: GraphModule, manifest: Mapping[str, Any],
    report: Mapping[str, Any], texts: Mapping[str, str], extra_files: Mapping[str, bytes],
) -> Path:  # fmt: skip
    """Write the artifact. texts: the graph dumps by file name; the last one is the lowered graph."""
    files = dict(built.files)
    files.update({f"graph/{name}": text.encode() for name, text in texts.items()})
    files["report.json"] = _json(report)
    if parts := {**declared(graph_module), **whole_types(graph_module)}:
        held_names = {b.name for b in built.program.of_kind("weight")}
        files[TYPES] = _json({name: str(part) for name, part in parts.items() if name in held_names})
    files.update(extra_files)
    whole = whole_weights(graph_module)
    weights = {
        b.name: _weight(whole[b.name] if b.name in whole else held(graph_module, b.name))
        for b in built.program.of_kind("weight")
    }
    return Artifact.write(path, manifest=manifest, program=built.program, weights=weights, files=files)


def _weight(tensor: torch.Tensor) -> Weight:
    """Raw little-endian bytes, produced when the tensor's turn comes."""
    return Weight(
        dtype_name(tensor),
        tuple(tensor.shape),
        lambda: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(),
    )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, default=str) + "\n").encode()
