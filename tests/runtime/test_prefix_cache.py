import random
import weakref
from collections.abc import Sequence

import pytest

from octavo.runtime.prefix_cache import SHARED_KEY, CacheKey, Hash, Node, PrefixCache, sha256

SALTED, ADAPTED = CacheKey("salt"), CacheKey(adapter="salt")
# (key, tokens up to the page's end, page group)
Place = tuple[CacheKey, tuple[int, ...], int]


def all_collide(parent: bytes, tokens: bytes) -> bytes:
    return b""


def path(cache: PrefixCache, tokens: Sequence[int], key: CacheKey = SHARED_KEY) -> list[Node]:
    """Nodes of the full pages of these tokens."""
    nodes, size = [cache.root(key)], cache.page_size
    for begin in range(0, len(tokens) - size + 1, size):
        nodes.append(cache.child(nodes[-1], tuple(tokens[begin : begin + size])))
    return nodes[1:]


def remember(cache: PrefixCache, tokens: Sequence[int], first_page: int, key: CacheKey = SHARED_KEY) -> None:
    """Pages first_page, first_page + 1, ... of group 0."""
    for page, node in enumerate(path(cache, tokens, key), first_page):
        assert cache.add_page(node, 0, page)


def reached(position: int, window: int | None, page_size: int) -> set[int]:
    """Pages with tokens before `position` that the token there attends to."""
    first = 0 if window is None else max(0, position - window + 1)
    return {token // page_size for token in range(first, position)}


def longest(held: set[Place], cache: PrefixCache, tokens: Sequence[int], key: CacheKey, most: int) -> int:
    size = cache.page_size
    return max(
        length
        for length in range(most + 1)
        if all(
            (key, tuple(tokens[: (page + 1) * size]), group) in held
            for group, window in enumerate(cache.windows)
            for page in reached(length * size, window, size)
        )
    )


@pytest.mark.parametrize("digest", [sha256, all_collide])
@pytest.mark.parametrize("windows", [(None,), (None, 5), (7,), (None, 5, 5), (2, None)])
def test_a_match_is_the_longest_there_is(windows: tuple[int | None, ...], digest: Hash) -> None:
    rng = random.Random(len(windows))
    hits = 0
    for page_size in (1, 2, 3, 4):
        cache, held, pages = PrefixCache(page_size, windows, digest), set[Place](), dict[int, Place]()
        for page in range(1, 250):
            tokens = [rng.randrange(2) * rng.randrange(2) for _ in range(5 * page_size)]
            key = rng.choice([SHARED_KEY, SHARED_KEY, SALTED, ADAPTED])
            nodes = path(cache, tokens, key)
            depth, group = rng.randrange(len(nodes)), rng.randrange(len(windows))
            place = key, tuple(tokens[: (depth + 1) * page_size]), group
            assert cache.add_page(nodes[depth], group, page) == (place not in held)
            if place not in held:
                held.add(place)
                pages[page] = place
            if len(pages) > 60:
                dropped = rng.choice(list(pages))
                cache.drop_page(dropped)
                held.remove(pages.pop(dropped))
            cache.check()
            found = cache.match(tokens, key, 4)
            wanted = longest(held, cache, tokens, key, 4)
            assert len(found.path) == wanted
            assert [node.tokens for node in found.path] == [
                tuple(tokens[i * page_size : (i + 1) * page_size]) for i in range(wanted)
            ]
            for group, window in enumerate(windows):
                used = set(range(found.first[group], wanted))
                assert used == reached(wanted * page_size, window, page_size)
                for index in used:
                    page_found = found.path[index].pages[group]
                    assert page_found is not None
                    assert pages[page_found] == (key, tuple(tokens[: (index + 1) * page_size]), group)
            hits += wanted > 0
    assert hits > 30


def test_keys_share_nothing() -> None:
    cache = PrefixCache(2, (None,))
    remember(cache, [1, 2, 3, 4], 5)
    for key in (SALTED, ADAPTED, CacheKey("other")):
        assert cache.match([1, 2, 3, 4], key, 2).path == ()
    remember(cache, [1, 2, 3, 4], 7, SALTED)
    assert [node.pages for node in cache.match([1, 2, 3, 4], SALTED, 2).path] == [[7], [8]]
    assert [node.pages for node in cache.match([1, 2, 3, 4], SHARED_KEY, 2).path] == [[5], [6]]


@pytest.mark.parametrize("digest", [sha256, all_collide, lambda parent, tokens: bytes([sum(tokens) % 256])])
def test_tokens_that_a_weak_hash_confuses_are_told_apart(digest: Hash) -> None:
    cache = PrefixCache(2, (None,), digest)
    remember(cache, [40, 50, 7, 8], 1)
    assert cache.match([40 + 31, 50 - 1, 7, 8], SHARED_KEY, 2).path == ()
    assert cache.match([7, 8, 40, 50], SHARED_KEY, 2).path == ()
    assert len(cache.match([40, 50, 8, 7], SHARED_KEY, 2).path) == 1
    assert len(cache.match([40, 50, 7, 8], SHARED_KEY, 2).path) == 2


def test_dropped_nodes_are_gone() -> None:
    cache = PrefixCache(1, (None,))
    remember(cache, [1, 2, 3], 1)
    nodes = [weakref.ref(node) for node in path(cache, [1, 2, 3])]
    root = weakref.ref(cache.root(SHARED_KEY))
    cache.drop_page(2)
    assert all(node() is not None for node in nodes), "what follows is still there, and may be found again"
    assert len(cache.match([1, 2, 3], SHARED_KEY, 3).path) == 1
    cache.drop_page(3)
    assert [node() is None for node in nodes] == [False, True, True]
    cache.drop_page(1)
    assert nodes[0]() is None and root() is None and not cache._nodes


def test_a_node_with_a_slot_only_stays() -> None:
    cache = PrefixCache(1, (None, 3))
    remember(cache, [1], 1)
    cache.to_slot(1, 2)
    assert cache.has_slot(1)
    cache.drop_page(1)
    (node,) = path(cache, [1])
    assert node.pages == [None, None] and node.slots == [2, None]
    cache.drop_slot(2)
    cache.check()
    assert not cache._nodes and not node.is_attached


def test_a_page_has_one_name_and_a_node_one_page() -> None:
    cache = PrefixCache(1, (None,))
    first, second = path(cache, [1, 2])
    assert cache.add_page(first, 0, 1)
    assert not cache.add_page(first, 0, 2), "the node has a page"
    assert not cache.add_page(second, 0, 1), "the page has a node"
    assert list(cache.pages) == [1]


def test_a_node_dropped_and_made_again_is_one() -> None:
    cache = PrefixCache(1, (None,))
    remember(cache, [1, 2], 1)
    old = path(cache, [1, 2])[-1]  # somebody computes on below
    cache.drop_page(2)
    cache.drop_page(1)
    remember(cache, [1, 2], 1)
    assert cache.add_page(cache.child(old, (3,)), 0, 3)
    cache.check()
    assert len(cache.match([1, 2, 3], SHARED_KEY, 3).path) == 3


def test_ancestors_dropped_meanwhile_come_back_without_pages() -> None:
    cache = PrefixCache(1, (None,))
    remember(cache, [1, 2], 1)
    old = path(cache, [1, 2])[-1]
    cache.clear()
    cache.check()
    assert cache.add_page(cache.child(old, (3,)), 0, 3)
    cache.check()
    assert cache.match([1, 2, 3], SHARED_KEY, 3).path == ()
    remember(cache, [1, 2], 1)
    assert len(cache.match([1, 2, 3], SHARED_KEY, 3).path) == 3
