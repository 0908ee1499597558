import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_examples import make_examples, target

from octavo.compiler.draft_training.examples import Batch, Example
from octavo.compiler.draft_training.train_heads import RIDGE, frequent_ids, loss_of, new_head
from octavo.compiler.draft_training.trainer import Recipe, Trainer
from octavo.compiler.draft_training.work import WorkDirectory
from octavo.compiler.drafts.eagle import EagleHead

RECIPE = Recipe(1e-2, 8, 2)
LENGTHS = [(3, 12), (2, 20), (4, 9)]


class Quadratic:
    """A parameter that is drawn to a number of each batch; it counts steps and stops after some."""

    def __init__(self, work: WorkDirectory) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(2))
        self.trainer = Trainer({"x": self.parameter}, RECIPE, work)
        self.shares: list[float] = []
        self.stop_after = 10**9

    def loss(self, batch: Batch, share: float) -> torch.Tensor:
        self.shares.append(share)
        if len(self.shares) == self.stop_after:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return ((self.parameter - batch.token_ids.float().mean()) ** 2).sum()


def test_interrupted_training_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = make_examples(target(), LENGTHS)
    clock = [0.0]
    monkeypatch.setattr("octavo.compiler.draft_training.trainer.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("octavo.compiler.draft_training.trainer.time.sleep", lambda _: None, raising=False)

    def report(name: str, done: int, total: int) -> None:
        clock[0] += 1.0

    whole = Quadratic(WorkDirectory(tmp_path / "a", {}, False))
    whole.trainer.run(examples, whole.loss, 20.0, report)
    first = Quadratic(WorkDirectory(tmp_path / "b", {}, False))
    first.stop_after = 8
    with pytest.raises(KeyboardInterrupt):
        first.trainer.run(examples, first.loss, 20.0, report)
    second = Quadratic(WorkDirectory(tmp_path / "b", {}, True))
    assert torch.equal(second.parameter, first.parameter)
    second.trainer.run(examples, second.loss, 20.0, report)
    assert first.shares + second.shares == whole.shares
    assert second.trainer.num_steps == whole.trainer.num_steps == 20
    torch.testing.assert_close(second.parameter, whole.parameter, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_heads_learn(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = target()
    examples = make_examples(model, LENGTHS)
    ids = frequent_ids(examples, [2], 48, 259)
    head = EagleHead.for_target(model, ids) if kind == "eagle" else new_head("medusa", model, ids, examples)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    loss = loss_of(head, 259)
    values: list[float] = []

    def noted(batch: Batch, share: float) -> torch.Tensor:
        value = loss(batch, 1.0 if len(values) % 2 else 0.0)
        values.append(float(value.detach()))
        return value

    def report(name: str, done: int, total: int) -> None:
        assert name.startswith("step ")

    trainer = Trainer(head.trained_parameters(), RECIPE, WorkDirectory(tmp_path / "w", {}, False))
    trainer.run(examples, noted, 1.0, report)
    assert len(values) > 20
    assert sum(values[-8:]) < 0.8 * sum(values[:8])
    changed = {name for name, value in head.state_dict().items() if not value.equal(before[name])}
    assert changed == set(head.trained_parameters())


def test_the_vocabulary_is_what_answers_use() -> None:
    examples = make_examples(target(), LENGTHS)
    answers = [token for one in examples for token in one.token_ids[one.prompt_len :].tolist()]
    ids = frequent_ids(examples, [2], 6, 259)
    assert ids is not None and ids.tolist() == sorted(ids.tolist()) and len(ids) == 6 and 2 in ids
    least = min(answers.count(token) for token in ids.tolist() if token != 2)
    assert all(answers.count(token) <= least for token in answers if token not in ids.tolist())
    filled = frequent_ids(examples, [2], 200, 259)
    assert filled is not None and len(set(filled.tolist())) == 200 and set(answers) <= set(filled.tolist())
    assert frequent_ids(examples, [2], 259, 259) is None


def test_a_head_begins_at_the_best_affine_map() -> None:
    model = target()
    torch.manual_seed(0)
    matrix, offset = torch.randn(64, 32) / 8, torch.randn(32)
    examples = []
    for one in make_examples(model, [(3, 60)] * 6):
        features = torch.zeros(60, 32)
        for place in range(1, 60):
            read = torch.cat([model.model.embed_tokens.weight[one.token_ids[place]], features[place - 1]])
            features[place] = torch.tanh(read.detach() @ matrix) + offset
        examples.append(Example(one.token_ids, features, 3))
    head = new_head("eagle", model, None, examples)
    assert isinstance(head, EagleHead)
    one = examples[0]
    with torch.no_grad():
        hidden = head(one.token_ids[None, 1:], torch.arange(1, 60)[None], one.features[None, :-1])[1][0]
    error = (hidden - one.features[1:]).square().mean()
    assert error < 0.2 * one.features[1:].var()
    read = torch.cat(
        [
            torch.cat([model.model.embed_tokens.weight[e.token_ids[1:]].detach(), e.features[:-1]], 1)
            for e in examples
        ]
    )
    design = np.c_[read.numpy(), np.ones(len(read))].astype(np.float64)
    wanted = np.concatenate([e.features[1:].numpy() for e in examples]).astype(np.float64)
    penalty = np.diag(np.sqrt((design**2).sum(0) * RIDGE))  # ridge regression is least squares with more rows
    solved = np.linalg.lstsq(np.r_[design, penalty], np.r_[wanted, np.zeros((65, 32))], rcond=None)[0]
    np.testing.assert_allclose(head.fc.weight.detach().numpy(), solved[:-1].T, rtol=1e-3, atol=1e-4)
