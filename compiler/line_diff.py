"""Differences of two texts by lines, for graphs of thousands of lines: patience diff (Bram Cohen).

Lines that occur once in both texts are the anchors; the most of them that keep their order stay in place, and
what lies between two anchors is compared in the same way. `difflib` compares what has no anchor, while it is short.
"""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

SHORT = 400  # lines of both sides together that difflib, which takes their product of time, may compare

Opcode = tuple[str, int, int, int, int]


def opcodes(before: Sequence[str], after: Sequence[str]) -> list[Opcode]:
    """`equal`, `replace`, `delete` and `insert` with line ranges, as difflib's `get_opcodes` gives them."""
    found: list[Opcode] = []
    i = j = 0
    for start_i, start_j, length in [*_joined(_blocks(before, after)), (len(before), len(after), 0)]:
        if i < start_i or j < start_j:
            tag = "replace" if i < start_i and j < start_j else "delete" if i < start_i else "insert"
            found.append((tag, i, start_i, j, start_j))
        if length:
            found.append(("equal", start_i, start_i + length, start_j, start_j + length))
        i, j = start_i + length, start_j + length
    return found


def unified(before: Sequence[str], after: Sequence[str], names: tuple[str, str], context: int = 2) -> str:
    """A unified diff of lines without line ends; "" where nothing differs."""
    matcher: Any = SequenceMatcher(None, before, after)
    matcher.opcodes = opcodes(before, after)  # it groups what it finds here
    lines = []
    for group in matcher.get_grouped_opcodes(context):
        first, last = group[0], group[-1]
        spans = ((first[1], last[2]), (first[3], last[4]))
        olds, news = (f"{start + (end > start)},{end - start}" for start, end in spans)
        lines.append(f"@@ -{olds} +{news} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [f" {line}" for line in before[i1:i2]]
            else:
                lines += [f"-{line}" for line in before[i1:i2]] + [f"+{line}" for line in after[j1:j2]]
    return "\n".join([f"--- {names[0]}", f"+++ {names[1]}", *lines]) + "\n" if lines else ""


def _blocks(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Equal runs (start before, start after, length) in order."""
    todo = [(0, len(before), 0, len(after))]
    while todo:
        i1, i2, j1, j2 = todo.pop()
        head = 0
        while i1 + head < i2 and j1 + head < j2 and before[i1 + head] == after[j1 + head]:
            head += 1
        if head:
            yield i1, j1, head
        i1, j1 = i1 + head, j1 + head
        tail = 0
        while i1 < i2 - tail and j1 < j2 - tail and before[i2 - tail - 1] == after[j2 - tail - 1]:
            tail += 1
        i2, j2 = i2 - tail, j2 - tail
        inner: list[tuple[int, int, int, int]] = []
        if i1 < i2 and j1 < j2:
            anchors = _anchors(before[i1:i2], after[j1:j2])
            if anchors:
                ends = [(i1, j1), *((i1 + i, j1 + j) for i, j in anchors), (i2, j2)]
                inner = [(a, c, b, d) for (a, b), (c, d) in itertools.pairwise(ends)]
            elif i2 - i1 + j2 - j1 <= SHORT:
                matcher = SequenceMatcher(None, before[i1:i2], after[j1:j2], autojunk=False)
                yield from ((i1 + m.a, j1 + m.b, m.size) for m in matcher.get_matching_blocks() if m.size)
        if tail:
            todo.append((i2, i2 + tail, j2, j2 + tail))
        todo += reversed(inner)


def _anchors(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    """Lines that occur once in both, as many as keep their order in both: a longest increasing subsequence."""
    counts, others = Counter(before), Counter(after)
    places = {line: j for j, line in enumerate(after) if others[line] == 1}
    pairs = [(i, places[line]) for i, line in enumerate(before) if counts[line] == 1 and line in places]
    ends: list[int] = []  # smallest end of a chain of each length
    tops: list[int] = []  # the pair that has it
    previous: list[int] = []
    for index, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        previous.append(tops[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        tops[length : length + 1] = [index]
    chain, index = [], tops[-1] if tops else -1
    while index >= 0:
        chain.append(pairs[index])
        index = previous[index]
    return chain[::-1]


def _joined(blocks: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Runs that follow each other directly are one."""
    current: tuple[int, int, int] | None = None
    for block in blocks:
        if current and current[0] + current[2] == block[0] and current[1] + current[2] == block[1]:
            current = (current[0], current[1], current[2] + block[2])
            continue
        if current:
            yield current
        current = block
    if current:
        yield current
