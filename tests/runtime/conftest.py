"""Engines without a model, and what they must answer."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner, logits_of, make_model

from octavo.runtime.engine import Engine


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """Engine(num_pages=, page_size=, model fields by name, other options of Engine)."""

    def make(num_pages: int = 40, page_size: int = 4, tokenizer: Any = None, **options: Any) -> Engine:
        model: dict[str, Any] = {
            name: options.pop(name) for name in ("max_model_len", "eos_token_ids") if name in options
        }
        if "model_batch_tokens" in options:
            model["max_batch_tokens"] = options.pop("model_batch_tokens")
        runner = {name: options.pop(name) for name in ("num_host_pages", "windows") if name in options}
        return Engine(FakeRunner(num_pages, page_size, **runner), make_model(**model), tokenizer, **options)

    return make


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[int]]:
    """What greedy decoding of the fake model gives for a prompt, without any of the runtime."""

    def run(
        prompt: Sequence[int], num_tokens: int, stop: Sequence[int] = (), window: int | None = None
    ) -> list[int]:
        history = list(prompt)
        while len(history) < len(prompt) + num_tokens:
            seen = history if window is None else history[-window:]
            history.append(int(np.argmax(logits_of(seen))))
            if history[-1] in stop:
                break
        return history[len(prompt) :]

    return run
