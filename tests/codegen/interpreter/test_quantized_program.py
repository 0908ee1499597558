"""Quantised models in the kernels of GPU targets, from the lowered graph to tokens: every op as its eager reference."""

from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_model import (
    PAGE_SIZE,
    VOCAB,
    Eager,
    Formats,
    Served,
    Step,
    quantized,
    scales_by_row,
    write_artifact,
)
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.codegen.model_shapes import ModelShape, kernel_set
from octavo.compiler.dims import dtype_name
from octavo.compiler.errors import CodegenError
from octavo.compiler.graph_model import GraphModel
from octavo.compiler.legality import named_arguments
from octavo.compiler.target import load_target
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

PROMPTS = [[5, 6, 7], list(range(20, 37)), [90]]
# Largest difference to the reference, relative to the largest element: sums in another order, then one rounding.
BOUNDS = {"fp32": 2.0**-18, "bf16": 2.0**-8}
# Weights of an attention are rounded to bf16, before sums are.
ATTENTION = 2 * BOUNDS["bf16"]
# Of a norm that is summed in another order, an element in so many is rounded to another bf16 number, and then perhaps
# to another code.
FEW_CODES = 0.005

STATIC: Formats = {"proj": ("nvfp4", 0.01)}
BY_TOKEN: Formats = {"proj": ("nvfp4", None)}
FP8: Formats = {"proj": ("fp8", None)}
FP8_STATIC: Formats = {"proj": ("fp8", 0.1)}
WEIGHT_ONLY: Formats = {"proj": ("nvfp4_weight_only", None)}
# One product of each kind in a layer: qkv, the attention's output, gate and up, down.
MIXED: Formats = {
    "q_proj": ("nvfp4", 0.01), "o_proj": ("nvfp4", None), "gate_proj": ("fp8", None),
    "down_proj": ("nvfp4_weight_only", None),
}  # fmt: skip


class Compared:
    """Compares what kernels made with the eager references of their ops, and counts the ops."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def __call__(self, node: Node, expected: list[Tensor], made: list[Tensor]) -> None:
        op = str(node.target).split(".")[1]
        self.ops.append(op)
        given = named_arguments(node)
        is_exact = op == "quantize"
        for index, (want, got) in enumerate(zip(expected, made, strict=True)):
            if index == 1 and given.get("format") == "nvfp4" and given["layout"] == "swizzled_128x4":
                want, got = (scales_by_row(part, made[0]) for part in (want, got))
            if want.element_size() == 1:
                share = (want.view(torch.uint8) != got.view(torch.uint8)).float().mean()
                assert share <= (0 if is_exact else FEW_CODES), f"{node}: {share:.4f} of the codes differ"
            else:
                bound = ATTENTION if op == "paged_attention" else BOUNDS[dtype_name(got)]
                self.close(node, want, got, 0.0 if is_exact else bound)

    def close(self, node: object, want: Tensor, got: Tensor, bound: float) -> None:
        error = (want.double() - got.double()).abs().max() / want.double().abs().max()
        assert error <= bound, f"{node}: error {float(error):.2e} above {bound:.2e}"


def check(served: Served, step: Step) -> list[str]:
    compared = Compared()
    eager = Eager(served.graph_module, step, compared)
    with torch.no_grad():
        (logits,) = eager.run(*eager.inputs())
    compared.close("logits", logits[0], torch.from_numpy(step.logits), BOUNDS["bf16"])
    return compared.ops


def served(path: Path, formats: Formats, target: str, graphs: bool = False) -> Served:
    graph_module = quantized(formats)
    return Served(write_artifact(path / "artifact", graph_module, target), graph_module, graphs)


def generate(one: Served, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    engine = Engine(one, one.model, max_requests=4)
    return [list(a.token_ids) for a in engine.generate(prompts, SamplingParams(max_tokens=max_tokens))]


def eager_logits(graph_module: GraphModule, tokens: list[int]) -> Tensor:
    """(T, vocab) of one sequence in one step of the graph."""
    with torch.no_grad():
        outputs = GraphModel(graph_module, PAGE_SIZE)(torch.tensor([tokens]), torch.arange(len(tokens))[None])
    logits: Tensor = outputs[0]
    return logits[0].float()


def test_every_op_of_a_model_of_all_formats_is_its_reference(tmp_path: Path) -> None:
    one = served(tmp_path, MIXED, "b200")
    generate(one, PROMPTS, 1)
    ops = check(one, one.steps[0])
    assert {"nvfp4_linear", "fp8_linear", "nvfp4_weight_linear"} <= set(ops)
    assert sum("quantize" in op for op in ops) == 3


def test_greedy_tokens_and_logits_of_steps_in_graphs(tmp_path: Path) -> None:
    """Activations with static scales: the kernels' logits are the quantised graph's, whatever is batched with them."""
    one = served(tmp_path, STATIC, "b200", graphs=True)
    answers = generate(one, PROMPTS, 3)
    assert one.driver.num_graph_launches > 0
    steps = np.stack([step.logits for step in one.steps], 1)
    for prompt, answer, found in zip(PROMPTS, answers, torch.from_numpy(steps), strict=True):
        expected = eager_logits(one.graph_module, prompt + answer)[len(prompt) - 1 : -1]
        largest = float(expected.abs().max())
        assert (found - expected).abs().max() <= 0.005 * largest
        chosen = expected[torch.arange(3), torch.tensor(answer)]
        assert (expected.max(-1).values - chosen <= 2 * 0.005 * largest).all()


@pytest.mark.parametrize(
    ("formats", "precision", "target"),
    [(STATIC, "nvfp4", "b200"), (WEIGHT_ONLY, "nvfp4", "h100"), (FP8, "fp8", "rtx_pro_6000")],
)
def test_passes_choose_the_kernels_that_are_built_for_published_sizes(
    tmp_path: Path, formats: Formats, precision: str, target: str
) -> None:
    artifact = write_artifact(tmp_path / "artifact", quantized(formats, "fp8"), target)
    shape = ModelShape("tiny", 64, 1, 4, 2, 16, VOCAB, 128)
    expected = {spec.name for spec in kernel_set(shape, precision, load_target(target), PAGE_SIZE)}
    sampling = {name for name in expected if name.startswith("argmax")}  # of no graph
    assert {step.kernel for step in artifact.program.steps} == expected - sampling


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "target"),
    [
        (STATIC, "b200"), (STATIC, "rtx_pro_6000"), (BY_TOKEN, "b200"), (BY_TOKEN, "rtx_pro_6000"), (FP8, "b200"),
        (FP8, "h100"), (FP8_STATIC, "b200"), (FP8_STATIC, "h100"), (WEIGHT_ONLY, "b200"), (WEIGHT_ONLY, "h100"),
        (WEIGHT_ONLY, "rtx_pro_6000"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_tokens", [5, 21, 70])
def test_every_op_is_its_reference(tmp_path: Path, formats: Formats, target: str, num_tokens: int) -> None:
    """Steps of at most 8, 16 and 64 rows, and of more, have kernels of their own."""
    one = served(tmp_path, formats, target)
    tokens = torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    generate(one, [tokens], 1)
    assert len(check(one, one.steps[0])) > 10


@pytest.mark.parametrize(
    ("formats", "reason"),
    [(STATIC, "sm_90 has no FP4 tensor core; weight-only products serve: keep x in bf16")],
)
def test_what_a_target_has_no_kernel_for(tmp_path: Path, formats: Formats, reason: str) -> None:
    with pytest.raises(CodegenError, match=reason):
        write_artifact(tmp_path / "artifact", quantized(formats), "h100")
