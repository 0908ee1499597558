"""The target's hidden states of texts that are known."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compiler.draft_training.work import WorkDirectory
from octavo.compiler.drafts.head import logits_of
from octavo.compiler.progress import Report


class _Found(Exception):
    """What the last product was given is known: the product itself need not run."""


@torch.no_grad()
def hidden_states(model: nn.Module, token_ids: list[int]) -> Tensor:
    """(T, F) of each token, behind the last norm."""
    found: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0])
        raise _Found

    hook = logits_of(model).register_forward_pre_hook(stop)
    try:
        model(input_ids=torch.tensor([token_ids]))
    except _Found:
        pass
    finally:
        hook.remove()
    return found[0][0]


def compute_features(model: nn.Module, work: WorkDirectory, width: int, report: Report) -> None:
    """Hidden states of all answers that have none yet."""
    began = time.perf_counter()
    try:
        for number in range(work.num_with_features(width), len(work.answers)):
            report("hidden states", number, len(work.answers))
            work.add_features(hidden_states(model, work.answers[number].token_ids))
    finally:
        work.spend("features", time.perf_counter() - began)
