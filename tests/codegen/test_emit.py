"""A small model through memory plan, selection, emission and build: the step equals the graph run eagerly."""

import ctypes
import operator
import re
from dataclasses import replace

import pytest
import torch
from cpp_kernels import RUNNABLE
from lowered import LoweredGraph
from torch import Tensor, fx

from octavo.codegen.build_cpp import build_program, program_source
from octavo.codegen.emit import emit
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.row import op_name
from octavo.codegen.select import select
from octavo.compiler.errors import CodegenError
from octavo.compiler.expression import evaluate
from octavo.compiler.program import DIMS, Program
from octavo.compiler.target import load_target
from octavo.passes.plan_memory import plan_memory

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB, PAGE = 48, 3, 1, 16, 80, 61, 16
DTYPES = (torch.float32, torch.bfloat16)


def small_model(dtype: torch.dtype, num_layers: int = 2) -> fx.GraphModule:
    """A Llama-shaped graph with tied embeddings, a bias in the last projection, and a view of the logits."""
    torch.manual_seed(0)
    g = LoweredGraph()
    names = ("input_ids", "positions", "slot_mapping", "page_table", "seq_lens", "cu_seqlens_q", "logit_rows")
    ids, positions, slots, *pages, logit_rows = (g.input(name) for name in names)
    caches = [
        [g.cache(f"{x}_cache_{i}", KV_HEADS, PAGE, HEAD_DIM, dtype) for x in "kv"] for i in range(num_layers)
    ]

    def weight(name: str, *shape: int) -> fx.Node:
        return g.weight(name, (torch.randn(shape) * shape[-1] ** -0.5).to(dtype))

    def normed(name: str, x: fx.Node, residual: fx.Node) -> tuple[fx.Node, fx.Node]:
        both = g.call("add_rms_norm", x, residual, g.weight(name, torch.rand(HIDDEN) + 0.5), 1e-5)
        return g.function(operator.getitem, both, 0), g.function(operator.getitem, both, 1)

    angles = torch.arange(64)[:, None] * torch.rand(HEAD_DIM // 2).repeat(2)
    tables = [g.weight("cos", angles.cos()), g.weight("sin", angles.sin())]
    embeddings = weight("embed.weight", VOCAB, HIDDEN)
    total = g.call("embedding", ids, embeddings)
    x = g.call("rms_norm", total, g.weight("norm.first", torch.rand(HIDDEN) + 0.5), 1e-5)
    for i in range(num_layers):
        qkv = g.call("linear", x, weight(f"layers.{i}.qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN))
        q = g.call("rope_kv_write", qkv, *tables, positions, slots, *caches[i], HEADS)
        x = g.call("paged_attention", q, *caches[i], *pages, None, HEAD_DIM**-0.5)
        x = g.function(torch.ops.aten.reshape.default, x, [1, -1, HEADS * HEAD_DIM])
        x = g.call("linear", x, weight(f"layers.{i}.out", HIDDEN, HEADS * HEAD_DIM))
        x, total = normed(f"layers.{i}.norm", x, total)
        x = g.call("act_mul", g.call("linear", x, weight(f"layers.{i}.gate_up", 2 * WIDTH, HIDDEN)), "silu")
        x = g.call("linear", x, weight(f"layers.{i}.down", HIDDEN, WIDTH), weight(f"layers.{i}.bias", HIDDEN))
        x, total = normed(f"layers.{i}.norm_out", x, total)
    tied = g.weight("head.weight", g.module.get_buffer("embed.weight"))
    logits = g.call("linear", g.call("gather_logits", x, logit_rows), tied)
    return g.finish(g.function(torch.ops.aten.view.default, logits, [1, -1, VOCAB]))


def specs_of(module: fx.GraphModule) -> dict[fx.Node, KernelSpec]:
    target = load_target("cpu")
    return {node: select(node, target).spec for node in module.graph.nodes if op_name(node)}


def compiled(module: fx.GraphModule) -> tuple[Program, dict[fx.Node, KernelSpec]]:
    specs = specs_of(module)
    return emit(module, specs, plan_memory(module.graph), PAGE), specs


def step_inputs(num_pages: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Three requests: a prefill of 20, a token after 5, a chunk of 3 after 30; older keys are cached."""
    new, lengths = torch.tensor([20, 1, 3]), torch.tensor([20, 6, 33])
    table = torch.tensor([[7, 2, 0], [4, 0, 0], [1, 9, 3]], dtype=torch.int32)
    positions = torch.cat(
        [torch.arange(n - k, n) for k, n in zip(new.tolist(), lengths.tolist(), strict=True)]
    )
    request = torch.repeat_interleave(torch.arange(3), new)
    torch.manual_seed(1)
    inputs = {
        "input_ids": torch.randint(0, VOCAB, (24,)),
        "positions": positions,
        "slot_mapping": table[request, positions // PAGE].long() * PAGE + positions % PAGE,
        "page_table": table,
        "seq_lens": lengths.int(),
        "cu_seqlens_q": torch.tensor([0, 20, 21, 24], dtype=torch.int32),
        "logit_rows": torch.tensor([19, 20, 23]),
    }
    for name in ("k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"):
        inputs[name] = torch.randn(num_pages, KV_HEADS, PAGE, HEAD_DIM).to(dtype)
    return inputs


def run_step(
    library: ctypes.CDLL,
    program: Program,
    module: fx.GraphModule,
    inputs: dict[str, Tensor],
    num_threads: int = 2,
) -> Tensor:
    """One call of octavo_step, with the workspace full of NaN."""
    requests, columns = inputs["page_table"].shape
    dims: dict[str, int] = dict(
        zip(DIMS, (24, requests, 3, columns, inputs["k_cache_0"].shape[0], 0), strict=True)
    )
    workspace = torch.full((evaluate(program.workspace, dims) // 4,), float("nan"))
    logits = torch.zeros(3, VOCAB)
    tensors = []
    for buffer in program.buffers:
        if buffer.kind == "weight":
            tensors.append(operator.attrgetter(buffer.name)(module))
        elif buffer.kind != "workspace":
            tensors.append(logits if buffer.kind == "output" else inputs[buffer.name])
    addresses = (ctypes.c_void_p * (len(tensors) + 1))(*(t.data_ptr() for t in (*tensors, workspace)))
    assert library.octavo_step((ctypes.c_int64 * len(DIMS))(*dims.values()), addresses, num_threads, 0) == 0
    return logits


@pytest.mark.parametrize("features", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_equals_the_graph(features: str, dtype: torch.dtype) -> None:
    module = small_model(dtype)
    program, specs = compiled(module)
    library = ctypes.CDLL(str(build_program(program, specs.values(), features)))
    inputs, eager_inputs = step_inputs(10, dtype), step_inputs(10, dtype)
    logits = run_step(library, program, module, inputs)
    leading = {"input_ids", "positions"}
    with torch.no_grad():
        (expected,) = module(
            *(value[None] if name in leading else value for name, value in eager_inputs.items())
        )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert (logits - expected[0].float()).abs().max() < tolerance
    for name in ("k_cache_1", "v_cache_1"):
        assert (inputs[name].float() - eager_inputs[name].float()).abs().max() < tolerance
    assert torch.equal(run_step(library, program, module, step_inputs(10, dtype), 1), logits)


def test_program_lists_every_buffer_once() -> None:
    module = small_model(torch.bfloat16)
    program, _ = compiled(module)
    names = [buffer.name for buffer in program.buffers]
    assert len(set(names)) == len(names)
    assert [buffer.name for buffer in program.of_kind("cache")] == [
        "k_cache_0",
        "v_cache_0",
        "k_cache_1",
        "v_cache_1",
    ]
    assert "embed.weight" in names and "head.weight" not in names  # tied
    (logits,) = program.of_kind("output")
    assert (logits.dtype, logits.shape) == ("fp32", ("L", VOCAB))
    kinds = [buffer.kind for buffer in program.buffers]
    assert kinds == sorted(kinds, key=("input", "cache", "weight", "output", "workspace").index)
    sizes = {buffer.name: buffer.shape for buffer in program.buffers}
    assert sizes["page_table"] == ("R", "P") and sizes["k_cache_0"] == ("num_pages", KV_HEADS, PAGE, HEAD_DIM)
    assert all(isinstance(b.offset, str) and b.offset.endswith(" * T") for b in program.of_kind("workspace"))


def test_text_holds_a_kernel_once_however_many_layers() -> None:
    texts = {}
    for num_layers in (1, 3):
        program, specs = compiled(small_model(torch.float32, num_layers))
        texts[num_layers] = program_source(program, specs.values())
    defined = {n: re.findall(r"^static int (\w+)\(", text, re.M) for n, text in texts.items()}
    assert defined[1] == defined[3] and len(set(defined[1])) == len(defined[1])
    assert (
        len(re.findall(r"if \(int error = ", texts[3])) - len(re.findall(r"if \(int error = ", texts[1]))
        == 2 * 9
    )


def test_says_which_kernel_is_missing() -> None:
    module = small_model(torch.float32, 1)
    memory, specs = plan_memory(module.graph), specs_of(module)
    node = next(node for node in module.graph.nodes if op_name(node) == "act_mul")
    del specs[node]
    with pytest.raises(
        CodegenError, match=f"no kernel was chosen for octavo.act_mul.default .node {node.name}"
    ):
        emit(module, specs, memory, PAGE)


def test_says_when_memory_was_not_planned() -> None:
    module = small_model(torch.float32, 1)
    memory, specs = plan_memory(module.graph), specs_of(module)
    del next(node for node in module.graph.nodes if op_name(node) == "act_mul").meta["buffer"]
    with pytest.raises(CodegenError, match="run plan_memory first"):
        emit(module, specs, memory, PAGE)


def test_refuses_a_kernel_that_disagrees_with_its_buffer() -> None:
    graph = LoweredGraph()
    ids = graph.input("input_ids")
    module = graph.finish(
        graph.call("embedding", ids, graph.weight("w", torch.zeros(5, 8, dtype=torch.bfloat16)))
    )
    memory = plan_memory(module.graph)
    with pytest.raises(CodegenError, match=r"embedding.* reads or writes out as bf16, but logits is fp32"):
        emit(module, specs_of(module), memory, PAGE)


def test_binds_launches_and_scratch_of_one_node() -> None:
    module = small_model(torch.float32, 1)
    memory, specs = plan_memory(module.graph), specs_of(module)
    node = next(node for node in module.graph.nodes if op_name(node) == "act_mul")
    first = specs[node]
    scratch_arg = replace(first.args[1], name="partial_ptr")
    second = replace(first, args=(scratch_arg, first.args[1], first.args[2]), when="T > 16")
    specs[node] = replace(first, when="T <= 16", also=(second,), scratch=(("partial", "fp32", ("R", 3)),))
    program = emit(module, specs, memory, PAGE)
    steps = [step for step in program.steps if step.kernel in (first.name, second.name)]
    assert [step.when for step in steps] == ["T <= 16", "T > 16"]
    assert steps[1].args[0] == f"{node.name}.partial"
    (scratch,) = [b for b in program.buffers if b.name == f"{node.name}.partial"]
    dims = dict(T=5, R=11, L=1, P=1, num_pages=1)
    assert evaluate(str(scratch.offset), dims) == memory.peak * 5
    assert evaluate(program.workspace, dims) == memory.peak * 5 + 192  # 11 * 3 * 4 bytes in lines of 64
    text = program_source(program, [*specs.values(), second])
    assert f"if (T <= 16)\n    if (int error = {first.name}(" in text
    assert f"if (T > 16)\n    if (int error = {second.name}(w_{node.name}_partial," in text
    assert f"workspace + {memory.peak} * T);" in text
