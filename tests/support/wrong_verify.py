"""Faults seeded into verification, one at a time, by small changes of its source."""

import inspect
from dataclasses import dataclass
from types import ModuleType

from octavo.runtime.speculative import verify


@dataclass(frozen=True)
class Fault:
    """What stands in the source once, and what stands there instead."""

    name: str
    changes: tuple[tuple[str, str], ...]

    def seeded(self) -> ModuleType:
        """The real module with this fault."""
        source = inspect.getsource(verify)
        for right, wrong in self.changes:
            assert source.count(right) == 1, (
                f"{self.name}: {right!r} stands there {source.count(right)} times"
            )
            source = source.replace(right, wrong)
        module = ModuleType(verify.__name__)
        module.__dict__["Verdict"] = verify.Verdict
        exec(compile(source, verify.__file__, "exec"), module.__dict__)
        module.__dict__["Verdict"] = verify.Verdict  # so that verdicts compare as before
        return module


def fault(name: str, *changes: tuple[str, str]) -> Fault:
    return Fault(name, changes)


_SUBTRACTED = "np.subtract(left, less, out=less)\n    return np.maximum(less, 0, out=less)"
_ACCEPT = "uniform(self.key, self.position + depth, ACCEPT_STREAM, self.round, sibling)"
_EXCESS_OF_P = "_excess(rows[length], 1.0, draft.token_ids[length], drawn_from[length])"

RESIDUAL_IS_P = fault("residual is p", (_SUBTRACTED, "return left.copy()"))
STALE_Q = fault(
    "siblings without replacement by q of the first", ("before if draft.is_without_replacement else []", "[]")
)
STALE_P = fault(
    "siblings by p of the first",
    ("sibling) * share * mass < _at(left, ", "sibling) * share < _at(probs, "),
    ("_excess(left, mass, token_id, drawn_from)", "_excess(probs, 1.0, token_id, drawn_from)"),
)
TOKEN_RESIDUAL = fault(
    "block with the residual of tokens",
    ("draw(left if mass > 0 else", f"draw({_EXCESS_OF_P} if mass > 0 else"),
)
DRAFT_NOISE_RECOVERS = fault(
    "residual by the draft's numbers", ("RESIDUAL_STREAM, self.round", "1, self.round")
)
DRAFT_NOISE_ACCEPTS = fault("accepted by the draft's numbers", ("ACCEPT_STREAM, self.round", "1, self.round"))
ALL_OR_NOTHING = fault(
    "numbers collapse to 0 and 1", (f"return {_ACCEPT}", f"return float(round({_ACCEPT}))")
)
BONUS_TOO_EARLY = fault(
    "block: bonus of a row too early", ("draw(target(length - 1)", "draw(rows[length - 1]")
)

# Those that an enumeration sees: whatever the numbers are keyed by.
FAULTS_OF_RULES = (
    RESIDUAL_IS_P,
    STALE_Q,
    STALE_P,
    TOKEN_RESIDUAL,
    fault("residual without what was left", ("less = mass * drawn_from", "less = 1.0 * drawn_from")),
    fault("residual not normalised", ("left, mass = less, less_mass", "left = less")),
    fault("a refused fixed token may come", ("less[token_id] = 0", "less[token_id] *= 1")),
    fault("fixed siblings count as drawn", ("if drawn_from is not None:\n            b", "if 1:\n            b")),
    fault("q not normalised without siblings", ("probs /= mass", "probs /= 1")),
    fault("siblings from the last", ("enumerate(draft.children(node)):", "enumerate(draft.children(node)[::-1]):")),
    fault("tokens: what is left is p", ("return None, left", "return None, probs")),
    fault("block: weights above 1", ("/ share, 1.0)", "/ share, 9.0)")),
    fault("block: weights start anew", ("min(weights[-1] * _at", "min(_at")),
    fault("block: accepted with what is left", ("* (mass + 1 - weight) < mass", "< mass")),
    fault("block: the shortest beginning", ("range(len(weights) - 1, -1, -1)", "range(len(weights))")),
    BONUS_TOO_EARLY,
)  # fmt: skip
