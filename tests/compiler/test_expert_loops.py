"""Loops over experts, which torch.export cannot follow, are captured as they compute, once for all, or refused."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused import around, assert_same, fused
from mixture_loops import LOOPS, Apart, DeepSeekLoop, DenseLoop, Expert, MixtralLoop
from mixtures import TOP
from stages import calls
from torch import Tensor, nn

from octavo.compiler.capture import capture
from octavo.compiler.errors import CaptureError
from octavo.compiler.lazy_values import Count

octavo = torch.ops.octavo
OFTEN = ("mixtral", "repeated", "deepseek-v3")
OF_SELECTED = ("softmax_selected", False, 1, 1, "top2_sum", 1.0)
ROUTING = {
    "gpt-oss": OF_SELECTED,
    "lit": OF_SELECTED,
    "deepseek-v3": ("sigmoid", True, 4, 2, "top2_sum", 2.5),
}


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in LOOPS]
)
def test_every_loop_becomes_one_mixture_and_its_router(name: str) -> None:
    graph_module, mixtures, routers = fused(LOOPS[name])
    assert (mixtures.matched, mixtures.rejected, routers.matched, routers.rejected) == (1, [], 1, [])
    (moe,), (router,) = (calls(graph_module, op) for op in (octavo.moe.default, octavo.router.default))
    assert router.args[2:] == (TOP, *ROUTING.get(name, ("softmax", True, 1, 1, "top2_sum", 1.0)))
    assert (router.args[1] is None) == (name != "deepseek-v3")
    assert moe.args[7:] == (("swiglu_oai", 7.0, 1.702) if name == "gpt-oss" else ("silu", 0.0, 1.0))


def test_experts_lend_their_weights_and_get_them_back() -> None:
    model = around(MixtralLoop)
    before = dict(model.named_parameters())
    graph_module = capture(model).graph_module
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert list(model.state_dict()) == list(before)
    assert not any("forward" in vars(m) or "weight" in vars(m) for m in model.modules())
    held = {str(n.target): n.meta["val"].shape for n in graph_module.graph.find_nodes(op="get_attr")}
    stacks = {n: tuple(shape) for n, shape in held.items() if "experts" in n}
    assert stacks == {
        "mixture.experts.w1.weight": (6, 40, 64), "mixture.experts.w2.weight": (6, 64, 40),
        "mixture.experts.w3.weight": (6, 40, 64),
    }  # fmt: skip
    assert torch.equal(
        graph_module.get_buffer("mixture.experts.w2.weight")[3], before["mixture.experts.3.w2.weight"]
    )


def test_two_experts_speak_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Expert] = []
    forward = Expert.forward

    def counted(self: Expert, x: Tensor) -> Tensor:
        runs.append(self)
        return forward(self, x)

    monkeypatch.setattr(Expert, "forward", counted)
    nodes = {}
    for experts in (8, 32):
        graph_module = capture(around(functools.partial(DeepSeekLoop, experts))).graph_module
        nodes[experts], ran = len(graph_module.graph.nodes), len(runs)
        assert ran == 2, experts
        runs.clear()
    assert nodes[8] == nodes[32]


def test_experts_of_different_sizes_are_all_captured() -> None:
    class Unequal(DenseLoop):
        def __init__(self) -> None:
            super().__init__(experts=3)
            self.experts[1] = Expert(inner=24)

    model = around(Unequal)
    graph_module = capture(model).graph_module
    assert_same(graph_module, model)
    assert (
        len([n for n in graph_module.graph.find_nodes(op="get_attr") if "experts.1." in str(n.target)]) == 3
    )


def test_equal_modules_that_are_no_experts_keep_their_meaning() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Expert() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = x + part(x).tanh()
            return x

    model = around(Chain)
    assert_same(capture(model).graph_module, model)


def looping(body: Callable[..., Any]) -> Callable[[], nn.Module]:
    """A mixture whose loop adds what `body` makes of an expert, its rows, weights and the tensor to add to."""

    class Loop(Apart):
        def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
            result = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                token, slot = torch.where(chosen == number)
                made = body(expert, x[token], weights[token, slot, None], token, result)
                if made is not None:
                    result.index_add_(0, token, made)
            return result

    return Loop


def capacity(expert: Any, rows: Tensor, weights: Tensor, token: Tensor, result: Tensor) -> Tensor | None:
    return expert(rows) * weights if token.numel() < 3 else None


def running_sum(expert: Any, rows: Tensor, weights: Tensor, token: Tensor, result: Tensor) -> Tensor:
    made: Tensor = expert(rows.cumsum(0)) * weights
    return made


def over_rows(expert: Any, rows: Tensor, weights: Tensor, token: Tensor, result: Tensor) -> Tensor:
    made: Tensor = expert(rows.softmax(0)) * weights
    return made


def overwritten(expert: Any, rows: Tensor, weights: Tensor, token: Tensor, result: Tensor) -> None:
    result[token] = expert(rows) * weights


def reads_back(expert: Any, rows: Tensor, weights: Tensor, token: Tensor, result: Tensor) -> Tensor:
    made: Tensor = expert(rows + result[token]) * weights
    return made


def branches(expert: Any, rows: Tensor, weights: Tensor, token: Tensor, result: Tensor) -> Tensor | None:
    made: Tensor = expert(rows) * weights
    return made if bool(made.sum() > 1.0) else None


def other_rows(expert: Any, rows: Tensor, weights: Tensor, token: Tensor, result: Tensor) -> Tensor:
    made: Tensor = expert(rows) * weights
    return made.flip(0)


REFUSED: dict[Callable[..., Any], str] = {
    capacity: "the number of tokens that an expert gets is compared with 3",
    running_sum: "cumsum of what an expert computes for the tokens that chose it",
    over_rows: "softmax works along the rows that an expert gets",
    overwritten: "rows of the result are overwritten by what an expert computes; add to them",
    reads_back: "an expert reads rows that other experts were added to",
    branches: "a branch depends on gt of what tokens chose; only whether any did may be asked",
    other_rows: "flip of what an expert computes for the tokens that chose it",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_refuses_what_it_cannot_follow_by_name_and_place(body: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError) as error:
        capture(around(looping(body)))
    assert REFUSED[body] in str(error.value)
    assert " in mixture at " in str(error.value)


@pytest.mark.parametrize(("question", "answer"), [
    (lambda n: n == 0, False), (lambda n: n != 0, True), (lambda n: n > 0, True), (lambda n: n < 1, False),
    (lambda n: n >= 1, True), (lambda n: n <= 0, False), (bool, True),
])  # fmt: skip
def test_some_rows_are_more_than_none(question: Callable[[int], bool], answer: bool) -> None:
    assert question(Count(5)) is answer


def test_more_about_a_number_of_rows_is_not_known() -> None:
    questions: list[Callable[[int], bool]] = [lambda n: n == 4, lambda n: n > 1, lambda n: n <= 7]
    for question in questions:
        with pytest.raises(CaptureError, match="the number of tokens that an expert gets is compared with"):
            question(Count(5))
