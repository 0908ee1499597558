"""Logits to token ids: pure functions of a row, its request's parameters and its place, never of the batch.

Order: temperature, top-k, top-p, min-p, draw (that of Hugging Face). Equal probabilities rank by token id,
lowest first. Probabilities are computed in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.runtime.sampling_params import SamplingParams

# Word 2 of the counter keeps streams apart; others will follow (drafts, acceptance).
SAMPLE_STREAM = 0

# top-p looks among this many best tokens first, and among more only if they do not reach p.
_FIRST_NUCLEUS = 512


@dataclass(frozen=True)
class RandomKey:
    """Names a stream of random numbers: (seed, stream) with 0 <= each < 2**64.

    A request's own seed gives (seed, 0); otherwise it is (engine's seed, request id + 1), so the two never
    meet.
    """

    seed: int
    stream: int


def uniform(key: RandomKey, position: int) -> float:
    """A number in [0, 1) with 53 random bits: Philox-4x64-10 (Salmon et al. 2011) at a place, without state.

    Only the raw bits of numpy's Philox are used: those are stable between numpy versions.
    """
    counter = np.array([0, position, SAMPLE_STREAM, 0], np.uint64)
    bits = np.random.Philox(key=np.array([key.seed, key.stream], np.uint64), counter=counter).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def probabilities(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """The distribution (vocab,) that a row (vocab,) is drawn from, for temperature > 0 and a finite maximum.

    top-k keeps exactly k tokens; top-p keeps a token while those before it sum to less than p, so at least
    one; min-p compares with the most probable token, so it does not matter that its input is not
    renormalised.
    """
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        scaled = (wide - wide.max()) / params.temperature
    probs: NDArray[np.float64] = np.exp(scaled)
    if 0 < params.top_k < len(probs):
        probs = _only(probs, best(logits, params.top_k))
    probs /= probs.sum()
    if params.top_p < 1:
        probs = _only(probs, _nucleus(logits, probs, params.top_p))
    if params.min_p > 0:
        probs[probs < params.min_p * probs.max()] = 0
    probs /= probs.sum()
    return probs


def best(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The `count` highest of a row (vocab,), highest first, then by id; only these are sorted."""
    least = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > least)
    ids = np.concatenate([above, np.flatnonzero(logits == least)[: count - len(above)]])
    return ids[np.argsort(-logits[ids], kind="stable")]


def _nucleus(logits: NDArray[np.float32], probs: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    count = min(_FIRST_NUCLEUS, len(logits))
    while True:
        ids = best(logits, count)
        sums = np.cumsum(probs[ids])
        if sums[-1] >= top_p or count == len(logits):
            return ids[: np.searchsorted(sums, top_p) + 1]
        count = min(count * 8, len(logits))


def _only(probs: NDArray[np.float64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    kept = np.zeros_like(probs)
    kept[ids] = probs[ids]
    return kept


def draw(probs: NDArray[np.float64], point: float) -> int:
    """The token whose share of [0, 1), laid out by id, holds the point; never one of probability 0."""
    edges = np.cumsum(probs)
    token = int(np.searchsorted(edges, point * edges[-1], side="right"))
    # point * total can round up to the total, past every edge: the last token that has a share is meant then.
    return token if token < len(probs) else int(np.flatnonzero(probs)[-1])


def sample(
    logits: NDArray[np.float32],
    params: Sequence[SamplingParams],
    keys: Sequence[RandomKey],
    positions: Sequence[int],
) -> list[int | ExecutionError]:
    """A token for each row of logits (L, vocab). positions: of the token to be drawn, in its sequence.

    A row that holds NaN, +inf, or nothing above -inf gives an ExecutionError in place of its token, so that
    the other requests of the step go on.
    """
    if len(logits) == 0:
        return []
    highest = logits.argmax(axis=-1)  # the first maximum; the first NaN where there is one
    results: list[int | ExecutionError] = []
    for row, (own, key, position) in enumerate(zip(params, keys, positions, strict=True)):
        top = logits[row, highest[row]]
        if not np.isfinite(top):
            results.append(ExecutionError(_not_finite(logits[row], position)))
        elif own.is_greedy:
            results.append(int(highest[row]))
        else:
            results.append(draw(probabilities(logits[row], own), uniform(key, position)))
    return results


def _not_finite(row: NDArray[np.float32], position: int) -> str:
    found = {"NaN": np.isnan(row), "+inf": np.isposinf(row), "-inf": np.isneginf(row)}
    shown = ", ".join(f"{int(where.sum())} {name}" for name, where in found.items())
    return (
        f"logits: expected finite numbers, got {shown} of {len(row)} at position {position}; "
        "the model's weights or a kernel are broken, or its activations overflow"
    )
