"""Logits to token ids: pure functions of a row, its request's parameters and its place, never of the batch.

Order: masks, bias and penalties (token_state.py), temperature, top-k, top-p, min-p, draw (that of Hugging
Face). Equal probabilities rank by token id, lowest first. Probabilities are computed in float64.

Log-probabilities that are reported are those of the model: of the unmodified logits, whatever was done to them
before the draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.token_state import TokenState

# Word 2 of the counter keeps streams apart, word 3 the rounds of speculation. The kernels use the same numbers.
SAMPLE_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM, BEAM_STREAM = range(5)

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


class Row(NamedTuple):
    """What the token of one row of logits is chosen by.

    position  of the token to be drawn, in its sequence
    state     has taken in all tokens before it; None: logits are left as they are
    """

    params: SamplingParams
    key: RandomKey
    position: int
    state: TokenState | None = None


class Sampled(NamedTuple):
    """A chosen token.

    logprob       its log-probability (natural); None where params ask for none
    top_logprobs  (token id, log-probability) of the most probable tokens, highest first, then by id
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def uniform(
    key: RandomKey, position: int, stream: int = SAMPLE_STREAM, index: int = 0, word: int = 0
) -> float:
    """A number in [0, 1) with 53 random bits, for the token at a position: of one word of its place in a stream."""
    return (int(random_bits(key, position, stream, index, word + 1)[word]) >> 11) * 2.0**-53


def random_bits(key: RandomKey, position: int, stream: int, index: int, count: int) -> NDArray[np.uint64]:
    """`count` words of 64 random bits: Philox-4x64-10 (Salmon et al. 2011) at a place, without state.

    Only the raw bits of numpy's Philox are used: those are stable between numpy versions.
    """
    counter = np.array([0, position, stream, index], np.uint64)
    generator = np.random.Philox(key=np.array([key.seed, key.stream], np.uint64), counter=counter)
    bits: NDArray[np.uint64] = generator.random_raw(count)
    return bits


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


def sample(logits: NDArray[np.float32], rows: Sequence[Row]) -> list[Sampled | ExecutionError]:
    """A token for each row of logits (L, vocab).

    A row that holds NaN, +inf, or nothing above -inf gives an ExecutionError in place of its token, so that
    the other requests of the step go on; so does one of which masks leave nothing.
    """
    if len(logits) == 0:
        return []
    highest = logits.argmax(axis=-1)  # the first maximum; the first NaN where there is one
    is_finite = np.isfinite(logits[np.arange(len(logits)), highest])
    results: list[Sampled | ExecutionError] = []
    for index, (row, best_id) in enumerate(zip(rows, highest.tolist(), strict=True)):
        if not is_finite[index]:
            results.append(ExecutionError(not_finite(logits[index], row.position)))
        elif row.state is None and row.params.is_greedy and not row.params.needs_logprobs:
            results.append(Sampled(best_id))
        else:
            results.append(_sample_row(logits[index], row))
    return results


def _sample_row(logits: NDArray[np.float32], row: Row) -> Sampled | ExecutionError:
    try:
        processed = processed_logits(logits, row)
    except ExecutionError as error:
        return error
    if row.params.is_greedy:
        return reported(logits, int(processed.argmax()), row.params)
    token_id = draw(probabilities(processed, row.params), uniform(row.key, row.position))
    return reported(logits, token_id, row.params)


def processed_logits(logits: NDArray[np.float32], row: Row) -> NDArray[np.float32]:
    """A row (vocab,) with a finite maximum after what its state does to it; ExecutionError if nothing may follow."""
    processed = logits if row.state is None else row.state.apply(logits)
    if not np.isfinite(processed.max()):
        raise ExecutionError(
            f"logits: expected a token that may follow at position {row.position}, got none: structured, "
            "min_tokens and the model's end tokens together forbid all"
        )
    return processed


def reported(logits: NDArray[np.float32], token_id: int, params: SamplingParams) -> Sampled:
    """A chosen token with what its request wants to know, by the model's row (vocab,) of logits."""
    return report(logits, token_id, params.logprobs or 0) if params.needs_logprobs else Sampled(token_id)


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The natural logarithms of the probabilities of a row (vocab,) with a finite maximum."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def prompt_logprobs(
    logits: NDArray[np.float32], next_tokens: Sequence[int], count: int
) -> list[Sampled | ExecutionError]:
    """For each row of logits (L, vocab) the prompt's token after it, with the `count` best ones beside it.

    As with `sample`, a row that is not finite gives an ExecutionError.
    """
    results: list[Sampled | ExecutionError] = []
    for position, (row, token_id) in enumerate(zip(logits, next_tokens, strict=True)):
        is_finite = np.isfinite(row.max())
        error = None if is_finite else ExecutionError(not_finite(row, position))
        results.append(error or report(row, token_id, count))
    return results


def report(logits: NDArray[np.float32], token_id: int, count: int) -> Sampled:
    """A token with its log-probability and those of the `count` best, by a row (vocab,) of the model's logits."""
    logprobs = log_probabilities(logits)
    ids = best(logits, min(count, len(logits))).tolist() if count else []
    return Sampled(token_id, float(logprobs[token_id]), tuple((each, float(logprobs[each])) for each in ids))


def not_finite(row: NDArray[np.float32], position: int) -> str:
    """What is wrong with a row of logits."""
    found = {"NaN": np.isnan(row), "+inf": np.isposinf(row), "-inf": np.isneginf(row)}
    shown = ", ".join(f"{int(where.sum())} {name}" for name, where in found.items())
    return (
        f"logits: expected finite numbers, got {shown} of {len(row)} at position {position}; "
        "the model's weights or a kernel are broken, or its activations overflow"
    )
