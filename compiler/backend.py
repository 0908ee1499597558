"""`torch.compile(model, backend="octavo")`: the passes short of paging, proven, inside TorchDynamo's workflow.

For inference. A graph that needs gradients is run as it is, with a warning. What no rule matches stays what it was;
what a rule rewrote is executed by torch: attention by its fused kernel, the rest as the ops of the dialect define.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch.export import exported_program
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from octavo.compiler.backend_execute import executable
from octavo.compiler.backend_outputs import Outputs
from octavo.compiler.backend_report import CompiledGraph, begin, finish, forget
from octavo.compiler.errors import OptionError
from octavo.compiler.pipeline import PIPELINE, Settings, Step
from octavo.compiler.verify import Evidence, prove_report
from octavo.passes.canonicalize import canonicalize
from octavo.passes.fuse_attention import LARGEST_PROBE
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass

Compiled = Callable[..., Any]
OPTIONS: dict[str, tuple[Any, ...]] = {"verify": ("sites", "off")}
# Weights are inputs here, so that changes in place are seen: nothing is folded into them and none is cut up or merged.
# Positions are the batch's business, which is not one sequence. Latents pay where a cache holds them.
NOT_HERE = frozenset(("fold_constants", "split_linear", "fold_position_tables", "fuse_mla", "absorb_mla"))
FIRST_OF_PAGING = "insert_paged_kv"
AFTER_PAGING = ("fuse_add_norm",)  # a fusion that waits for paging only to leave sums for it to see


def _steps() -> tuple[Step, ...]:
    names = [step.name for step in PIPELINE]
    before = PIPELINE[: names.index(FIRST_OF_PAGING)]
    kept = [step for step in before if step.name not in NOT_HERE]
    return (*kept, *(step for step in PIPELINE if step.name in AFTER_PAGING))


STEPS = _steps()


def octavo_backend(
    graph_module: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Compiled:
    """The backend as TorchDynamo calls it.

    options  verify: "sites" (the default; every distinct rewrite is executed and compared) or "off"
    Raises OptionError for others, and PassError for a rewrite that is not proven.
    """
    chosen = _options(options)
    start, entry = time.perf_counter(), begin(graph_module, example_inputs)
    if torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in example_inputs):
        entry.left_alone = "not rewritten: gradients are wanted"
        warnings.warn(
            "octavo is a backend for inference: this graph may need gradients, so it runs as it is; call the "
            "model under torch.no_grad() or torch.inference_mode()",
            stacklevel=2,
        )
        finish(entry)
        return graph_module.forward
    _fix_floats(graph_module)
    compile_graph = functools.partial(_compile, entry=entry, chosen=chosen)
    with _composite_ops_whole():
        compiled: Compiled = aot_autograd(
            fw_compiler=compile_graph, inference_compiler=compile_graph, decompositions={}
        )(graph_module, example_inputs)
    entry.seconds = time.perf_counter() - start
    finish(entry)
    return compiled


octavo_backend.reset = forget  # type: ignore[attr-defined]  # torch.compiler.reset() calls it


def _options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    chosen = {name: values[0] for name, values in OPTIONS.items()} | dict(options or {})
    for name, value in chosen.items():
        if value not in OPTIONS.get(name, ()):
            known = "; ".join(f"{n}: one of {', '.join(map(repr, v))}" for n, v in OPTIONS.items())
            raise OptionError(f"octavo backend: expected options {known}, got {name}: {value!r}")
    return chosen


def _composite_ops_whole() -> Any:
    """As `run_decompositions({})`: products, softmax and attention stay one op each, as passes know them."""
    composite, _ = exported_program._split_decomp_table_to_cia_and_python_decomp({})
    return exported_program._override_composite_implicit_decomp(composite)


def _fix_floats(graph_module: GraphModule) -> None:
    """Under dynamic=True Python floats (the eps of a norm, a scale) are inputs: their values become guards."""
    for node in list(graph_module.graph.nodes):
        value = node.meta.get("example_value")
        if node.target == "item" and isinstance(value, torch.SymFloat):
            node.replace_all_uses_with(float(value))
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def _compile(
    graph_module: GraphModule, example_inputs: Sequence[Any], entry: CompiledGraph, chosen: Mapping[str, Any]
) -> Compiled:
    """Functional ATen in, a callable that takes a list of inputs out."""
    outputs = Outputs.of(graph_module)
    for node in graph_module.graph.nodes:
        # There are no views to keep apart in a functional graph, and a reshape bears any strides.
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    with _outside_of_tracing():
        entry.passes += _rewrite(graph_module, chosen["verify"] != "off")
        outputs.restore(graph_module)
    return executable(graph_module)


def _rewrite(graph_module: GraphModule, is_verified: bool) -> list[PassReport]:
    if not any(isinstance(_value(n), Tensor) for n in graph_module.graph.nodes if n.op == "placeholder"):
        return []
    proven: dict[str, Evidence] = {}
    reports: list[PassReport] = []
    # A mask of a length that is not fixed could not be proven for all: it depends on inputs, and is refused.
    settings = Settings(page_size=1, max_model_len=LARGEST_PROBE)
    for step in STEPS:
        report = run_pass(step.bind(settings), graph_module)
        done = [report]
        if report.changed and step.run is not canonicalize:
            done.append(run_pass(canonicalize, graph_module))
        if is_verified:
            context = f" (after: {', '.join(r.name for r in reports)})" if reports else ""
            for one in done:
                prove_report(one, proven, context)
        reports.append(report)
    return reports


@contextlib.contextmanager
def _outside_of_tracing() -> Iterator[None]:
    """Proofs and masks are computed with real numbers, here in the middle of AOTAutograd's tracing."""
    with _disable_current_modes(), no_python_dispatcher():
        yield


def _value(node: Node) -> Any:
    return node.meta.get("val")
