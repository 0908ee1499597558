"""Lengths of requests with the published shapes, and the ways to give them memory that are compared.

Shapes: ShareGPT and Alpaca as in Kwon et al. 2023 (PagedAttention), section 6.1 and figure 11: the means are theirs;
log-normal tails of the stated widths stand for their histograms.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np

MAX_LEN = 2048  # of a prompt and its answer together


@dataclass(frozen=True)
class Shape:
    """Log-normal lengths: prompt and answer each with a mean in tokens and the deviation of its logarithm."""

    name: str
    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float

    def draw(self, count: int, seed: int) -> list[tuple[int, int]]:
        """(prompt, output) tokens of `count` requests: at least 1 each, at most MAX_LEN / 2 each."""
        random = np.random.default_rng(seed)
        prompts, outputs = (
            _lengths(random.standard_normal(count), mean, sigma)
            for mean, sigma in (
                (self.prompt_mean, self.prompt_sigma), (self.output_mean, self.output_sigma),
            )
        )  # fmt: skip
        return list(zip(prompts, outputs, strict=True))


CHAT = Shape("short chat (ShareGPT)", 161.31, 1.2, 337.99, 1.0)
INSTRUCTIONS = Shape("instructions (Alpaca)", 19.31, 0.5, 58.45, 1.0)


def _lengths(normal: "np.typing.NDArray[np.float64]", mean: float, sigma: float) -> list[int]:
    mu = _mu_of(mean, sigma, MAX_LEN / 2)
    lengths: list[int] = np.clip(np.rint(np.exp(mu + sigma * normal)), 1, MAX_LEN / 2).astype(int).tolist()
    return lengths


def _mu_of(mean: float, sigma: float, most: float) -> float:
    """The mean of the logarithm with which lengths, cut at `most`, have this mean: by halving."""
    low, high = 0.0, math.log(most) + 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if clipped_mean(middle, sigma, most) < mean else (low, middle)
    return low


def clipped_mean(mu: float, sigma: float, most: float) -> float:
    """E[min(X, most)] of a log-normal X."""
    below = NormalDist().cdf
    place = (math.log(most) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * below(place - sigma) + most * (1 - below(place))


class Buddies:
    """A buddy allocator: blocks of powers of two within `size` slots, split in halves and joined again."""

    def __init__(self, size: int) -> None:
        assert size > 0 and size & (size - 1) == 0, f"expected a power of two, got {size}"
        self.size = size
        self._free: dict[int, set[int]] = {size: {0}}  # starts of free blocks by their size

    def allocate(self, count: int) -> tuple[int, int] | None:
        """(start, size) of the smallest block that holds `count` slots, cut from the lowest that can; None: full."""
        wanted = 1 << (count - 1).bit_length()
        size = wanted
        while size <= self.size and not self._free.get(size):
            size *= 2
        if size > self.size:
            return None
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        return start, size

    def free(self, block: tuple[int, int]) -> None:
        start, size = block
        while size < self.size and start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), size * 2
        self._free.setdefault(size, set()).add(start)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Free (start, size), by start."""
        yield from sorted((start, size) for size, starts in self._free.items() for start in starts)

    def check(self) -> None:
        for (start, size), (following, _) in pairwise(self.blocks()):
            assert start + size <= following, "free blocks overlap"
        assert all(start % size == 0 for start, size in self.blocks()), "a block lies askew"
