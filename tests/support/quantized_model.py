"""A tiny quantised Llama for a GPU, as a graph and as an artifact, and what each op of it must compute.

Import it only in a process started with TRITON_INTERPRET=1. Kernels are rendered and not compiled, which would take
twenty seconds: the interpreter needs their text alone.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import B200, H100, Launched, caches_of
from interpreted_cuda import MAPPED, InterpretingDriver
from numpy.typing import NDArray
from passed_on import PassedOn
from stages import copied
from tiny_llama import of_config
from torch import Tensor, fx
from torch.fx import GraphModule, Node
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.codegen.build_triton import constexprs
from octavo.codegen.kernel import Arg, Kernel, KernelSpec
from octavo.codegen.render import render
from octavo.compiler import nvfp4_weights
from octavo.compiler.artifact import Artifact
from octavo.compiler.build import build, pack
from octavo.compiler.capture import capture
from octavo.compiler.dims import DTYPE_NAMES
from octavo.compiler.expression import evaluate, holds
from octavo.compiler.nvfp4 import unswizzle
from octavo.compiler.options import CompileOptions, PageFormat
from octavo.compiler.pipeline import lower, settings_of
from octavo.compiler.precision import Format, PagePrecision, PrecisionPlan, ProductPrecision, QuantizedWeight
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.compiler.target import Target, load_target
from octavo.runtime.batch import Batch
from octavo.runtime.cuda import Device
from octavo.runtime.cuda_runner import CudaRunner

PAGE_SIZE, VOCAB, NUM_PAGES, MAX_LEN = 16, 96, 12, 128
DEVICES: dict[str, Device] = {
    "b200": B200, "h100": H100,
    "rtx_pro_6000": replace(B200, name="NVIDIA RTX PRO 6000", arch=120, sm_count=188, shared_bytes=101_376),
}  # fmt: skip
ELEMENTS = {"fp8": "fp8e4nv"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Format and outer scale of the input, by the product's part of a layer.
Formats = Mapping[str, tuple[Format, float | None]]


@functools.cache
def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_LEN, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return of_config(config).bfloat16().eval()


@functools.cache
def _lowered() -> GraphModule:
    captured, options = capture(tiny_model()), CompileOptions(target="b200")
    return lower(captured, options, settings_of(captured, options, PAGE_SIZE)).graph_module


def nearest(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
    """FP8 by row, NVFP4 with the scales that carry each block's largest element."""
    if format == "fp8":
        outer = weight.float().abs().amax(1) / 448
        return QuantizedWeight((weight.float() / outer[:, None]).to(torch.float8_e4m3fn), None, outer)
    step = nvfp4_weights.weight_outer_scale(name, weight.float())
    return QuantizedWeight(*nvfp4_weights.quantize_weight(weight.float(), step), step)


def quantized(formats: Formats, pages: PageFormat = "bf16") -> GraphModule:
    """The lowered graph with every product whose weight's name holds a key of `formats` quantised, and its pages."""
    graph_module = copied(_lowered())
    plan = PrecisionPlan(pages={0: PagePrecision(pages)})
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.octavo.linear.default):
        name = str(node.args[1].target)
        found = next((precision for part, precision in formats.items() if part in name), ("bf16", None))
        plan.products[name] = ProductPrecision(*found)
    quantize(graph_module, QuantSettings(plan, nearest, "swizzled_128x4", prove=None))
    return graph_module


def rendered(specs: Sequence[KernelSpec], target: Target, progress: Any) -> list[Kernel]:
    """In place of build_kernels: sources and launch records, without binaries."""
    return [Kernel(spec, render(spec), b"", _metadata(spec, target)) for spec in specs]


def _metadata(spec: KernelSpec, target: Target) -> dict[str, Any]:
    launch = {
        "function": spec.name, "arch": f"sm_{target.arch}a", "num_warps": spec.num_warps, "num_ctas": 1,
        "shared_bytes": 0, "tmem_columns": 0, "launch_pdl": False, "cooperative": False, "global_scratch": [0, 1],
        "profile_scratch": [0, 1], "parameters": [_parameter(arg) for arg in spec.args], "grid": list(spec.grid),
        "constexprs": constexprs(spec), "cubin_sha256": hashlib.sha256(b"").hexdigest(),
    }  # fmt: skip
    evidence: dict[str, Any] = {"registers": 0, "spill_bytes": 0, "census": {}, "compile_s": 0.0}
    return {"launch": launch, "evidence": evidence, "choice": {"refused": []}, "work": {}}


def _parameter(arg: Arg) -> dict[str, Any]:
    name, element = arg.name, ELEMENTS.get(arg.dtype, arg.dtype)
    if arg.kind != "descriptor":
        kind = f"*{element}" if arg.kind == "pointer" else element
        return {"name": name, "kind": arg.kind, "type": kind, "divisible_by_16": arg.is_divisible_by_16}
    return {
        "name": name, "kind": arg.kind, "type": f"tensordesc<{element}{list(arg.block)}>", "shape": list(arg.shape),
        "block": list(arg.block), "box": list(arg.block), "dtype": MAPPED[element], "swizzle": 0,
        "element_bytes": ITEM_BYTES[arg.dtype], "fp4_padded": False,
    }  # fmt: skip


