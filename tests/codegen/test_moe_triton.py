"""The launches of routers and mixtures of experts: which, when, with what tiles; and that they build for b200."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lowered import LoweredGraph
from torch import fx

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.evidence import evidence_row
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.moe import Mixture, Router
from octavo.codegen.moe_triton import moe_spec, router_spec
from octavo.codegen.select import Selection, select
from octavo.compiler.errors import CodegenError
from octavo.compiler.expression import evaluate, holds
from octavo.compiler.target import load_target

B200 = load_target("b200")
BF16, FP32 = torch.bfloat16, torch.float32


def moe_node(
    hidden: int = 64, intermediate: int = 48, experts: int = 8, dtype: torch.dtype = BF16, bias: bool = False
) -> fx.Node:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (hidden,), dtype)
    slots, weights = graph.tokens("slots", (2,), torch.int64), graph.tokens("weights", (2,), FP32)
    shapes = {"gate_up": (2 * intermediate, hidden), "down": (hidden, intermediate)}
    values: list[fx.Node | None] = []
    for name, shape in shapes.items():
        values.append(graph.weight(name, torch.zeros(experts, *shape, dtype=dtype)))
        values.append(graph.weight(f"{name}_bias", torch.zeros(experts, shape[0])) if bias else None)
    return graph.call("moe", x, slots, weights, *values, "swiglu_oai", 7.0, 1.702)


def choose(node: fx.Node, arch: int = 100) -> Selection:
    return select(node, replace(B200, arch=arch))


def launched(spec: KernelSpec, tokens: int) -> list[KernelSpec]:
    return [kernel for kernel in spec.launches if holds(kernel.when, {"T": tokens})]


def test_a_step_sorts_multiplies_twice_and_adds_up() -> None:
    spec = choose(moe_node()).spec
    for tokens, block_m in ((1, 16), (128, 16), (129, 128), (5000, 128)):
        kernels = launched(spec, tokens)
        assert [kernel.template.split("/")[1].split(".")[0] for kernel in kernels] == [
            "moe_sort", "moe_linear", "moe_linear", "moe_combine",
        ]  # fmt: skip
        assert [dict(kernel.params)["BLOCK_M"] for kernel in kernels[1:3]] == [block_m, block_m]
    assert [name for name, _, _ in spec.scratch] == ["order", "starts", "hidden", "parts"]


@pytest.mark.parametrize("tokens", [1, 3, 64, 128, 129, 1000])
def test_the_grid_has_a_program_for_every_tile(tokens: int) -> None:
    """The most tiles that any routing makes: one pair in each expert but one, or all spread to just past a tile."""
    experts, top_k = 8, 2
    spec = moe_spec(Mixture("T", "bf16", "", "", experts, top_k, 64, 48, 64, "silu", 0.0, 0.0), is_tma=True)
    _, *products, _ = launched(spec, tokens)
    for kernel in products:
        block_m = dict(kernel.params)["BLOCK_M"]
        assert isinstance(block_m, int)
        most, pairs = 0, tokens * top_k
        for used in range(1, min(experts, pairs) + 1):
            most = max(most, used + (pairs - used) // block_m)
        programs = evaluate(kernel.grid[1], {"T": tokens})
        assert most <= programs <= most + 1


def test_costs_count_weights_of_the_experts_that_can_be_reached() -> None:
    spec = moe_spec(Mixture("T", "bf16", "", "", 8, 2, 64, 48, 32, "silu", 0.0, 0.0), is_tma=True)
    for tokens, reached in ((1, 2), (3, 6), (4, 8), (50, 8)):
        _, gate_up, down, _ = launched(spec, tokens)
        pairs, sizes = 2 * tokens, {"T": tokens}
        assert evaluate(gate_up.bytes, sizes) == tokens * (128 + 8) + pairs * 96 + reached * 96 * 64 * 2
        assert evaluate(down.bytes, sizes) == pairs * (96 + 4 + 128) + reached * 32 * 48 * 2
        assert evaluate(gate_up.flops, sizes) == pairs * 2 * 96 * 64
        assert evaluate(down.flops, sizes) == pairs * 2 * 32 * 48


def test_weights_and_arguments_reach_the_kernels() -> None:
    spec = choose(moe_node(bias=True)).spec
    _, gate_up, down, combine = launched(spec, 1)
    names = [[arg.name for arg in kernel.args] for kernel in (gate_up, down, combine)]
    assert names == [
        ["x", "gate_up", "gate_up_bias", "order", "starts", "hidden"],
        ["hidden", "down", "down_bias", "order", "starts", "parts"],
        ["parts", "experts", "weights", "out"],
    ]
    assert [(arg.dtype, arg.shape) for arg in (gate_up.args[1], down.args[1])] == [
        ("bf16", (8 * 96, 64)),
        ("bf16", (8 * 64, 48)),
    ]
    assert (gate_up.args[2].dtype, down.args[-1].dtype, combine.args[-1].dtype) == ("fp32", "fp32", "bf16")
    shared = ("N", "K", "ROWS", "SHARE", "limited", "activation")
    assert [dict(gate_up.params)[name] for name in shared] == [48, 64, 96, 2, True, "swiglu_oai"]
    assert [dict(down.params)[name] for name in shared] == [64, 48, 64, 1, False, ""]


@pytest.mark.parametrize(
    ("node", "arch", "reason"),
    [
        (lambda: moe_node(hidden=68), 100, "TMA needs rows of a multiple of 16 bytes, got hidden 68 (136 bytes)"),
        (lambda: moe_node(intermediate=45), 100, "TMA needs .* got intermediate 45 (90 bytes)"),
        (lambda: moe_node(dtype=FP32), 100, "dtype must be bf16, got fp32"),
        (moe_node, 80, "TMA needs sm_90 or newer, b200 is sm_80"),
    ],
    ids=["hidden", "intermediate", "fp32", "sm_80"],
)  # fmt: skip
def test_tma_row_refuses_with_the_numbers(node: Callable[[], fx.Node], arch: int, reason: str) -> None:
    chosen = choose(node(), arch)
    assert chosen.row == "moe_pointer"
    ((row, why),) = chosen.skipped
    assert row == "moe_tma" and all(part in why for part in reason.split(".*"))
    assert {arg.kind for kernel in chosen.spec.launches for arg in kernel.args} == {"pointer", "scalar"}


def test_too_many_experts_are_refused() -> None:
    with pytest.raises(CodegenError, match="at most 4096 experts, got 5000"):
        choose(moe_node(8, 8, 5000))
    graph = LoweredGraph()
    graph.input("input_ids")
    node = graph.call("router", graph.tokens("x", (5000,), BF16), None, 2, "softmax", True, 1, 1, "max", 1.0)
    with pytest.raises(CodegenError, match="at most 4096 experts, got 5000"):
        choose(node)


def test_kernels_build_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tall tiles of bf16 use the tensor core, short ones stream weights through tensor maps or in wide pieces."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    oai = Mixture("T", "bf16", "bf16", "bf16", 32, 4, 2880, 2880, 2880, "swiglu_oai", 7.0, 1.702)
    deepseek = Router("T", "bf16", "fp32", 256, 8, "sigmoid", True, 8, 4, "top2_sum", 2.5)
    pointers = moe_spec(replace(oai, dtype="fp32", activation="gelu"), is_tma=False).launches[1:5]
    specs = [router_spec(deepseek), *moe_spec(oai, is_tma=True).launches, *pointers]
    rows = [evidence_row(kernel) for kernel in build_kernels(specs, B200)]
    assert [(row["spill_bytes"], row["refused"]) for row in rows] == [(0, 0)] * len(specs)
    opcodes = [str(row["key_opcodes"]) for row in rows]
    assert all("UTMALDG" in found for found in opcodes[2:6])
    assert ["UTCHMMA" in found for found in opcodes[2:6]] == [False, True, False, True]
    assert all("LDGSTS" in found and "UTMALDG" not in found for found in opcodes[7:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_odd_sizes_have_a_form_that_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Tall tiles, whose elements come one by one."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    odd = Mixture("T", dtype, "", "", 3, 1, 1031, 517, 1031, "relu", 0.5, 0.0)
    _, _, gate_up, _, down, _ = moe_spec(odd, is_tma=False).launches
    for kernel in build_kernels([gate_up, down], B200):
        assert evidence_row(kernel)["spill_bytes"] == 0
