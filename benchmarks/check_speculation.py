"""Whether speculation changes what is generated: counts of real rounds against their law, and against seeded biases.

    python benchmarks/check_speculation.py                 # 200,000 draws of each case
    python benchmarks/check_speculation.py --draws 20000   # quicker; the smallest biases stay hidden

A case is a way to draft and to verify. Its rounds are independent, its models made up; drafting, processing, noise and
verification are the runtime's. How many drafts were accepted and which token came next is counted and compared with the
law that the rules give, or sequences of three tokens over several rounds with the law of plain decoding: Pearson's
chi-square, cells merged until 5 are expected in each. A p-value below 1e-6 is a miss. There are no second tries.

Then the same of runtimes with a bias: each has to be a miss, or to end in an error. Biases are first looked for among a
twentieth and a quarter of the draws. Exits 1 unless all cases pass and all biases are caught.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from octavo.runtime.chunk import Chunk
from octavo.runtime.sampler import Sampled, draw
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative import accept
from octavo.runtime.speculative.draft import ROOT, Distribution, Draft
from octavo.runtime.speculative.policy import only
from octavo.runtime.speculative.proposer import Asked
from octavo.runtime.speculative.verify import Noise, Verdict

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from drafted import Shape, Tokens, chain_of, path_to
from speculation_laws import Law, law_of_blocks, law_of_coupling, law_of_tokens
from speculation_rounds import (
    HOT,
    Case,
    Language,
    Logits,
    Played,
    Player,
    Propose,
    play,
    probabilities,
    sped_up,
)
from wrong_verify import (
    ALL_OR_NOTHING,
    BONUS_TOO_EARLY,
    DRAFT_NOISE_ACCEPTS,
    DRAFT_NOISE_RECOVERS,
    RESIDUAL_IS_P,
    STALE_P,
    STALE_Q,
    TOKEN_RESIDUAL,
    Fault,
)

ALPHA = 1e-6
SEED = 20260
LEAST_EXPECTED = 5

TOKENS = Case("chain of 3, tokens", Language(16, 1), chain_of(3), "token", law_of_tokens)
BLOCK = Case("chain of 4, block", Language(8, 2), chain_of(4), "block", law_of_blocks)
CUT = Case(
    "chain of 2, block, top-k and top-p", Language(32, 3), chain_of(2), "block", law_of_blocks,
    (SamplingParams(temperature=0.7, top_k=12, top_p=0.9),),
)  # fmt: skip
PENALIZED = Case(
    "chain of 3, tokens, min-p and penalty", Language(8, 4), chain_of(3), "token", law_of_tokens,
    (SamplingParams(temperature=1.2, min_p=0.02, frequency_penalty=1.0),),
)  # fmt: skip
FIXED = Case("chain of 3, fixed", Language(16, 5), chain_of(3, 0, 1, 2), "block", law_of_coupling)
COUPLED = Case("chain of 3, equality", Language(8, 6), chain_of(3), "equality", law_of_coupling)
STOPPING = Case(
    "chain, block, ends behind a doubtful token", Language(8, 6), chain_of(3), "block", law_of_blocks, ends_below=0.15
)  # fmt: skip
WITH = Case("siblings with replacement", Language(16, 7), Shape((-1, -1, 0)), "token", law_of_tokens)
WITHOUT = Case(
    "siblings without replacement", Language(8, 8), Shape((-1, -1, -1, 0), is_without_replacement=True), "block",
    law_of_tokens,
)  # fmt: skip
MIXED = Case(
    "siblings fixed and drawn", Language(8, 9), Shape((-1, -1, -1, 0, 1), frozenset({1, 3}), True), "token",
    law_of_tokens,
)  # fmt: skip
APART = Case(
    "chain of 3, block, tokens that one lacks", Language(16, 10, num_unknown=6), chain_of(3), "block", law_of_blocks
)  # fmt: skip
BATCH = Case(
    "chain of 2, block, two temperatures", Language(16, 11), chain_of(2), "block", law_of_blocks,
    (SamplingParams(temperature=0.5), SamplingParams(temperature=1.4)),
)  # fmt: skip
COLD = Case(
    "chain of 2, block, temperature 0.001", Language(8, 13), chain_of(2), "block", law_of_blocks,
    (SamplingParams(temperature=1e-3),),
)  # fmt: skip
ROUNDS_OF_TOKENS = Case("3 tokens by rounds, tokens", Language(3, 19, 2.0), chain_of(3), "token", None)
ROUNDS_OF_BLOCKS = Case("3 tokens by rounds, block", Language(3, 19, 2.0), chain_of(3), "block", None)
CASES = (
    TOKENS, BLOCK, CUT, PENALIZED, FIXED, COUPLED, STOPPING, WITH, WITHOUT, MIXED, APART, BATCH, COLD, ROUNDS_OF_TOKENS,
    ROUNDS_OF_BLOCKS,
)  # fmt: skip


class Test(NamedTuple):
    statistic: float
    freedom: int
    p_value: float


def chi_square(counts: NDArray[np.int64], law: Law) -> Test:
    """Of counts against a law of the same shape. What the law excludes and was counted is a p-value of 0."""
    observed, expected = counts.ravel(), law.ravel() * counts.sum()
    if observed[expected == 0].any():
        return Test(np.inf, 0, 0.0)
    cells: list[tuple[float, float]] = []
    seen, wanted = 0.0, 0.0
    for index in np.argsort(expected):
        seen, wanted = seen + float(observed[index]), wanted + float(expected[index])
        if wanted >= LEAST_EXPECTED:
            cells.append((seen, wanted))
            seen, wanted = 0.0, 0.0
    statistic = float(sum((seen - wanted) ** 2 / wanted for seen, wanted in cells))
    return Test(
        statistic, len(cells) - 1, float(chi2.sf(statistic, len(cells) - 1)) if len(cells) > 1 else 1.0
    )


@dataclass(frozen=True)
class Bias:
    """A fault, and a case that it is seen in.

    draft     drafts in the proposer's place
    replaced  names of octavo.runtime.speculative.accept: what takes their places
    note      what has to be said of it
    """

    name: str
    case: Case
    draft: Propose | None = None
    replaced: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def by_fault(fault: Fault, case: Case) -> Bias:
    """Verification with a changed line."""
    module = fault.seeded()
    names = ("Noise", "walk", "verify_tokens", "verify_block")
    return Bias(fault.name, case, replaced={name: getattr(module, name) for name in names})


def told_as(params: Callable[[SamplingParams], SamplingParams]) -> Propose:
    """Honest draws, whose probs are those of other parameters."""

    def draft(player: Player, asked: Asked) -> Draft:
        drawn = player.draft(asked)
        others = params(asked.request.params)
        return replace(drawn, probs=tuple(probabilities(row, others) for row in rows_of(player, drawn)))

    return draft


def rows_of(player: Player, draft: Draft) -> list[Logits]:
    """The draft model's logits that each node was drawn from."""
    paths = [path_to(draft.parents, draft.token_ids, parent) for parent in draft.parents]
    return [player.language.proposer(player.generated + path) for path in paths]


