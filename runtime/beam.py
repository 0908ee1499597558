"""Beam search and sampling without replacement: which sequences a request goes on with, and which ended.

Beam search as in Hugging Face: hypotheses are ranked by log-probability / length ** length_penalty. With a
temperature, beams are sampled without replacement (stochastic beam search, Kool et al. 2019, algorithm 1).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.runtime.paged_memory import PageTable
from octavo.runtime.request import Branch, FinishReason, Request
from octavo.runtime.sampler import (
    BEAM_STREAM,
    RandomKey,
    Sampled,
    best,
    log_probabilities,
    not_finite,
    probabilities,
    random_bits,
    report,
)

Fork = Callable[[PageTable], PageTable]


class Candidate(NamedTuple):
    """A sequence that may be gone on with. rank: what it is ordered by, higher first; logits: of its last token."""

    rank: float
    logprob: float
    parent: Branch
    token_id: int
    logits: NDArray[np.float32]


def advance(
    request: Request, logits: Sequence[NDArray[np.float32]], key: RandomKey, fork: Fork
) -> list[Branch]:
    """The beams after a step, [] when the search is over; what ended goes to `request.finished`.

    logits  a row (vocab,) for each live branch. fork: a page table for a beam that shares its parent's pages
    """
    if request.params.is_greedy:
        ranked = _best_candidates(request, logits)
    else:
        ranked = _sampled_candidates(request, logits, key)
    width = request.num_branches
    chosen: list[Candidate] = []
    for place, candidate in enumerate(ranked):
        ends = candidate.token_id in request.stop_token_ids
        if ends and place < width:
            _finish(request, candidate, "stop")
        elif not ends and len(chosen) < width:
            chosen.append(candidate)
    if chosen and len(chosen[0].parent.tokens) + 1 >= request.max_len:
        for candidate in chosen:
            _finish(request, candidate, "length")
        chosen = []
    elif not request.params.is_greedy:
        chosen = _within_width(request, chosen)
    if not chosen or _is_over(request, chosen):
        return []
    return [_branch(request, candidate, index, fork) for index, candidate in enumerate(chosen)]


def ranked_branches(request: Request) -> list[Branch]:
    """The answers of a request that ended, the best first where answers are ranked; ties in order of age."""
    if request.params.beam_width is not None:
        return sorted(request.finished.values(), key=lambda b: -(b.score or 0.0))[: request.params.n]
    if request.params.best_of is not None:
        for branch in request.branches:
            branch.score = float(np.mean([each.logprob or 0.0 for each in branch.chosen]))
        return sorted(request.branches, key=lambda branch: -(branch.score or 0.0))[: request.params.n]
    return request.branches


def _processed(branch: Branch, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(logits.max()):
        raise ExecutionError(not_finite(logits, len(branch.tokens)))
    if branch.state is None:
        return logits
    branch.state.sync(branch.tokens)
    return branch.state.apply(logits)


def _best_candidates(request: Request, logits: Sequence[NDArray[np.float32]]) -> list[Candidate]:
    """So many of the best that as many as beams go on, even if each of their parents could end as well."""
    count = (1 + len(request.stop_token_ids)) * request.num_branches
    found = []
    for branch, row in zip(request.live, logits, strict=True):
        processed = _processed(branch, row)
        logprobs = log_probabilities(processed)
        for token_id in best(processed, min(count, len(row))).tolist():
            total = branch.logprob + float(logprobs[token_id])
            if total > -np.inf:
                found.append(Candidate(total, total, branch, token_id, row))
    return sorted(found, key=lambda candidate: -candidate.rank)[:count]


def _sampled_candidates(
    request: Request, logits: Sequence[NDArray[np.float32]], key: RandomKey
) -> list[Candidate]:
    """The highest perturbed log-probabilities among all children, each parent's maximum being its own."""
    found = []
    count = (1 + len(request.stop_token_ids)) * request.num_branches
    for place, (branch, row) in enumerate(zip(request.live, logits, strict=True)):
        with np.errstate(divide="ignore"):
            totals = branch.logprob + np.log(probabilities(_processed(branch, row), request.params))
        perturbed = _conditioned(totals + gumbel(key, len(branch.tokens), place, len(row)), branch.noise)
        ids = np.argsort(-perturbed, kind="stable")[:count]
        found += [
            Candidate(float(perturbed[i]), float(totals[i]), branch, int(i), row)
            for i in ids
            if totals[i] > -np.inf
        ]
    return sorted(found, key=lambda candidate: -candidate.rank)[:count]


