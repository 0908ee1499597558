"""Prompt lookup: what followed the last tokens where they occurred before in prompt or answer.

Source: Saxena, Prompt Lookup Decoding, 2023. Good for texts that repeat themselves: edits, summaries, code.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.request import Branch
from octavo.runtime.speculative.draft import NO_DRAFT, Draft, chain
from octavo.runtime.speculative.occurrences import Occurrences
from octavo.runtime.speculative.proposer import Asked
from octavo.runtime.speculative.tokens_alone import TokensAlone

# Scores stop rising with longer matches.
_MAX_SCORED = 32


class NGram(TokensAlone):
    """Chains. Of the latest 64 places where the last tokens occurred, that where most of them did; of equal ones the
    latest.

    longest   tokens that are compared at most, `shortest` that must be equal
    A draft that runs into the newest token goes on with its own beginning, as what repeats itself does.
    """

    name = "ngram"
    has_tree = False

    def __init__(self, longest: int = 8, shortest: int = 2) -> None:
        assert 1 <= shortest <= longest, f"{shortest} to {longest}"
        self.longest = longest
        self.shortest = shortest
        self._texts: WeakKeyDictionary[Branch, Occurrences] = WeakKeyDictionary()

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        return [self._draft(each.branch, each.most) for each in asked]

    def _draft(self, branch: Branch, most: int) -> Draft:
        tokens = branch.tokens
        text = self._texts.get(branch)
        if text is None or not text.continues(tokens):
            text = self._texts[branch] = Occurrences(tokens, self.shortest)
        text.extend()
        best, best_len = 0, 0
        for end in text.places(tokens):
            length = text.match_len(tokens, end, self.longest)
            if length > best_len:
                best, best_len = end, length
                if length == self.longest:
                    break
        if best_len == 0:
            return NO_DRAFT
        drafted = list(tokens[best : best + most])
        period = len(tokens) - best
        while len(drafted) < most:
            drafted.append(drafted[-period])
        return chain(drafted, [match_score(best_len + place) for place in range(most)])

    def use_pages(self, memory: PagedMemory) -> None:
        pass


def match_score(length: int) -> float:
    """How probable it is that a text goes on as it did after the same `length` tokens: a guess that rises with it, and
    that is compared with what comes of it later."""
    return min(length, _MAX_SCORED) / (min(length, _MAX_SCORED) + 1)
