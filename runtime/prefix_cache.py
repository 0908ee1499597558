"""Which pages hold which tokens: a tree of pages, found by a chained hash and compared token by token."""

import hashlib
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

Hash = Callable[[bytes, bytes], bytes]


@dataclass(frozen=True)
class CacheKey:
    """What must be equal besides tokens for two requests to share pages.

    salt     of a tenant, so that nobody learns from timing what others asked; None: shared with all without one
    adapter  whose weights made the keys and values
    """

    salt: str | None = None
    adapter: str | None = None


SHARED_KEY = CacheKey()


@dataclass(eq=False)
class Node:
    """A page of tokens after those of its parent; the root of a key has none.

    pages  for each page group the page that holds its keys and values, or None
    slots  likewise the slot in host memory
    """

    parent: "Node | None"
    tokens: tuple[int, ...]
    digest: bytes
    pages: list[int | None]
    slots: list[int | None]
    num_children: int = field(default=0, repr=False)
    is_attached: bool = field(default=False, repr=False)

    def has_page(self, group: int) -> bool:
        return self.pages[group] is not None or self.slots[group] is not None

    @property
    def is_empty(self) -> bool:
        return not self.num_children and not any(self.has_page(group) for group in range(len(self.pages)))


@dataclass(frozen=True)
class Match:
    """The longest usable prefix: `path`, a node for each of its pages. first: for each group, the first page that
    a token after the prefix still attends to."""

    path: tuple[Node, ...]
    first: tuple[int, ...]


def sha256(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tokens).digest()


