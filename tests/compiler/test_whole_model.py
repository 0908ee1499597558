"""The last proof sees what no site can show: kernels, the memory plan, what a pass did besides its sites."""

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from models import LONGEST, SPELLINGS, TinyLM, tiny
from numpy.typing import NDArray
from passed_on import PassedOn
from stages import compiled
from torch.fx import GraphModule

import octavo
from octavo.compiler import whole_model
from octavo.compiler.errors import PassError
from octavo.compiler.pipeline import PIPELINE, Step
from octavo.compiler.whole_model import BOUND, SHARE, check_quantized_model, check_whole_model
from octavo.passes.eliminate_dead_code import eliminate_dead_code
from octavo.passes.rewrite import held
from octavo.passes.rule import PassReport
from octavo.runtime.batch import Batch


class Disturbed(PassedOn):
    """A runner that adds `amount` of the largest logit to one logit of one row."""

    def __init__(self, name: str, amount: float, step: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(compiled(name, dtype).runner(64))
        self.amount, self.step, self.batches = amount, step, list[Batch]()

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.batches.append(batch)
        logits = self.inner.run(batch).copy()
        if len(self.batches) == self.step + 1:
            logits[-1, 7] += self.amount * np.abs(logits[-1]).max()
        return logits


def test_accepts_the_artifact_with_its_error() -> None:
    runner = Disturbed("llama", 0.0)
    error = check_whole_model(tiny("llama"), compiled("llama").artifact, runner)
    assert 0 < error < 1e-5 < BOUND["fp32"]
    first, second = runner.batches
    assert first.seq_lens.tolist() == [4, 13, 5]
    assert second.seq_lens.tolist() == [9, 14]  # and most of what these read, the first step wrote
    assert second.cu_seqlens_q.tolist() == [0, 5, 6]


@pytest.mark.parametrize("step", [0, 1])
def test_refuses_one_wrong_logit_with_its_size(step: int) -> None:
    with pytest.raises(PassError) as raised:
        check_whole_model(tiny("llama"), compiled("llama").artifact, Disturbed("llama", 0.01, step))
    text = str(raised.value)
    assert text.startswith("verify: logits of the artifact differ from the model's by ")
    assert "bound 1e-04" in text and "`octavo bisect`" in text


@pytest.mark.parametrize(("amount", "is_accepted"), [(0.15, True), (0.5, False)])
def test_a_model_in_bf16_that_is_far_from_its_exact_form_gives_as_much_room_again(
    amount: float, is_accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if one rounding led a tenth of a row's largest logit away, as another expert does."""
    model, made = tiny("llama", torch.bfloat16), whole_model._model_rows

    def rows_of(one: torch.nn.Module, *given: Any) -> Any:
        rows = made(one, *given)
        if next(one.parameters()).dtype == torch.float32:
            rows.logits[-1][7] += 0.1 * np.abs(rows.logits[-1]).max()
        return rows

    monkeypatch.setattr(whole_model, "_model_rows", rows_of)
    artifact = compiled("llama", torch.bfloat16).artifact
    runner = Disturbed("llama", amount, 1, torch.bfloat16)
    if is_accepted:
        assert check_whole_model(model, artifact, runner) > BOUND["bf16"]
        return
    with pytest.raises(
        PassError, match=r"bound 6e-02, and from its form in fp32 by 4\..*twice the model's own"
    ):
        check_whole_model(model, artifact, runner)


def test_refuses_logits_that_are_no_numbers() -> None:
    with pytest.raises(PassError, match="by nan of the largest"):
        check_whole_model(tiny("llama"), compiled("llama").artifact, Disturbed("llama", float("nan")))


def test_models_without_values_are_not_compared() -> None:
    with torch.device("meta"):
        model = TinyLM(SPELLINGS["sdpa"])
    assert check_whole_model(model, compiled("sdpa").artifact, Disturbed("sdpa", 1.0)) == 0.0


def test_what_a_pass_does_outside_its_sites_is_caught() -> None:
    def eliminate_too_much(graph_module: GraphModule) -> PassReport:
        held(graph_module, "model.norm.weight")[3] *= 1.5
        return eliminate_dead_code(graph_module)

    steps = (*PIPELINE[:-1], dataclasses.replace(PIPELINE[-1], run=eliminate_too_much))
    assert isinstance(steps[-1], Step)
    model = tiny("llama")
    weight = model.get_parameter("model.norm.weight")
    expected = weight.detach().clone()
    with mock.patch.dict("os.environ", {"CXX": "no-such-compiler"}), pytest.warns(UserWarning):
        octavo.compile(model, max_model_len=LONGEST, verify="sites", pipeline=steps)
    weight.data.copy_(expected)
    clean = tiny("llama")
    with mock.patch("octavo.compiler.api.check_whole_model") as check:
        check.side_effect = lambda _, *given: check_whole_model(clean, *given)
        with mock.patch.dict("os.environ", {"CXX": "no-such-compiler"}), pytest.warns(UserWarning):
            with pytest.raises(PassError, match=r"^verify: logits of the artifact differ"):
                octavo.compile(model, max_model_len=LONGEST, pipeline=steps)


class Noisy(Disturbed):
    """A runner whose logits are all off, by `amount` of their rms."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        logits = self.inner.run(batch)
        noise = np.random.default_rng(len(self.batches)).standard_normal(logits.shape)
        self.batches.append(batch)
        result: NDArray[np.float32] = (logits + self.amount * noise * np.sqrt((logits**2).mean())).astype(
            np.float32
        )
        return result


def quantised_by(amount: float, seed: int = 0) -> torch.nn.Module:
    """The model that another would be if quantisation had moved its logits by this share of their rms."""
    model = tiny("llama")
    head: torch.Tensor = model.lm_head.weight  # type: ignore[union-attr, assignment]
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        head.add_(noise * amount * head.square().mean().sqrt())
    return model


def test_a_quantised_artifact_may_differ_from_its_graph_by_a_share_of_what_quantisation_did() -> None:
    artifact, plain, graph = compiled("llama").artifact, quantised_by(0.2), tiny("llama")
    near, far = Noisy("llama", 0.2 * SHARE * 0.8), Noisy("llama", 0.2 * SHARE * 1.4)
    error = check_quantized_model(plain, graph, artifact, near)
    assert 0.2 * SHARE * 0.6 < error < 0.2 * SHARE
    with pytest.raises(
        PassError, match=r"differ from its quantised graph's by 1\.\d+e-01 .*: quantisation moved them by 2"
    ):
        check_quantized_model(plain, graph, artifact, far)
    with pytest.raises(PassError, match="by nan"):
        check_quantized_model(plain, graph, artifact, Noisy("llama", float("nan")))


def test_an_artifact_may_differ_as_its_graph_does_when_sums_round_otherwise() -> None:
    artifact, plain, graph = compiled("llama").artifact, quantised_by(0.02), tiny("llama")
    moved = [quantised_by(0.05, seed) for seed in (1, 2)]
    error = check_quantized_model(plain, graph, artifact, Noisy("llama", 0.07), moved)
    assert 0.05 < error < 0.1
    for amount, others in ((0.07, []), (0.14, moved), (float("nan"), moved)):
        with pytest.raises(PassError, match="differ from its quantised graph's by"):
            check_quantized_model(plain, graph, artifact, Noisy("llama", amount), others)


def test_graphs_are_not_run_again_where_nothing_is_in_doubt() -> None:
    artifact, graph = compiled("llama").artifact, tiny("llama")
    moved = mock.Mock(side_effect=AssertionError)
    check_quantized_model(quantised_by(0.2), graph, artifact, Noisy("llama", 0.01), [moved])
    moved.assert_not_called()


def test_quantisation_that_moves_nothing_leaves_the_room_of_the_dtype() -> None:
    artifact = compiled("llama").artifact
    check_quantized_model(quantised_by(1e-6), tiny("llama"), artifact, Noisy("llama", 0.0))
    with pytest.raises(PassError, match=r"bound 1.0e-04: "):
        check_quantized_model(quantised_by(1e-6), tiny("llama"), artifact, Noisy("llama", 0.001))


class OneRow(Disturbed):
    """A runner whose first row has one token far too likely."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        logits = self.inner.run(batch).copy()
        logits[0, 5] += self.amount
        return logits


def test_tokens_that_change_are_seen_where_the_rms_hides_them() -> None:
    artifact, plain, graph = compiled("llama").artifact, quantised_by(0.2), tiny("llama")
    runner = OneRow("llama", 11.0)
    with pytest.raises(PassError, match=r"nats from its quantised graph's"):
        check_quantized_model(plain, graph, artifact, runner)