def best_told_as_drawn(player: Player, asked: Asked) -> Draft:
    tokens: Tokens = ()
    probs: list[Distribution] = []
    for _ in range(asked.most):
        probs.append(probabilities(player.language.proposer(player.generated + tokens), asked.request.params))
        tokens = (*tokens, int(probs[-1].argmax()))
    return Draft(tokens, tuple(range(ROOT, asked.most - 1)), tuple(probs))


def without_doubtful(player: Player, asked: Asked) -> Draft:
    """Ends before a token that is improbable, having seen it."""
    draft = player.draft(asked)
    shares = [
        float(probs[token])
        for probs, token in zip(draft.probs, draft.token_ids, strict=True)
        if probs is not None
    ]
    return only(draft, range(next((node for node, share in enumerate(shares) if share < 0.15), len(draft))))


def without_repeated(player: Player, asked: Asked) -> Draft:
    """Of siblings that were drawn alike, one."""
    draft = player.draft(asked)
    if draft.token_ids[0] != draft.token_ids[1]:
        return draft
    return Draft((draft.token_ids[0], draft.token_ids[2]), (ROOT, 0), (draft.probs[0], draft.probs[2]))


def best_sibling_first(player: Player, asked: Asked) -> Draft:
    draft = player.draft(asked)
    (one, two, behind), probs = draft.token_ids, draft.probs
    assert probs[0] is not None
    return draft if probs[0][one] >= probs[0][two] else Draft((two, one, behind), (ROOT, ROOT, 1), probs)


def fresh_after_a_miss(chunk: Chunk, rows: Any) -> list[Sampled]:
    """Coupled, but the token that differs from the draft is drawn once more."""
    taken = RIGHT_COUPLED(chunk, rows)
    if len(taken) <= len(chunk.draft):
        depth = len(taken) - 1
        again = Noise(rows._key, len(chunk.branch.tokens), 0).residual(depth)
        taken[-1] = Sampled(draw(probabilities(rows.logits[depth], chunk.request.params), again))
    return taken


def unprocessed_bonus(chunk: Chunk, rows: Any, verdict: Verdict) -> list[Sampled]:
    """Behind the last draft the parameters are forgotten."""
    taken = RIGHT_TOLD(chunk, rows, verdict)
    if len(taken) == len(chunk.draft) + 1:
        point = Noise(rows._key, len(chunk.branch.tokens), 0).plain(len(chunk.draft))
        taken[-1] = Sampled(draw(probabilities(rows.logits[-1], HOT), point))
    return taken


