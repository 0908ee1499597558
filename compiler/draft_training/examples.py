"""What heads are trained on: a target's answers with its hidden states, cut into windows of one length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """An answer with its prompt, T tokens.

    token_ids   (T,) i64
    features    (T, F) the target's hidden states of each token, behind its last norm
    prompt_len  the tokens before the answer
    """

    token_ids: Tensor
    features: Tensor
    prompt_len: int


@dataclass(frozen=True)
class Batch:
    """B windows of T rows; row j has token j and the target's features of token j - 1.

    token_ids  (B, T); position_ids (B, T), of each in its sequence
    before     (B, T, F) features of the token before; zeros at position 0
    features   (B, T, F) of the token itself: what a head's own hidden state is to be, and what makes the next token
    is_answer  (B, T) bool: the token behind this one is the target's own, so that the row counts
    following  (B, T) i64: the token behind this one, 0 where there is none
    """

    token_ids: Tensor
    position_ids: Tensor
    before: Tensor
    features: Tensor
    is_answer: Tensor
    following: Tensor


def batches(examples: Sequence[Example], window: int, size: int, seed: int) -> Iterator[Batch]:
    """All answers once, in an order that the seed makes. A last batch that is not full is left out, unless it is the
    only one."""
    places = _windows(examples, window)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(places), generator=generator).tolist()
    for start in range(0, max(len(order) - size + 1, 1), size):
        yield _batch(examples, [places[place] for place in order[start : start + size]], window)


def _windows(examples: Sequence[Example], window: int) -> list[tuple[int, int]]:
    """(example, first row) of windows that cover each answer; the first begins early enough to see the prompt's end."""
    places = []
    for index, example in enumerate(examples):
        length = len(example.token_ids)
        first = max(0, min(example.prompt_len - window // 4, length - window))
        places += [(index, start) for start in range(first, max(length - 1, first + 1), window)]
    return places


def _batch(examples: Sequence[Example], places: Sequence[tuple[int, int]], window: int) -> Batch:
    size, width = len(places), examples[0].features.shape[1]
    token_ids = torch.zeros(size, window, dtype=torch.long)
    following = torch.zeros(size, window, dtype=torch.long)
    features, before = torch.zeros(2, size, window, width)
    is_answer = torch.zeros(size, window, dtype=torch.bool)
    starts = torch.tensor([start for _, start in places])
    for row, (index, start) in enumerate(places):
        one = examples[index]
        count = min(window, len(one.token_ids) - start)
        token_ids[row, :count] = one.token_ids[start : start + count]
        features[row, :count] = one.features[start : start + count].float()
        head = 1 if start == 0 else 0
        before[row, head:count] = one.features[start + head - 1 : start + count - 1].float()
        behind = one.token_ids[start + 1 : start + count + 1]
        following[row, : len(behind)] = behind
        is_answer[row, max(one.prompt_len - 1 - start, 0) : len(behind)] = True
    position_ids = starts[:, None] + torch.arange(window)
    return Batch(token_ids, position_ids, before, features, is_answer, following)
