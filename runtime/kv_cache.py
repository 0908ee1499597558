"""The pool of KV pages: which are free, which are held, by how many. It knows numbers only, not memory."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from octavo.compiler.errors import OutOfPages

NULL_PAGE = 0


class PageState(Enum):
    """NULL: page 0. CLEAN: free, contents worthless. CACHED: free, contents may be wanted again.
    PRIVATE: one holder. SHARED: several."""

    NULL = "null"
    CLEAN = "free-clean"
    CACHED = "free-cached"
    PRIVATE = "private"
    SHARED = "shared"


def _no_cache(page: int) -> None:
    raise AssertionError(f"page {page} is evicted, but this pool has no cache")


class PagePool:
    """Pages 1..num_pages - 1, each free or held by one or more owners.

    Page 0 is the null page: unused columns of page tables point at it, and it is never handed out. A page that
    `keep` marked stays findable when nobody holds it, until it is evicted: clean pages are handed out first, then
    kept ones in the order in which they became free.

    evict        called with each kept page that is about to be handed out as new; it must not change this pool
    generations  of each page, how often it was handed out as new: what was noted of an earlier life is void
    """

    def __init__(self, num_pages: int, evict: Callable[[int], None] = _no_cache) -> None:
        assert num_pages >= 1, f"expected at least the null page, got {num_pages} pages"
        self.num_pages = num_pages
        self.generations = [0] * num_pages
        self._evict = evict
        self._holders = [0] * num_pages
        self._is_kept = [False] * num_pages
        self._clean = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: pages just freed are warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest free first

    @property
    def num_free(self) -> int:
        """Pages that can be handed out, kept ones among them."""
        return len(self._clean) + len(self._cached)

    @property
    def capacity(self) -> int:
        """Pages that requests can hold at most."""
        return self.num_pages - 1

    def state(self, page: int) -> PageState:
        if page == NULL_PAGE:
            return PageState.NULL
        if self._holders[page]:
            return PageState.PRIVATE if self._holders[page] == 1 else PageState.SHARED
        return PageState.CACHED if self._is_kept[page] else PageState.CLEAN

    def count(self) -> dict[PageState, int]:
        """Pages in each state."""
        private = self._holders.count(1)
        return {
            PageState.NULL: 1,
            PageState.CLEAN: len(self._clean),
            PageState.CACHED: len(self._cached),
            PageState.PRIVATE: private,
            PageState.SHARED: self.capacity - self.num_free - private,
        }

    def is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def are_own(self, pages: Iterable[int]) -> bool:
        """Whether each of these held pages has one holder and is not kept."""
        for page in pages:
            if self._holders[page] > 1 or self._is_kept[page]:
                return False
        return True

    def is_held(self, page: int) -> bool:
        return self._holders[page] > 0

    @property
    def kept(self) -> set[int]:
        """Pages that `keep` marked, held or free."""
        return {page for page in range(self.num_pages) if self._is_kept[page]}

    def allocate(self, count: int, found: Sequence[int] = ()) -> list[int]:
        """`count` new pages with one holder each, and one more holder for each page of `found`; or OutOfPages and
        nothing changed.

        found  kept or held pages that the same owner wants; they are never evicted to make the new ones
        """
        revived = {page for page in found if self._holders[page] == 0} if found else ()
        if count > self.num_free - len(revived):
            raise OutOfPages(
                f"page pool: expected {count} free pages, got {self.num_free - len(revived)} of {self.capacity}"
            )
        for page in found:
            assert page != NULL_PAGE and (self._holders[page] or self._is_kept[page]), (
                f"page {page} is not there"
            )
            self._holders[page] += 1
            self._cached.pop(page, None)
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._clean:
            page = self._clean.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._evict(page)
            self._is_kept[page] = False
        assert self._holders[page] == 0, f"page {page} was free and held"
        self._holders[page] = 1
        self.generations[page] += 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these held pages; null pages are passed over."""
        for page in pages:
            if page != NULL_PAGE:
                assert self._holders[page] > 0, f"page {page} is shared but nobody holds it"
                self._holders[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """One holder less; a page without holders is free. Last page first, so that heads are reused last.

        Null pages are passed over.
        """
        for page in reversed(pages):
            if page == NULL_PAGE:
                continue
            assert self._holders[page] > 0, f"page {page} is freed but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._is_kept[page]:
                    self._cached[page] = None
                else:
                    self._clean.append(page)

    def keep(self, page: int) -> None:
        """Mark a held page as worth finding again."""
        assert self._holders[page] > 0, f"page {page} is kept but nobody holds it"
        self._is_kept[page] = True

    def forget(self, page: int) -> None:
        """Take back `keep`, whether the page is held or free."""
        if self._is_kept[page]:
            self._is_kept[page] = False
            if page in self._cached:
                del self._cached[page]
                self._clean.append(page)

    def rebuild(self, owners: Iterable[Sequence[int]]) -> None:
        """Derive all bookkeeping from what owners hold, and keep nothing: after an interrupt in mid-step."""
        held = _count(owners)
        self._holders = [held[page] for page in range(self.num_pages)]
        self._is_kept = [False] * self.num_pages
        self._cached = OrderedDict()
        self._clean = [page for page in range(self.num_pages - 1, NULL_PAGE, -1) if not held[page]]

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Assert conservation: every page is free once, or held exactly as often as owners list it."""
        held = _count(owners)
        for page in range(1, self.num_pages):
            assert self._holders[page] == held[page], (
                f"page {page} counts {self._holders[page]} holders, owners list it {held[page]} times"
            )
        free = [page for page in range(1, self.num_pages) if not held[page]]
        clean = [page for page in free if not self._is_kept[page]]
        assert sorted(self._clean) == clean, f"clean list {sorted(self._clean)[:8]}... is not {clean[:8]}..."
        cached = [page for page in free if self._is_kept[page]]
        assert sorted(self._cached) == cached, f"cached list {sorted(self._cached)[:8]} is not {cached[:8]}"


def _count(owners: Iterable[Sequence[int]]) -> Counter[int]:
    return Counter(page for pages in owners for page in pages if page != NULL_PAGE)
