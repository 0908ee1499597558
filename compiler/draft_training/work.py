"""The directory that training works in: answers, hidden states and the state of training, so that all can go on later.

answers.jsonl      {"job": ..., "prompt_len": ..., "token_ids": [...]} a line
features.f32       of their tokens, in the same order
state.safetensors  parameters and moments of the optimizer, and in its metadata how far training is
facts.json         what the files are of, and seconds spent
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from octavo.compiler.draft_training.examples import Example
from octavo.compiler.errors import OptionError


@dataclass(frozen=True)
class Answer:
    """token_ids: prompt and answer."""

    job: int
    prompt_len: int
    token_ids: list[int]


class WorkDirectory:
    """What is there is read when it is opened, and every change is written at once.

    facts  what the work is for; work for anything else is refused
    """

    def __init__(self, path: Path, facts: dict[str, Any], resume: bool) -> None:
        self.path = path
        self.answers: list[Answer] = []
        self.seconds: dict[str, float] = {}
        found = self._facts_found()
        if found is not None and not resume:
            raise OptionError(
                f"output: {path} holds unfinished training; add --resume to go on, or remove it"
            )
        if found is not None and found["facts"] != facts:
            changed = sorted(name for name in facts if found["facts"].get(name) != facts[name])
            raise OptionError(
                f"resume: expected the options that {path} was begun with, got others: {', '.join(changed)}"
            )
        path.mkdir(parents=True, exist_ok=True)
        self._facts = facts
        if found is not None:
            self.seconds = found["seconds"]
            self.answers = self._answers_found()
        self.save_seconds()

    def _facts_found(self) -> Any:
        file = self.path / "facts.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def _answers_found(self) -> list[Answer]:
        """A line that was cut off in the middle is dropped."""
        file = self.path / "answers.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):
            file.write_text("".join(whole))
        return [Answer(**json.loads(line)) for line in whole]

    def save_seconds(self) -> None:
        _replace(
            self.path / "facts.json", json.dumps({"facts": self._facts, "seconds": self.seconds}).encode()
        )

    def spend(self, phase: str, seconds: float) -> None:
        """Count time that a phase took."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self.save_seconds()

    def add_answer(self, answer: Answer) -> None:
        self.answers.append(answer)
        with (self.path / "answers.jsonl").open("a") as file:
            file.write(json.dumps(vars(answer)) + "\n")

    def num_with_features(self, width: int) -> int:
        """Of how many answers the hidden states are written whole; what is behind them is dropped."""
        file = self.path / "features.f32"
        size = file.stat().st_size if file.is_file() else 0
        count = end = 0
        for answer in self.answers:
            if end + len(answer.token_ids) * width * 4 > size:
                break
            end += len(answer.token_ids) * width * 4
            count += 1
        if end < size:
            os.truncate(file, end)
        return count

    def add_features(self, features: torch.Tensor) -> None:
        """(T, F) of the next answer without any."""
        with (self.path / "features.f32").open("ab") as file:
            file.write(features.float().contiguous().numpy().tobytes())

    def examples(self, width: int) -> list[tuple[Answer, Example]]:
        """All answers with their hidden states, which stay in the file until they are read."""
        if not self.answers:
            return []
        rows = np.memmap(self.path / "features.f32", np.float32, "c").reshape(-1, width)
        ends = np.cumsum([len(answer.token_ids) for answer in self.answers])
        return [
            (
                one,
                Example(
                    torch.tensor(one.token_ids),
                    torch.from_numpy(rows[end - len(one.token_ids) : end]),
                    one.prompt_len,
                ),
            )
            for one, end in zip(self.answers, ends.tolist(), strict=True)
        ]

    def save_state(self, tensors: dict[str, torch.Tensor], progress: dict[str, float]) -> None:
        scratch = self.path / "state.safetensors.new"
        save_file(tensors, scratch, {"progress": json.dumps(progress)})
        os.replace(scratch, self.path / "state.safetensors")

    def load_state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]] | None:
        file = self.path / "state.safetensors"
        if not file.is_file():
            return None
        with safe_open(file, "pt") as opened:
            progress = json.loads(opened.metadata()["progress"])
            return {name: opened.get_tensor(name) for name in opened.keys()}, progress

    def remove(self) -> None:
        """Once the result is saved."""
        for name in ("answers.jsonl", "features.f32", "state.safetensors", "facts.json"):
            (self.path / name).unlink(missing_ok=True)
        self.path.rmdir()


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_name(path.name + ".new")
    scratch.write_bytes(data)
    os.replace(scratch, path)
