"""What followed the last tokens where they occurred before, in this text and in earlier answers, by how often it did.

Source: Oliaro et al., SuffixDecoding, 2024: drafts from suffix trees, scored by the counts of their nodes. Here the
part of the tree below the last tokens is made from the places where they occur, when it is asked for.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.prefix_cache import CacheKey
from octavo.runtime.request import Branch, Request
from octavo.runtime.speculative.draft import NO_DRAFT, ROOT, Draft
from octavo.runtime.speculative.occurrences import Occurrences
from octavo.runtime.speculative.proposer import Asked
from octavo.runtime.speculative.tokens_alone import TokensAlone

# Tokens that are compared at most.
LONGEST = 24

# Earlier answers: at most this many tokens for each key, and this many keys; the oldest are forgotten.
MAX_ANSWER_TOKENS = 200_000
MAX_KEYS = 64

# What a place weighs that says that something new comes: as much as a match of sqrt(2) tokens.
_NOVELTY = 2.0

# Places are looked for until they weigh this much together: as much as 4 of the longest matches.
_ENOUGH = 4.0 * LONGEST * LONGEST

# Between answers; equal to no token.
_GAP = -1


class _Place(NamedTuple):
    """A place where the last tokens occurred: what follows there begins at `text[next]`.

    period  tokens from it to the text's end, if that is the newest token: what repeats itself goes on so there; 0: not
    """

    text: Sequence[int]
    next: int
    length: int
    period: int

    @property
    def token_id(self) -> int:
        beyond = self.next - len(self.text)
        if beyond < 0:
            return self.text[self.next]
        return self.text[beyond % self.period - self.period] if self.period else _GAP

    @property
    def passed(self) -> "_Place":
        """Behind one token more."""
        return _Place(self.text, self.next + 1, self.length + 1, self.period)

    @property
    def weight(self) -> float:
        return float(self.length * self.length)


@dataclass
class _Answers:
    """What was generated under a key, one answer after the other."""

    width: int
    index: Occurrences = field(init=False)

    def __post_init__(self) -> None:
        self.index = Occurrences([], self.width)

    def add(self, answer: Sequence[int]) -> None:
        text = [*self.index.text, _GAP, *answer]
        if len(text) > MAX_ANSWER_TOKENS:  # half of it, so that indexing it again is rare
            self.index = Occurrences(text[-MAX_ANSWER_TOKENS // 2 :], self.width)
        else:
            assert isinstance(self.index.text, list)
            self.index.text += [_GAP, *answer]
        self.index.extend()


@dataclass(frozen=True)
class _Own:
    """A branch that still grows. It is not kept from ending; its tokens are, until they are taken as an answer."""

    branch: "ref[Branch]"
    index: Occurrences
    key: CacheKey
    prompt_len: int

    @property
    def has_ended(self) -> bool:
        branch = self.branch()
        return branch is None or branch.finish_reason is not None


class Suffix(TokensAlone):
    """Chains, or trees: the nodes that are most probable, as far as what followed before tells.

    The latest 64 places in the branch's own text count, and the latest 64 in answers that ended under the same cache
    salt and adapter, so that no text crosses to another tenant; fewer of each where long matches are many. A longer
    match weighs more: by its square.

    is_tree   whether drafts may branch
    shortest  tokens that must be equal
    """

    name = "suffix"

    def __init__(self, is_tree: bool = False, shortest: int = 2) -> None:
        assert 1 <= shortest <= LONGEST, f"{shortest}"
        self.has_tree = is_tree
        self.shortest = shortest
        self._own: dict[int, _Own] = {}
        self._answers: OrderedDict[CacheKey, _Answers] = OrderedDict()

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        self._collect()
        return [self._draft(each.request, each.branch, each.most) for each in asked]

    def _collect(self) -> None:
        """Take what ended as answers."""
        for name in [name for name, own in self._own.items() if own.has_ended]:
            own = self._own.pop(name)
            answers = self._answers.setdefault(own.key, _Answers(self.shortest))
            answers.add(own.index.text[own.prompt_len :])
            self._answers.move_to_end(own.key)
            if len(self._answers) > MAX_KEYS:
                self._answers.popitem(last=False)

    def _draft(self, request: Request, branch: Branch, most: int) -> Draft:
        own = self._own.get(id(branch))
        if own is None or own.branch() is not branch or not own.index.continues(branch.tokens):
            index = Occurrences(branch.tokens, self.shortest)
            own = self._own[id(branch)] = _Own(ref(branch), index, request.key, request.prompt_len)
        own.index.extend()
        indexes = [own.index]
        if (answers := self._answers.get(request.key)) is not None:
            indexes.append(answers.index)
        places = [place for index in indexes for place in _places(index, branch.tokens)]
        return _most_probable(places, most, self.has_tree)

    def use_pages(self, memory: PagedMemory) -> None:
        pass


def _places(index: Occurrences, tokens: Sequence[int]) -> list[_Place]:
    places, weight = [], 0.0
    for end in index.places(tokens):
        period = len(tokens) - end if index.text is tokens else 0
        place = _Place(index.text, end, index.match_len(tokens, end, LONGEST), period)
        places.append(place)
        weight += place.weight
        if weight >= _ENOUGH:
            break
    return places


class _Node(NamedTuple):
    parent: int
    token_id: int
    score: float  # given the parent
    path: float  # with all above
    places: list[_Place]


def _most_probable(places: list[_Place], most: int, is_tree: bool) -> Draft:
    """The `most` most probable nodes of the tree of what follows at these places; not a tree: those of one path."""
    nodes: list[_Node] = []
    order = itertools.count()  # of equal ones, what was found first
    queue: list[tuple[float, int, _Node]] = []
    parent, path = ROOT, 1.0
    while True:
        found = _followers(parent, path, places)
        for node in found if is_tree else found[:1]:
            heapq.heappush(queue, (-node.path, next(order), node))
        if not queue or len(nodes) == most:
            return _as_draft(nodes) if nodes else NO_DRAFT
        node = heapq.heappop(queue)[2]
        parent, path, places = len(nodes), node.path, node.places
        nodes.append(node)


def _followers(parent: int, path: float, places: Sequence[_Place]) -> list[_Node]:
    """The tokens that follow, the heaviest first."""
    groups: dict[int, list[_Place]] = {}
    for place in places:
        if (token_id := place.token_id) != _GAP:
            groups.setdefault(token_id, []).append(place)
    total = sum(place.weight for place in places) + _NOVELTY
    nodes = []
    for token_id, group in groups.items():
        score = sum(place.weight for place in group) / total
        nodes.append(_Node(parent, token_id, score, score * path, [place.passed for place in group]))
    return sorted(nodes, key=lambda node: -node.score)


def _as_draft(nodes: Sequence[_Node]) -> Draft:
    """The most probable path first, then what branches from it."""
    children: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(place)
    ordered: list[int] = []
    stack = children.get(ROOT, [])[::-1]
    while stack:
        place = stack.pop()
        ordered.append(place)
        stack += children.get(place, [])[::-1]
    places = {ROOT: ROOT, **{old: new for new, old in enumerate(ordered)}}
    return Draft(
        tuple(nodes[old].token_id for old in ordered),
        tuple(places[nodes[old].parent] for old in ordered),
        (None,) * len(ordered),
        scores=tuple(nodes[old].score for old in ordered),
    )
