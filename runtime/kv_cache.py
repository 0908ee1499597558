"""The pool of KV pages: which are free, which are held, by how many. It knows numbers only, not memory."""

from collections import Counter
from collections.abc import Iterable, Sequence

from octavo.compiler.errors import OutOfPages

NULL_PAGE = 0


class PagePool:
    """Pages 1..num_pages - 1, each free or held by one or more owners.

    Page 0 is the null page: unused columns of page tables point at it, and it is never handed out.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, f"expected the null page and at least one more, got {num_pages} pages"
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: pages just freed are warm

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that requests can hold at most."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one holder each, or none at all and OutOfPages."""
        if count > len(self._free):
            raise OutOfPages(
                f"page pool: expected {count} free pages, got {len(self._free)} of {self.capacity}"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            assert self._holders[page] == 0, f"page {page} was free and held"
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of these held pages."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is shared but nobody holds it"
            self._holders[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """One holder less; a page without holders is free. Last page first, so that heads are reused last."""
        for page in reversed(pages):
            assert page != NULL_PAGE and self._holders[page] > 0, f"page {page} is freed but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def rebuild(self, owners: Iterable[Sequence[int]]) -> None:
        """Derive all bookkeeping from what owners hold: after an interrupt in the middle of a step."""
        held = Counter(page for pages in owners for page in pages)
        self._holders = [held[page] for page in range(self.num_pages)]
        self._free = [page for page in range(self.num_pages - 1, NULL_PAGE, -1) if not held[page]]

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Assert conservation: every page is free once, or held exactly as often as owners list it."""
        held = Counter(page for pages in owners for page in pages)
        assert held[NULL_PAGE] == 0, "the null page was handed out"
        for page in range(1, self.num_pages):
            assert self._holders[page] == held[page], (
                f"page {page} counts {self._holders[page]} holders, owners list it {held[page]} times"
            )
        free = sorted(self._free)
        expected = [page for page in range(1, self.num_pages) if not held[page]]
        assert free == expected, f"free list {free[:8]}... is not the pages nobody holds {expected[:8]}..."
