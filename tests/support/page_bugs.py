"""Faults seeded into the pool, the prefix cache and paged memory, one at a time, by small changes of the source."""

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from page_world import play

from octavo.runtime.kv_cache import PagePool
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.prefix_cache import PrefixCache

# Whose method, which, what stands there once, what stands there instead.
Change = tuple[type, str, str, str]


@dataclass(frozen=True)
class Bug:
    name: str
    changes: tuple[Change, ...]

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        sources: dict[tuple[type, str], str] = {}
        for owner, name, right, wrong in self.changes:
            source = sources.get((owner, name)) or textwrap.dedent(inspect.getsource(getattr(owner, name)))
            assert source.count(right) == 1, f"{self.name}: {owner.__name__}.{name} is not what it was"
            sources[owner, name] = source.replace(right, wrong)
        with contextlib.ExitStack() as stack:
            for (owner, name), source in sources.items():
                made: dict[str, Any] = {}
                exec(compile(source, owner.__module__, "exec"), vars(sys.modules[owner.__module__]), made)
                stack.enter_context(mock.patch.object(owner, name, made[name]))
            yield


def bug(name: str, *changes: Change) -> Bug:
    return Bug(name, changes)


BUGS = [
    bug("freeing forgets a holder of a shared page", (
        PagePool, "free", "self._holders[page] -= 1", "self._holders[page] -= self._holders[page] == 1")),
    bug("a shared page is shared for nothing", (
        PagePool, "share", "self._holders[page] += 1", "self._holders[page] += self._holders[page] == 1")),
    bug("new pages are taken before found ones are held", (
        PagePool, "allocate", "for page in found:",
        "made = [self._take() for _ in range(count)]\n    for page in found:"),
        (PagePool, "allocate", "return [self._take() for _ in range(count)]", "return made")),
    bug("found pages are held and still to be evicted", (
        PagePool, "allocate", "self._cached.pop(page, None)", "pass")),
    bug("found pages count as free", (
        PagePool, "allocate", "if count > self.num_free - len(revived):", "if count > self.num_free:")),
    bug("nothing is copied on write", (
        PagedMemory, "reserve", "if self.pool.is_shared(table.groups[group][i])", "if False")),
    bug("a copy is not queued", (
        PagedMemory, "reserve", 'self.moves.append(Move("copy", old, new))', "pass")),
    bug("a copy goes the other way", (
        PagedMemory, "reserve", 'Move("copy", old, new)', 'Move("copy", new, old)')),
    bug("reserving takes page after page", (
        PagedMemory, "reserve", "self.pool.allocate(len(copied) + sum(num_new for _, num_new in grown))",
        "[self.pool.allocate(1)[0] for _ in range(len(copied) + sum(num_new for _, num_new in grown))]")),
    bug("a cached page is written by its last holder", (
        PagedMemory, "_overwrite", "if not self.pool.is_shared(page)", "if False")),
    bug("the source of a fork goes on writing", (
        PagedMemory, "fork", "table.num_writable = 0", "pass")),
    bug("whose beginning is shared goes on writing", (
        PagedMemory, "share_prefix", "source.num_writable = 0", "pass")),
    bug("an empty table may write", (
        PagedMemory, "release", "table.root, 0\n", "table.root, table.num_writable\n")),
    bug("a table may write where it was before it was swapped", (
        PagedMemory, "_swap", "table.num_writable = 0", "pass")),
    bug("a table may write a page more than it has", (
        PagedMemory, "reserve", "table.num_writable = last *", "table.num_writable = (last + 1) *")),
    bug("the prefix cache is not told of an eviction", (
        PagedMemory, "_evict", "self.prefixes.drop_page(page)", "pass")),
    bug("an eviction overtakes earlier moves", (
        PagedMemory, "_evict", 'self.moves.append(Move("out", page, slot - 1))',
        'self.moves.insert(0, Move("out", page, slot - 1))')),
    bug("slots of a hit may be evicted meanwhile", (
        PagedMemory, "admit", "self.host.allocate(0, [slot for slot in slots if slot is not None])", "pass"),
        (PagedMemory, "admit", "self.host.free([slot for slot in slots if slot is not None])", "pass"),
        (PagedMemory, "_bring_in", "self.host.free([slot])", "pass")),
    bug("a failed admission keeps slots", (
        PagedMemory, "admit", "self.host.free([slot for slot in slots if slot is not None])", "pass")),
    bug("a prompt may be found whole", (PagedMemory, "_match", "len(tokens) - 1", "len(tokens)")),
    bug("a page is remembered a token early", (
        PagedMemory, "commit", "self.page_size <= num_tokens:", "self.page_size <= min(len(tokens), num_tokens + 1):")),
    bug("a window frees a page early", (
        PagedMemory, "commit", "self.prefixes.first_page(group, num_tokens)",
        "self.prefixes.first_page(group, num_tokens + self.page_size)")),
    bug("a window is a token short", (
        PrefixCache, "first_page", "position - window + 1", "position - window + 2")),
    bug("a window that slid past is shared", (
        PagedMemory, "share_prefix", "if any(", "if False and any(")),
    bug("a fork has the rows of its source", (
        PagedMemory, "fork", "[list(row) for row in table.groups]", "table.groups")),
    bug("slots are given back as pages", (
        PagedMemory, "release", "self.host if table.in_host else self.pool", "self.pool")),
    bug("a swap forgets who shares a page", (
        PagedMemory, "_swap", "new.share([page for page in row if page in seen])", "pass")),
    bug("a swap maps a shared page twice", (
        PagedMemory, "_swap", "distinct = _distinct(tables)",
        "distinct = [p for t in tables for row in t.groups for p in row if p != NULL_PAGE]")),
    bug("an interrupt loses queued moves", (
        PagedMemory, "rebuild", "if self.is_moving:", "if True:")),
    bug("an interrupt leaves tokens without pages", (
        PagedMemory, "rebuild", "if table.is_empty:", "if False:")),
    bug("tokens are not compared", (
        PrefixCache, "_find", "node.parent is parent and node.tokens == tokens", "node.parent is parent")),
    bug("what comes before is not compared", (
        PrefixCache, "_find", "node.parent is parent and node.tokens == tokens", "node.tokens == tokens")),
    bug("salts are not compared", (
        PrefixCache, "root", "root = self._roots.get(key)",
        "key = CacheKey(None, key.adapter)\n    root = self._roots.get(key)")),
    bug("a window's hit is a page short", (
        PrefixCache, "match", "len(path) - start <= run", "len(path) - start - 1 <= run")),
    bug("dropped nodes are not pruned", (
        PrefixCache, "drop_page", "self._prune(node)", "pass")),
    bug("a node made again is there twice", (
        PrefixCache, "child", "parent = self._current(parent)", "pass")),
]  # fmt: skip


def verdict(bug: Bug, num_worlds: int, operations: int) -> str:
    """What caught it and in which world; "survived" if nothing did."""
    with bug.injected():
        for seed in range(num_worlds):
            try:
                play(seed, operations)
            except Exception as error:
                return f"{seed:>4}  {type(error).__name__}: {str(error)[:60]}"
    return "survived"
