"""Where the last tokens of a text occurred before: an index that grows with the text."""

from collections.abc import Iterator, Sequence
from itertools import islice

# Of places where the last tokens occurred, the latest are looked at.
MAX_PLACES = 64


class Occurrences:
    """Of each run of `width` tokens in a text, where it ends. A token costs the same however long the text is."""

    def __init__(self, text: Sequence[int], width: int) -> None:
        self.text = text  # it may grow at its end; `extend` says that it did
        self.width = width
        self._num_indexed = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._newest: tuple[int, ...] = ()

    def extend(self) -> None:
        """Take in what came since."""
        width, text = self.width, self.text
        for end in range(max(self._num_indexed + 1, width), len(text) + 1):
            self._ends.setdefault(tuple(text[end - width : end]), []).append(end)
        self._num_indexed = len(text)
        self._newest = tuple(text[-width:])

    def continues(self, text: Sequence[int]) -> bool:
        """Whether a text is the very one taken in, with more tokens perhaps; by its last ones, as texts only grow."""
        count = self._num_indexed
        return (
            text is self.text
            and len(text) >= count
            and tuple(text[max(count - self.width, 0) : count]) == self._newest
        )

    def places(self, tail: Sequence[int]) -> Iterator[int]:
        """Ends of the last `width` tokens of `tail` in the text, the latest first, that tokens follow."""
        ends = self._ends.get(tuple(tail[-self.width :]), ())
        return islice((end for end in reversed(ends) if end < len(self.text)), MAX_PLACES)

    def match_len(self, tail: Sequence[int], end: int, most: int) -> int:
        """How many of the last tokens of `tail` lie before `end`, up to `most`."""
        text, limit = self.text, min(most, end, len(tail))
        length = 0
        while length < limit and text[end - 1 - length] == tail[-1 - length]:
            length += 1
        return length