def _conditioned(perturbed: NDArray[np.float64], maximum: float) -> NDArray[np.float64]:
    """Perturbed log-probabilities given that their maximum is this; Kool et al. 2019, appendix B.3."""
    highest = perturbed.max()
    with np.errstate(divide="ignore", invalid="ignore"):
        v = maximum - perturbed + np.log1p(-np.exp(perturbed - highest))
        result: NDArray[np.float64] = maximum - np.maximum(0.0, v) - np.log1p(np.exp(-np.abs(v)))
    result[perturbed == highest] = maximum
    result[perturbed == -np.inf] = -np.inf
    return result


def gumbel(key: RandomKey, position: int, beam: int, count: int) -> NDArray[np.float64]:
    """`count` independent standard Gumbel numbers at a place in the request's stream, without state."""
    bits = random_bits(key, position, BEAM_STREAM, beam, count)
    result: NDArray[np.float64] = -np.log(-np.log(((bits >> np.uint64(11)) + 0.5) * 2.0**-53))
    return result


def _within_width(request: Request, chosen: list[Candidate]) -> list[Candidate]:
    """Of running and ended sequences together, the `beam_width` of highest rank are the sample."""
    ranks = [branch.noise for branch in request.finished.values()] + [candidate.rank for candidate in chosen]
    least = sorted(ranks, reverse=True)[: request.num_branches][-1]
    for tokens in [t for t, branch in request.finished.items() if branch.noise < least]:
        del request.finished[tokens]
    return [candidate for candidate in chosen if candidate.rank >= least]


def _branch(request: Request, candidate: Candidate, index: int, fork: Fork) -> Branch:
    token_id = candidate.token_id
    count = request.params.logprobs
    sampled = Sampled(token_id) if count is None else report(candidate.logits, token_id, count)
    branch = candidate.parent.child(index, sampled, fork(candidate.parent.table), request.prompt_len)
    branch.logprob, branch.noise = candidate.logprob, candidate.rank
    return branch


def _finish(request: Request, candidate: Candidate, reason: FinishReason) -> None:
    """Keep a hypothesis, if it is one of the `beam_width` best."""
    branch = _branch(request, candidate, 0, lambda table: PageTable([], table.root, table.root))
    branch.finish_reason = reason
    is_greedy = request.params.is_greedy
    length = len(branch.tokens) - request.prompt_len
    branch.score = _score(request, candidate.logprob, length) if is_greedy else candidate.rank
    request.finished[tuple(branch.tokens[request.prompt_len :])] = branch
    if is_greedy and len(request.finished) > request.num_branches:
        worst = min(request.finished, key=lambda tokens: request.finished[tokens].score or 0.0)
        del request.finished[worst]


def _score(request: Request, logprob: float, length: int) -> float:
    return float(logprob / length**request.params.length_penalty)


def _is_over(request: Request, chosen: Sequence[Candidate]) -> bool:
    """Whether what runs need not go on, by `early_stopping`."""
    params = request.params
    if not params.is_greedy or len(request.finished) < request.num_branches:
        return False
    if params.early_stopping is True:
        return True
    length = len(chosen[0].parent.tokens) + 1 - request.prompt_len
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = request.max_len - request.prompt_len
    attainable = _score(request, max(candidate.logprob for candidate in chosen), length)
    return attainable <= min(branch.score or 0.0 for branch in request.finished.values())
