"""Page tables over the pool: admit, reserve, fork with copy-on-write, slide a window, swap to host memory.

Numbers only: contents move when somebody runs `moves`, in order, before the next step writes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.compiler.errors import OutOfPages
from octavo.runtime.kv_cache import NULL_PAGE, PagePool
from octavo.runtime.page_moves import Move
from octavo.runtime.prefix_cache import CacheKey, Hash, Match, Node, PrefixCache, sha256

_MOST_TOKENS = 1 << 40


@dataclass(eq=False)
class PageTable:
    """The pages of one sequence.

    groups        for each page group, pages by position; the null page where a window slid past
    num_tokens    tokens whose keys and values are in the pages
    node          the deepest page of the sequence that the prefix cache was told of, and num_known pages lead to it
    in_host       groups hold slots of host memory instead
    num_writable  tokens up to this one are in pages of its own or may be written there; 0: to be looked up
    """

    groups: list[list[int]]
    root: Node
    node: Node
    num_tokens: int = 0
    num_known: int = 0
    in_host: bool = False
    slid: list[int] = field(default_factory=list)
    num_writable: int = 0

    @property
    def is_empty(self) -> bool:
        return not any(self.groups)


class PagedMemory:
    """Who holds which page, in a pool of device pages and one of host slots, and what is to be moved.

    windows           of each page group in tokens; None: full attention
    num_host_pages    slots for swapped sequences and for cached pages that the pool needs; 0: none
    use_prefix_cache  find the beginnings of prompts among pages computed before
    """

    def __init__(
        self, num_pages: int, page_size: int, windows: Sequence[int | None] = (None,), *,
        num_host_pages: int = 0, use_prefix_cache: bool = True, digest: Hash = sha256,
    ) -> None:  # fmt: skip
        assert num_pages >= 2, f"expected the null page and at least one more, got {num_pages} pages"
        self.page_size = page_size
        self.windows = tuple(windows)
        self._windowed = tuple(group for group, window in enumerate(windows) if window is not None)
        self.use_prefix_cache = use_prefix_cache
        self.prefixes = PrefixCache(page_size, windows, digest)
        self.pool = PagePool(num_pages, self._evict)
        self.host = PagePool(num_host_pages + 1, self.prefixes.drop_slot)
        self.moves: list[Move] = []
        self.is_moving = False
        self.num_evicted = 0

    def new_table(self, key: CacheKey) -> PageTable:
        root = self.prefixes.root(key)
        return PageTable([[] for _ in self.windows], root, root, slid=[0] * len(self.windows))

    def admit(self, table: PageTable, tokens: Sequence[int], key: CacheKey, most: int | None = None) -> int:
        """Give an empty table room for its tokens, sharing what is cached; returns the tokens found.

        At most `most` tokens are looked for, and at least the last is left to compute. Windowed groups get their
        pages later, by `reserve`. All or nothing: OutOfPages leaves everything as it was.
        """
        assert table.is_empty and not table.in_host, "a table is admitted twice"
        match = self._match(tokens, key, len(tokens) if most is None else most)
        length, wanted = len(match.path), self._pages_of(len(tokens))
        found, absent = self._parts(match)
        num_new = sum(wanted - length for window in self.windows if window is None)
        slots = [node.slots[group] for node, group in absent]
        self.host.allocate(0, [slot for slot in slots if slot is not None])  # not to be evicted meanwhile
        try:
            pages = self.pool.allocate(len(absent) + num_new, found)
        except OutOfPages:
            self.host.free([slot for slot in slots if slot is not None])
            raise
        for (node, group), page in zip(absent, pages, strict=False):
            self._bring_in(node, group, page)
        fresh = iter(pages[len(absent) :])
        rows = []
        for group, window in enumerate(self.windows):
            first = match.first[group]
            row: list[int] = [NULL_PAGE] * first + [_page(node, group) for node in match.path[first:]]
            if window is None:
                row += [next(fresh) for _ in range(wanted - length)]
            rows.append(row)
        table.slid = list(match.first)
        table.node, table.num_known = (match.path[-1] if match.path else table.root), length
        table.num_tokens = length * self.page_size
        table.groups = rows  # last: an interrupted table is empty or whole
        return table.num_tokens

    def _match(self, tokens: Sequence[int], key: CacheKey, most: int) -> Match:
        limit = min(len(tokens) - 1, most) // self.page_size if self.use_prefix_cache else 0
        return self.prefixes.match(tokens, key, limit)

    def _parts(self, match: Match) -> tuple[list[int], list[tuple[Node, int]]]:
        """The pages of a match that are in the pool, and the (node, group) that are in host memory only."""
        found: list[int] = []
        absent: list[tuple[Node, int]] = []
        for group, first in enumerate(match.first):
            for node in match.path[first:]:
                page = node.pages[group]
                if page is None:
                    absent.append((node, group))
                else:
                    found.append(page)
        return found, absent

    def _bring_in(self, node: Node, group: int, page: int) -> None:
        """Move a cached page back from host memory."""
        slot = node.slots[group]
        assert slot is not None, "a cached page is nowhere"
        self.moves.append(Move("in", slot - 1, page))
        self.prefixes.add_page(node, group, page)
        self.pool.keep(page)
        self.prefixes.drop_slot(slot)
        self.host.forget(slot)
        self.host.free([slot])

    def _evict(self, page: int) -> None:
        """The pool needs a cached page: keep its contents in host memory if there is room."""
        self.num_evicted += 1
        if self.host.num_free and not self.prefixes.has_slot(page):
            slot = self.host.allocate(1)[0]
            self.moves.append(Move("out", page, slot - 1))
            self.prefixes.to_slot(page, slot)
            self.host.keep(slot)
            self.host.free([slot])
        self.prefixes.drop_page(page)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reserve(self, table: PageTable, end: int) -> None:
        """Room to write tokens num_tokens : end, in pages of its own; all or nothing (OutOfPages).

        A shared page that is about to be written is copied first; a page of its own that the prefix cache knows,
        with other tokens after those that it shared, is forgotten there.
        """
        if end <= table.num_writable:
            return  # nearly always, and this is asked for every token
        first, last = table.num_tokens // self.page_size, self._pages_of(end)
        grown = [self._missing(table, group, last) for group in range(len(self.windows))]
        written = [
            (group, index)
            for group, row in enumerate(table.groups)
            for index in range(first, min(last, len(row)))
        ]
        copied = [(group, i) for group, i in written if self.pool.is_shared(table.groups[group][i])]
        fresh = iter(self.pool.allocate(len(copied) + sum(num_new for _, num_new in grown)))
        for group, index in written:
            self._overwrite(table.groups[group][index])
        for group, index in copied:
            row = table.groups[group]
            old, new = row[index], next(fresh)
            self.moves.append(Move("copy", old, new))
            row[index] = new
            self.pool.free([old])
        for row, (num_null, num_new) in zip(table.groups, grown, strict=True):
            row.extend([NULL_PAGE] * num_null + [next(fresh) for _ in range(num_new)])
        table.num_writable = last * self.page_size

    def _overwrite(self, page: int) -> None:
        """A page is written: its only holder may be what shared the beginning of a page that is cached."""
        if not self.pool.is_shared(page) and self.prefixes.has(page):
            self.pool.forget(page)
            self.prefixes.drop_page(page)

    def _missing(self, table: PageTable, group: int, last: int) -> tuple[int, int]:
        """(null pages, new pages) that a group's row lacks up to page `last`."""
        have = len(table.groups[group])
        if last <= have:
            return 0, 0
        num_null = max(0, min(last, self.prefixes.first_page(group, table.num_tokens)) - have)
        return num_null, last - have - num_null

    def commit(self, table: PageTable, tokens: Sequence[int], num_tokens: int) -> None:
        """The first `num_tokens` of these tokens are computed: remember full pages, free what a window passed."""
        table.num_tokens = num_tokens
        while self.use_prefix_cache and (table.num_known + 1) * self.page_size <= num_tokens:
            self._remember(table, tokens)
        for group in self._windowed:
            row, first = table.groups[group], self.prefixes.first_page(group, num_tokens)
            if first > table.slid[group]:
                passed, row[table.slid[group] : first] = (
                    row[table.slid[group] : first],
                    [NULL_PAGE] * (first - table.slid[group]),
                )
                table.slid[group] = first
                self.pool.free(passed)

    def _remember(self, table: PageTable, tokens: Sequence[int]) -> None:
        begin = table.num_known * self.page_size
        node = self.prefixes.child(table.node, tuple(tokens[begin : begin + self.page_size]))
        for group, row in enumerate(table.groups):
            page = row[table.num_known]
            if page != NULL_PAGE and self.prefixes.add_page(node, group, page):
                self.pool.keep(page)
        table.node, table.num_known = node, table.num_known + 1

    def fork(self, table: PageTable) -> PageTable:
        """A second sequence with the same tokens. Nothing is copied until one of the two writes."""
        assert not table.in_host, "a swapped sequence is forked"
        table.num_writable = 0
        for row in table.groups:
            self.pool.share(row)
        groups = [list(row) for row in table.groups]
        return PageTable(
            groups, table.root, table.node, table.num_tokens, table.num_known, slid=list(table.slid)
        )

    def share_prefix(self, table: PageTable, source: PageTable, length: int) -> bool:
        """Give an empty table the first `length` tokens of a computed one; False if a window slid past them."""
        assert table.is_empty and length <= source.num_tokens, "nothing to share"
        first = [self.prefixes.first_page(group, length) for group in range(len(self.windows))]
        if any(slid > needed for slid, needed in zip(source.slid, first, strict=True)):
            return False
        source.num_writable = 0
        count = self._pages_of(length)
        rows = [
            [NULL_PAGE] * start + row[start:count] for start, row in zip(first, source.groups, strict=True)
        ]
        for row in rows:
            self.pool.share(row)
        node, num_known = source.node, min(source.num_known, length // self.page_size)
        for _ in range(source.num_known - num_known):
            assert node.parent is not None, "a node lacks its parent"
            node = node.parent
        table.node, table.num_known, table.num_tokens, table.slid = node, num_known, length, first
        table.groups = rows  # last: an interrupted table is empty or whole
        return True

    def release(self, table: PageTable) -> None:
        """Take back all pages of a table. It can be admitted again."""
        groups, table.groups = table.groups, [[] for _ in self.windows]
        table.num_tokens, table.num_known, table.node, table.num_writable = 0, 0, table.root, 0
        table.slid = [0] * len(self.windows)
        holder, table.in_host = (self.host if table.in_host else self.pool), False
        for row in groups:
            holder.free(row)

    def swap_out(self, tables: Sequence[PageTable]) -> None:
        """Move sequences to host memory, each shared page once; OutOfPages if there is no room, nothing changed."""
        self._swap(tables, self.pool, self.host, lambda page, slot: Move("out", page, slot - 1))

    def swap_in(self, tables: Sequence[PageTable]) -> None:
        """The way back; OutOfPages if the pool has no room, nothing changed."""
        self._swap(tables, self.host, self.pool, lambda slot, page: Move("in", slot - 1, page))

    def _swap(
        self, tables: Sequence[PageTable], old: PagePool, new: PagePool, move: Callable[[int, int], Move]
    ) -> None:
        distinct = _distinct(tables)
        target = dict(zip(distinct, new.allocate(len(distinct)), strict=True)) | {NULL_PAGE: NULL_PAGE}
        self.moves += [move(page, target[page]) for page in distinct]
        seen: set[int] = set()
        for table in tables:
            table.num_writable = 0
            moved = [[target[page] for page in row] for row in table.groups]
            for row in moved:
                new.share([page for page in row if page in seen])
                seen.update(row)
            rows, table.groups = table.groups, [[] for _ in self.windows]
            table.in_host = new is self.host
            table.groups = moved
            for row in rows:
                old.free(row)

    def num_held(self, tables: Sequence[PageTable]) -> int:
        """Pages of these tables, or slots, shared ones once."""
        return len(_distinct(tables))

    def run_moves(self, run: Callable[[Sequence[Move]], None]) -> None:
        """Have what is queued moved, in order; nothing may be written before."""
        if self.moves:
            # An interrupt leaves it so: some moves may be done, and they cannot be repeated.
            self.is_moving = True
            run(self.moves)
            self.moves = []
            self.is_moving = False

    def most_tokens(self, prompt_len: int, num_branches: int, step_tokens: int, shared: bool) -> int:
        """The most tokens with keys and values that a request can have if it is alone in the pool.

        step_tokens  that a step may write of it
        shared       branches share all but their last page (the least they need), else the prompt only
        """
        low, high = 0, _MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._need(middle, prompt_len, num_branches, step_tokens, shared) <= self.pool.capacity
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _need(self, length: int, prompt_len: int, branches: int, step_tokens: int, shared: bool) -> int:
        total, pages = 0, self._pages_of(length)
        if length <= prompt_len:
            own, branches = 0, 1  # they fork at its end
        else:
            own = 1 if shared else pages - prompt_len // self.page_size
        for window in self.windows:
            if window is None:
                total += pages + (branches - 1) * own
            else:
                total += min(pages, self._spanned(window - 1 + step_tokens))
                total += (branches - 1) * min(own, self._spanned(window))
        return total

    def _spanned(self, num_tokens: int) -> int:
        """The most pages that neighbouring tokens can lie in."""
        return self._pages_of(num_tokens - 1) + 1

    def rebuild(self, tables: Sequence[PageTable], ended: Iterable[PageTable]) -> None:
        """Make the books whole after an interrupt: what tables hold is what counts; the prefix cache starts anew.

        ended  tables that hold nothing any more, whatever they say
        """
        for table in ended:
            table.groups, table.in_host = [[] for _ in self.windows], False
        if self.is_moving:
            self.moves, self.is_moving = [], False
        self.prefixes.clear()
        for table in tables:
            table.node, table.num_known, table.num_writable = table.root, 0, 0
            if table.is_empty:  # given up just now
                table.num_tokens, table.slid, table.in_host = 0, [0] * len(self.windows), False
        self.pool.rebuild([row for table in tables if not table.in_host for row in table.groups])
        self.host.rebuild([row for table in tables if table.in_host for row in table.groups])

    def check(self, tables: Iterable[PageTable]) -> None:
        """Assert that no page or slot is lost, held twice by mistake, or found under two names."""
        tables = list(tables)
        self.pool.check([row for table in tables if not table.in_host for row in table.groups])
        self.host.check([row for table in tables if table.in_host for row in table.groups])
        for table in tables:
            written = slice(table.num_tokens // self.page_size, table.num_writable // self.page_size)
            assert all(self.pool.are_own(row[written]) for row in table.groups), (
                "another's page may be written"
            )
        self.prefixes.check()
        assert self.pool.kept == set(self.prefixes.pages), (
            "pages are kept and not findable, or findable and not kept"
        )
        assert self.host.kept == set(self.prefixes.slots), (
            "slots are kept and not findable, or findable and not kept"
        )


def _distinct(tables: Sequence[PageTable]) -> list[int]:
    """Pages of these tables, or slots, each once."""
    rows = [row for table in tables for row in table.groups]
    return list(dict.fromkeys(page for row in rows for page in row if page != NULL_PAGE))


def _page(node: Node, group: int) -> int:
    page = node.pages[group]
    assert page is not None, "a cached page is nowhere"
    return page