def write_artifact(path: Path, graph_module: GraphModule, target: str) -> Artifact:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.compiler.build.build_kernels", rendered)
        built = build(graph_module, load_target(target), PAGE_SIZE)
    model = {
        "name": "tiny", "vocab_size": VOCAB, "num_layers": 1, "max_model_len": MAX_LEN, "max_batch_tokens": MAX_LEN,
        "eos_token_ids": [], "bos_token_id": None,
    }  # fmt: skip
    manifest = {"octavo_version": "0", "target": target, "options": {}, "model": model, "provenance": {}}
    return Artifact.open(pack(path, built, graph_module, manifest, {}, {}, {}))


class RecordingInterpreter(InterpretingDriver):
    """Keeps the workspace as each launch leaves it."""

    workspace: int = 0

    def __init__(self, artifact: Artifact, device: Device) -> None:
        super().__init__(artifact, device)
        self.left: list[tuple[Launched, NDArray[np.uint8]]] = []

    def execute(self, launched: Launched) -> None:
        super().execute(launched)
        if self.workspace:
            self.left.append((launched, self.at(self.workspace).copy()))


@dataclass
class Step:
    """What a run was given and what it made. made: name of a node -> its results, as its last kernel left them."""

    batch: Batch
    logits: NDArray[np.float32]
    made: dict[str, list[Tensor]]


class Served(PassedOn):
    """A runner of an artifact whose pages hold nan, with all that its steps made."""

    def __init__(self, artifact: Artifact, graph_module: GraphModule, graphs: bool = False) -> None:
        self.graph_module = graph_module
        self.driver = RecordingInterpreter(artifact, DEVICES[artifact.manifest["target"]])
        self.runner = CudaRunner(artifact, NUM_PAGES, max_requests=4, graphs=graphs, driver=self.driver)
        super().__init__(self.runner)
        self.driver.workspace = self.runner._workspace.address
        for cache in caches_of(self.runner, self.driver).values():
            cache[1:] = 0xFF
        self.model = artifact.model
        self.steps: list[Step] = []

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.driver.left.clear()
        logits = self.runner.run(batch).copy()
        self.steps.append(Step(batch, logits, {} if self.runner.graphs else self._made(batch)))
        return logits

    def _made(self, batch: Batch) -> dict[str, list[Tensor]]:
        """A launch is the node's that comes last in the graph of all whose buffers it names."""
        dims = {**batch.dims, "num_pages": NUM_PAGES}
        if dims["T"] == dims["R"]:  # padded to a bucket
            return {}
        steps = [step for step in self.runner.program.steps if holds(step.when, dims)]
        order = {node.name: place for place, node in enumerate(self.graph_module.graph.nodes)}
        buffers = {buffer.name: buffer for buffer in self.runner.program.of_kind("workspace")}
        made: dict[str, list[Tensor]] = {}
        for step, (launched, memory) in zip(steps, self.driver.left, strict=True):
            assert launched.function == step.kernel
            named = [str(arg).partition(".")[0] for arg in step.args if arg in buffers]
            owner = max(named, key=order.__getitem__)
            own = [name for name in buffers if name == owner or name.rpartition(".")[0] == owner]
            results = [name for name in own if name == owner or name.rpartition(".")[2].isdigit()]
            made[owner] = [_value(buffers[name], memory, dims) for name in results]
        return made


def _value(buffer: Any, memory: NDArray[np.uint8], dims: Mapping[str, int]) -> Tensor:
    shape = [evaluate(size, dims) for size in buffer.shape]
    start, size = evaluate(buffer.offset, dims), int(np.prod(shape)) * ITEM_BYTES[buffer.dtype]
    return torch.from_numpy(memory[start : start + size].copy()).view(DTYPES[buffer.dtype]).reshape(shape)


class Eager(fx.Interpreter):
    """Runs a graph on what the kernels made: compare(node, expected, made) for each node that a kernel serves."""

    def __init__(
        self,
        graph_module: GraphModule,
        step: Step,
        compare: Callable[[Node, list[Tensor], list[Tensor]], None],
    ) -> None:
        super().__init__(graph_module)
        self.step, self.compare = step, compare

    def run_node(self, n: Node) -> Any:
        expected = super().run_node(n)
        made = self.step.made.get(n.name)
        if n.op != "call_function" or made is None:
            return expected
        several = isinstance(expected, tuple | list)
        wanted = list(expected) if several else [expected]
        found = [part.reshape(want.shape) for part, want in zip(made, wanted, strict=True)]
        self.compare(n, wanted, found)
        return found if several else found[0]

    def inputs(self) -> Iterator[Tensor]:
        given = {name: torch.from_numpy(array.copy()) for name, array in self.step.batch.inputs.items()}
        assert isinstance(self.module, GraphModule)
        for node in self.module.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            if node.name in given:
                is_row = value.dim() > given[node.name].dim()
                yield given[node.name][None] if is_row else given[node.name]
            else:
                yield torch.zeros(NUM_PAGES, *value.shape[1:], dtype=value.dtype)


def scales_by_row(flat: Tensor, codes: Tensor) -> Tensor:
    """The linear scales of the rows of codes (1, T, K / 2)."""
    return unswizzle(flat, codes.shape[1], codes.shape[2] // 8)