def of_another_request(logits: Logits, params: SamplingParams) -> Distribution:
    first, second = BATCH.params
    return probabilities(logits, second if params == first else first)


def without_maximum(logits: Logits, params: SamplingParams) -> Distribution:
    """A softmax that overflows."""
    with np.errstate(all="ignore"):
        weights = np.exp(logits.astype(np.float64) / params.temperature)
        result: Distribution = weights / weights.sum()
    return result


RIGHT_COUPLED, RIGHT_TOLD = accept._coupled, accept._told
BIASES = (
    by_fault(RESIDUAL_IS_P, TOKENS),
    Bias("equality test, then a fresh sample", FIXED, replaced={"_coupled": fresh_after_a_miss}),
    Bias("the best token told as drawn", TOKENS, best_told_as_drawn),
    Bias("probs of another temperature", TOKENS, told_as(lambda params: replace(params, temperature=1.3))),
    Bias("probs without the draw's top-k", CUT, told_as(lambda params: replace(params, top_k=0))),
    by_fault(DRAFT_NOISE_RECOVERS, TOKENS),
    by_fault(DRAFT_NOISE_ACCEPTS, TOKENS),
    by_fault(STALE_Q, WITHOUT),
    by_fault(STALE_P, WITH),
    Bias("ends before a doubtful token", TOKENS, without_doubtful),
    Bias(
        "probs missing, as if a rule had chosen", TOKENS,
        lambda player, asked: replace(player.draft(asked), probs=(None,) * asked.most),
        note="output stays right, fewer are accepted",
    ),
    by_fault(BONUS_TOO_EARLY, BLOCK),
    Bias("bonus token without processing", CUT, replaced={"_told": unprocessed_bonus}),
    by_fault(TOKEN_RESIDUAL, BLOCK),
    by_fault(ALL_OR_NOTHING, TOKENS),
    Bias("temperature of another request", BATCH, replaced={"probabilities": of_another_request}),
    Bias("softmax overflows when cold", COLD, replaced={"probabilities": without_maximum}),
    Bias(
        "draft's numbers again in the next round", ROUNDS_OF_BLOCKS,
        lambda player, asked: player.draft(asked._replace(round=0)),
    ),
    Bias("repeated siblings dropped", WITH, without_repeated),
    Bias("siblings sorted, best first", WITH, best_sibling_first),
)  # fmt: skip


def run_case(case: Case, num_draws: int, seed: int = SEED) -> tuple[Played, Test]:
    return run_bias(Bias("", case), num_draws, seed)


def run_bias(bias: Bias, num_draws: int, seed: int = SEED) -> tuple[Played, Test]:
    law = bias.case.laws()
    with sped_up(), contextlib.ExitStack() as stack:
        for name, wrong in bias.replaced.items():
            stack.enter_context(mock.patch.object(accept, name, wrong))
        played = play(bias.case, law, num_draws, seed, bias.draft)
    return played, chi_square(played.counts, law)


def is_caught(played: Played, test: Test) -> bool:
    return bool(played.broken) or test.p_value < ALPHA


def check_cases(num_draws: int) -> bool:
    print(f"{'case':<44}{'draws':>9}{'chi-square':>12}{'cells':>7}{'p':>10}{'s':>6}")
    are_good = True
    for case in CASES:
        began = time.perf_counter()
        played, test = run_case(case, num_draws)
        are_good &= not is_caught(played, test)
        print(
            f"{case.name:<44}{played.counts.sum():>9,}{test.statistic:>12.1f}{test.freedom + 1:>7}{test.p_value:>10.2g}"
            f"{time.perf_counter() - began:>6.0f}{' MISS' if is_caught(played, test) else ''} {played.broken}",
            flush=True,
        )
    return are_good


def check_biases(num_draws: int) -> bool:
    print(f"\n{'seeded bias':<44}{'draws':>9}{'chi-square':>12}{'cells':>7}{'p':>10}")
    num_caught = 0
    for bias in BIASES:
        for share in (20, 4, 1):
            played, test = run_bias(bias, num_draws // share)
            if is_caught(played, test):
                num_caught += 1
                break
        said = (
            played.broken.split(",")[0]
            if played.broken
            else "caught"
            if is_caught(played, test)
            else "NOT SEEN"
        )
        print(
            f"{bias.name:<44}{played.counts.sum():>9,}{test.statistic:>12.1f}{test.freedom + 1:>7}{test.p_value:>10.2g}"
            f"  {said}{f' ({bias.note})' if bias.note else ''}",
            flush=True,
        )
    print(f"caught {num_caught} / {len(BIASES)}")
    return num_caught == len(BIASES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=200_000, help="of each case (default: 200,000)")
    options = parser.parse_args()
    are_good = check_cases(options.draws)
    are_caught = check_biases(options.draws)
    raise SystemExit(0 if are_good and are_caught else 1)


if __name__ == "__main__":
    main()