class PrefixCache:
    """Finds the pages of a prompt's beginning. A wrong hit is impossible: the hash only narrows the search, then
    tokens are compared, page by page from the root, and so is the key.

    windows  of each page group, in tokens; None: full attention
    digest   (digest of the parent, tokens as i64) -> digest
    """

    def __init__(self, page_size: int, windows: Sequence[int | None], digest: Hash = sha256) -> None:
        self.page_size = page_size
        self.windows = tuple(windows)
        self._digest = digest
        self._roots: weakref.WeakValueDictionary[CacheKey, Node] = weakref.WeakValueDictionary()
        self._nodes: dict[bytes, list[Node]] = {}
        self._by_page: dict[int, tuple[Node, int]] = {}
        self._by_slot: dict[int, tuple[Node, int]] = {}

    def root(self, key: CacheKey) -> Node:
        """The root of a key; it lives as long as a node or a request below it does."""
        root = self._roots.get(key)
        if root is None:
            seed = hashlib.sha256(repr((key.salt, key.adapter)).encode()).digest()
            root = Node(None, (), seed, self._none(), self._none(), is_attached=True)
            self._roots[key] = root
        return root

    def _none(self) -> list[int | None]:
        return [None] * len(self.windows)

    def match(self, tokens: Sequence[int], key: CacheKey, num_pages: int) -> Match:
        """The longest prefix of at most `num_pages` pages whose pages are there in every group.

        A windowed group needs only the pages that the next token's window reaches.
        """
        path: list[Node] = []
        runs = [0] * len(self.windows)
        best, best_first = 0, tuple(runs)
        for node in self._walk(tokens, key, num_pages):
            path.append(node)
            for group in range(len(runs)):
                runs[group] = runs[group] + 1 if node.has_page(group) else 0
            first = tuple(self.first_page(group, len(path) * self.page_size) for group in range(len(runs)))
            if all(len(path) - start <= run for start, run in zip(first, runs, strict=True)):
                best, best_first = len(path), first
        return Match(tuple(path[:best]), best_first)

    def first_page(self, group: int, position: int) -> int:
        """The first page of a group that the token at a position attends to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def _walk(self, tokens: Sequence[int], key: CacheKey, num_pages: int) -> Iterator[Node]:
        node: Node | None = self.root(key)
        for page in range(num_pages):
            assert node is not None
            own = tuple(tokens[page * self.page_size : (page + 1) * self.page_size])
            node = self._find(node, own, self._digest_of(node, own))
            if node is None:
                return
            yield node

    def _digest_of(self, parent: Node, tokens: tuple[int, ...]) -> bytes:
        return self._digest(parent.digest, array("q", tokens).tobytes())

    def _find(self, parent: Node, tokens: tuple[int, ...], digest: bytes) -> Node | None:
        for node in self._nodes.get(digest, ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None

    def child(self, parent: Node, tokens: tuple[int, ...]) -> Node:
        """The node of a full page of tokens after a parent, made if it is not there."""
        assert len(tokens) == self.page_size, f"expected {self.page_size} tokens, got {len(tokens)}"
        parent = self._current(parent)
        digest = self._digest_of(parent, tokens)
        return self._find(parent, tokens, digest) or self._new_node(parent, tokens, digest)

    def _new_node(self, parent: Node, tokens: tuple[int, ...], digest: bytes) -> Node:
        return Node(parent, tokens, digest, self._none(), self._none())

    def _current(self, node: Node) -> Node:
        """The node itself, or the one that has been made of the same tokens since it was dropped."""
        dropped: list[Node] = []
        while not node.is_attached and node.parent is not None:
            dropped.append(node)
            node = node.parent
        for each in reversed(dropped):
            digest = self._digest_of(node, each.tokens)
            same = each if each.parent is node else self._new_node(node, each.tokens, digest)
            node = self._find(node, each.tokens, digest) or same
        return node

    def add_page(self, node: Node, group: int, page: int) -> bool:
        """Remember a page of a group, unless the node has one already; whether it was remembered."""
        if node.pages[group] is not None or page in self._by_page:
            return False
        self._attach(node)
        node.pages[group] = page
        self._by_page[page] = (node, group)
        return True

    def _attach(self, node: Node) -> None:
        """Make a node findable, with its ancestors: they may have been dropped while a request went on below."""
        while not node.is_attached and node.parent is not None:
            node.is_attached = True
            self._nodes.setdefault(node.digest, []).append(node)
            node.parent.num_children += 1
            node = node.parent

    def drop_page(self, page: int) -> None:
        """A page will hold something else."""
        node, group = self._by_page.pop(page)
        node.pages[group] = None
        self._prune(node)

    def has_slot(self, page: int) -> bool:
        """Whether what a findable page holds is in host memory too."""
        node, group = self._by_page[page]
        return node.slots[group] is not None

    def to_slot(self, page: int, slot: int) -> None:
        """A page's contents move to host memory."""
        node, group = self._by_page[page]
        node.slots[group] = slot
        self._by_slot[slot] = (node, group)

    def drop_slot(self, slot: int) -> None:
        node, group = self._by_slot.pop(slot)
        node.slots[group] = None
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Take out a node that leads nowhere, and then its ancestors likewise."""
        while node.is_attached and node.parent is not None and node.is_empty:
            node.is_attached = False
            same = self._nodes[node.digest]
            same.remove(node)
            if not same:
                del self._nodes[node.digest]
            node.parent.num_children -= 1
            node = node.parent

    def clear(self) -> None:
        """Forget everything. Nodes that requests still hold stay usable as parents."""
        for nodes in self._nodes.values():
            for node in nodes:
                node.pages, node.slots = self._none(), self._none()
                node.num_children, node.is_attached = 0, False
        for root in self._roots.values():
            root.num_children = 0
        self._nodes, self._by_page, self._by_slot = {}, {}, {}

    def has(self, page: int) -> bool:
        """Whether a page of the pool is findable."""
        return page in self._by_page

    @property
    def pages(self) -> Iterable[int]:
        """Pages of the pool that are findable, held or free."""
        return self._by_page.keys()

    @property
    def slots(self) -> Iterable[int]:
        """Slots of host memory that are findable, held or free."""
        return self._by_slot.keys()

    def check(self) -> None:
        """Assert that nodes and pages name each other, and that every findable node can be reached."""
        for page, (node, group) in self._by_page.items():
            assert node.pages[group] == page, f"page {page} is not its node's page"
        for slot, (node, group) in self._by_slot.items():
            assert node.slots[group] == slot, f"slot {slot} is not its node's slot"
        children: dict[int, int] = {}
        for nodes in self._nodes.values():
            names = {(id(node.parent), node.tokens) for node in nodes}
            assert len(names) == len(nodes), "two nodes are of the same tokens after the same parent"
            for node in nodes:
                assert node.is_attached and not node.is_empty, (
                    f"a dead node of {len(node.tokens)} tokens is kept"
                )
                assert node.parent is not None and (node.parent.parent is None or node.parent.is_attached)
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
        for nodes in self._nodes.values():
            for node in nodes:
                assert node.num_children == children.get(id(node), 0), "a node miscounts its children"
