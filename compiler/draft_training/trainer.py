"""The loop: AdamW for as long as there is time, and a state that can be gone on from after any step."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn

from octavo.compiler.draft_training.examples import Batch, Example, batches
from octavo.compiler.draft_training.work import WorkDirectory
from octavo.compiler.progress import Report

_SAVE_SECONDS = 60.0
_WARM_UP_STEPS = 30
_LAST_RATE = 0.03  # of the learning rate, at the end


@dataclass(frozen=True)
class Recipe:
    """learning_rate falls as a cosine of the time that is spent; window: tokens of a row; size: rows of a batch."""

    learning_rate: float
    window: int
    size: int


# (batch, share of the time that is spent) -> loss
Loss = Callable[[Batch, float], Tensor]


class Trainer:
    """Trains parameters, given by name, and keeps its state in a directory."""

    def __init__(self, parameters: dict[str, nn.Parameter], recipe: Recipe, work: WorkDirectory) -> None:
        self._parameters = parameters
        self._recipe = recipe
        self._work = work
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            list(parameters.values()), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._epoch = self._step_in_epoch = self._step = 0
        self._spent = 0.0
        self._load()

    def run(self, examples: Sequence[Example], loss: Loss, seconds: float, report: Report) -> None:
        """Train until so many seconds were spent, those before a resumption included. An interrupt saves first."""
        with _interrupts_wait() as is_interrupted:
            saved = began = time.perf_counter()
            before = self._spent
            for batch in self._batches(examples):
                self._spent = before + time.perf_counter() - began
                if self._spent >= seconds and self._step > 0:
                    break
                value = self._train(batch, loss, min(self._spent / seconds, 1.0) if seconds > 0 else 1.0)
                report(f"step {self._step}, loss {value:.3f}", int(self._spent), max(int(seconds), 2))
                if is_interrupted() or time.perf_counter() - saved > _SAVE_SECONDS:
                    self._spent = before + time.perf_counter() - began
                    self._save()
                    saved = time.perf_counter()
                if is_interrupted():
                    raise KeyboardInterrupt
            self._save()

    @property
    def num_steps(self) -> int:
        return self._step

    def _batches(self, examples: Sequence[Example]) -> Iterator[Batch]:
        while True:
            skipped = self._step_in_epoch
            for number, batch in enumerate(
                batches(examples, self._recipe.window, self._recipe.size, self._epoch)
            ):
                if number >= skipped:
                    self._step_in_epoch = number + 1
                    yield batch
            self._epoch, self._step_in_epoch = self._epoch + 1, 0

    def _train(self, batch: Batch, loss: Loss, share: float) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        warm_up = min(1.0, (self._step + 1) / _WARM_UP_STEPS)
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * warm_up * (_LAST_RATE + (1 - _LAST_RATE) * cosine)
        value = loss(batch, share)
        self._optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
        self._optimizer.step()
        self._step += 1
        return float(value.detach())

    def _save(self) -> None:
        tensors = {f"parameter.{name}": p.detach().contiguous() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                if parameter in self._optimizer.state:
                    tensors[f"{moment}.{name}"] = self._optimizer.state[parameter][moment]
        progress = {
            "epoch": self._epoch, "step_in_epoch": self._step_in_epoch, "step": self._step, "spent": self._spent,
        }  # fmt: skip
        self._work.save_state(tensors, progress)

    def _load(self) -> None:
        found = self._work.load_state()
        if found is None:
            return
        tensors, progress = found
        self._epoch, self._step_in_epoch = int(progress["epoch"]), int(progress["step_in_epoch"])
        self._step, self._spent = int(progress["step"]), progress["spent"]
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"parameter.{name}"])
            if f"exp_avg.{name}" in tensors:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(self._step)),
                    "exp_avg": tensors[f"exp_avg.{name}"],
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
                }


@contextmanager
def _interrupts_wait() -> Iterator[Callable[[], bool]]:
    """Inside, an interrupt only sets a flag, so that no step is left half done."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
