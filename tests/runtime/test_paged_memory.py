import runpy
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from page_bugs import BUGS, verdict
from page_model import WINDOWS, Setting, all_collide
from page_world import OPERATIONS, World

from octavo.compiler.errors import OutOfPages
from octavo.runtime.kv_cache import NULL_PAGE
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory, PageTable
from octavo.runtime.prefix_cache import SHARED_KEY

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class PagesMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: page_world says what must hold after each operation."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.world = World(Setting.drawn(lambda below: data.draw(st.integers(0, below - 1))))

    @rule(
        name=st.sampled_from([name for name, weight in OPERATIONS.items() for _ in range(weight)]),
        data=st.data(),
    )
    def do(self, name: str, data: st.DataObject) -> None:
        self.world.do(name, lambda below: data.draw(st.integers(0, below - 1)))

    def teardown(self) -> None:
        self.world.close()


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_seeded_bugs(print_at_end: Callable[[str, list[str]], None]) -> None:
    verdicts = {bug.name: verdict(bug, num_worlds=200, operations=300) for bug in BUGS}
    survived = [name for name, text in verdicts.items() if text == "survived"]
    rows = [f"{name:<50} {text}" for name, text in verdicts.items()]
    print_at_end(f"seeded bugs: caught {len(BUGS) - len(survived)} / seeded {len(BUGS)}", rows)
    assert survived == []


@pytest.mark.slow
def test_a_million_operations(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fuzz_pages.py", "--operations", "1000000", "--seed", "0"])
    runpy.run_path(str(BENCHMARKS / "fuzz_pages.py"), run_name="__main__")
    assert "1,000,000 operations in" in capsys.readouterr().out


def new(memory: PagedMemory, tokens: Sequence[int]) -> tuple[PageTable, int]:
    """A table for a prompt, and the tokens found."""
    table = memory.new_table(SHARED_KEY)
    return table, memory.admit(table, tokens, SHARED_KEY)


def compute(memory: PagedMemory, table: PageTable, tokens: Sequence[int], chunk: int = 1 << 20) -> None:
    """All that is left of these tokens."""
    while table.num_tokens < len(tokens):
        end = min(len(tokens), table.num_tokens + chunk)
        memory.reserve(table, end)
        memory.commit(table, tokens, end)
        memory.check([table])


def serve(memory: PagedMemory, tokens: Sequence[int]) -> int:
    """A request from its admission to its end; returns the tokens found."""
    table, found = new(memory, tokens)
    compute(memory, table, tokens)
    memory.release(table)
    memory.check([])
    return found


def evict_all(memory: PagedMemory) -> None:
    memory.pool.free(memory.pool.allocate(memory.pool.num_free))


def prompt(name: int, length: int) -> list[int]:
    return [1000 * name + position for position in range(length)]


def books(memory: PagedMemory, *tables: PageTable) -> Any:
    counts = memory.pool.count(), memory.host.count(), len(memory.moves), memory.pool.kept, memory.host.kept
    return counts, [([list(row) for row in t.groups], t.num_tokens, t.num_known, t.in_host) for t in tables]


def test_admit_reserve_and_swaps_are_all_or_nothing() -> None:
    memory = PagedMemory(9, 2, (None, 5), num_host_pages=3)
    serve(memory, prompt(1, 4))
    table, _ = new(memory, prompt(2, 8))
    compute(memory, table, prompt(2, 8))
    fork, fresh = memory.fork(table), memory.new_table(SHARED_KEY)
    before = books(memory, table, fork, fresh)
    for attempt in (
        lambda: memory.admit(fresh, [*prompt(1, 4), *prompt(3, 12)], SHARED_KEY),
        lambda: memory.reserve(fork, 14),
        lambda: memory.swap_out([table, fork]),
    ):
        with pytest.raises(OutOfPages):
            attempt()
        assert books(memory, table, fork, fresh) == before
        memory.check([table, fork, fresh])


def test_a_failing_swap_in_leaves_everything_outside() -> None:
    memory = PagedMemory(4, 2, num_host_pages=3)
    table, _ = new(memory, prompt(1, 6))
    compute(memory, table, prompt(1, 6))
    memory.swap_out([table])
    other, _ = new(memory, prompt(2, 2))
    before = books(memory, table, other)
    with pytest.raises(OutOfPages, match="expected 3 free pages, got 2 of 3"):
        memory.swap_in([table])
    assert books(memory, table, other) == before
    memory.release(other)
    memory.swap_in([table])
    memory.check([table])
    assert not table.in_host and table.num_tokens == 6


def test_branches_swapped_together_share_their_pages_in_host_memory_and_after() -> None:
    memory = PagedMemory(6, 2, num_host_pages=4)
    table, _ = new(memory, prompt(1, 6))
    compute(memory, table, prompt(1, 6))
    fork = memory.fork(table)
    memory.reserve(fork, 7)
    pages = list(table.groups[0])
    memory.moves.clear()
    memory.swap_out([table, fork])
    assert sorted(move.source for move in memory.moves) == sorted({*pages, *fork.groups[0]})
    assert table.groups[0] == fork.groups[0][:3] and memory.num_held([table, fork]) == 4
    memory.swap_in([table, fork])
    memory.check([table, fork])
    assert table.groups[0] == fork.groups[0][:3] and memory.host.num_free == 4


def test_copy_on_write_copies_only_the_page_that_is_begun() -> None:
    memory = PagedMemory(12, 2)
    tokens = prompt(1, 7)
    table, _ = new(memory, tokens)
    compute(memory, table, tokens)
    fork = memory.fork(table)
    assert memory.moves == []
    memory.reserve(fork, 10)
    assert memory.moves == [Move("copy", table.groups[0][3], fork.groups[0][3])]
    assert table.groups[0][:3] == fork.groups[0][:3] and table.groups[0][3] != fork.groups[0][3]
    memory.reserve(table, 8)
    assert len(memory.moves) == 1, "its last holder writes where it is"
    memory.check([table, fork])


def test_the_last_holder_of_a_cached_page_that_shared_its_beginning_takes_it_from_the_cache() -> None:
    memory = PagedMemory(4, 4)
    tokens = prompt(1, 8)
    source, _ = new(memory, tokens)
    compute(memory, source, tokens)
    table = memory.new_table(SHARED_KEY)
    assert memory.share_prefix(table, source, 6)
    memory.release(source)
    memory.reserve(table, 7)
    assert memory.moves == [] and memory.prefixes.pages == {table.groups[0][0]}
    memory.check([table])
    other, found = new(memory, tokens)
    assert found == 4
    memory.check([table, other])


def test_an_allocation_does_not_evict_what_it_found() -> None:
    memory = PagedMemory(6, 2)
    assert serve(memory, prompt(1, 8)) == 0
    assert serve(memory, prompt(2, 8)) == 0
    assert serve(memory, prompt(1, 10)) == 2, "what is left of the first, and it needs every page"
    assert serve(memory, prompt(1, 10)) == 8


def test_sessions_in_round_robin_find_what_they_had() -> None:
    """Pages that windows slid past are worth less than windows: these must not be recycled first."""
    num_sessions, turns, turn, page_size = 6, 12, 12, 4
    live = num_sessions * (turns * turn // page_size + 3)  # pages that hits need in the end
    for num_pages, is_large in ((4 * live, True), (live + 40, False)):
        memory = PagedMemory(num_pages + 1, page_size, (None, 8))
        for earlier in range(turns):
            tokens = [prompt(session, (earlier + 1) * turn) for session in range(num_sessions)]
            assert [serve(memory, own) for own in tokens] == [earlier * turn] * num_sessions
        assert (memory.num_evicted == 0) == is_large


def test_null_pages_go_through_everything() -> None:
    memory = PagedMemory(20, 2, (None, 3), num_host_pages=20)
    tokens = prompt(1, 13)
    table, _ = new(memory, tokens)
    compute(memory, table, tokens, chunk=5)
    assert table.groups[1][:5] == [NULL_PAGE] * 5 and NULL_PAGE not in table.groups[1][5:]
    fork = memory.fork(table)
    memory.swap_out([table, fork])
    assert table.groups[1][:5] == [NULL_PAGE] * 5
    memory.swap_in([table, fork])
    memory.check([table, fork])
    memory.rebuild([table, fork], [])
    memory.reserve(fork, 16)
    memory.commit(fork, [*tokens, 1, 2, 3], 16)
    memory.check([table, fork])
    memory.release(table)
    memory.release(fork)
    memory.check([])
    assert memory.pool._holders[NULL_PAGE] == 0 and NULL_PAGE not in memory.prefixes.pages
    table, found = new(memory, [*tokens, 1, 2, 3])
    assert found == 14, "what came after the interrupt is remembered"


@pytest.mark.parametrize("digest", [None, all_collide])
def test_prompts_made_to_collide_get_nothing(digest: Any) -> None:
    memory = PagedMemory(40, 2, **({"digest": digest} if digest else {}))
    serve(memory, [40, 50, 60, 70, 80])
    assert serve(memory, [40 + 31, 50 - 1, 60, 70, 80]) == 0
    assert serve(memory, [60, 70, 40, 50, 80]) == 0
    assert serve(memory, [40, 50, 60 + 31, 70 - 1, 80]) == 2
    assert serve(memory, [40, 50, 60, 70, 81]) == 4


def test_host_memory_brings_back_what_was_evicted() -> None:
    memory = PagedMemory(5, 2, num_host_pages=3)
    serve(memory, prompt(1, 8))
    pages = [node.pages[0] for node in memory.prefixes.match(prompt(1, 8), SHARED_KEY, 4).path]
    evict_all(memory)
    assert [(move.kind, move.source) for move in memory.moves] == [("out", page) for page in pages[::-1]]
    slots = {move.source: move.target for move in memory.moves}
    memory.moves.clear()
    table, found = new(memory, [*prompt(1, 6), 5])
    assert found == 6
    assert memory.moves == [
        Move("in", slots[old], page)
        for old, page in zip(pages[:3], table.groups[0], strict=False)
        if old in slots
    ]
    memory.check([table])


def test_a_page_that_host_memory_has_already_takes_no_second_slot() -> None:
    memory = PagedMemory(4, 2, num_host_pages=2)
    serve(memory, prompt(1, 2))
    serve(memory, prompt(2, 2))
    evict_all(memory)
    table = memory.new_table(SHARED_KEY)
    memory.admit(table, prompt(1, 2), SHARED_KEY, most=0)
    compute(memory, table, prompt(1, 2))
    memory.release(table)
    memory.moves.clear()
    evict_all(memory)
    assert memory.moves == [] and len(memory.host.kept) == 2
    assert new(memory, prompt(2, 3))[1] == 2


class Alone(NamedTuple):
    """A request alone in a pool, `step` tokens at a time."""

    num_pages: int
    page_size: int
    windows: tuple[int | None, ...]
    prompt_len: int
    branches: int
    step: int
    shared: bool

    def reaches(self, length: int) -> bool:
        """However its first step is cut."""
        return all(runs(self, length, first) for first in range(1, self.step + 1))


def runs(case: Alone, length: int, first: int) -> bool:
    """Whether a request alone in the pool gets to a length: `first` tokens, then `step` at a time until its prompt is
    computed, then one at a time in each branch."""
    memory = PagedMemory(case.num_pages, case.page_size, case.windows, use_prefix_cache=False)
    tokens, prompt_len = prompt(1, length), min(case.prompt_len, length)
    table = memory.new_table(SHARED_KEY)
    try:
        memory.admit(table, tokens[:prompt_len], SHARED_KEY)
        while table.num_tokens < prompt_len:
            end = min(prompt_len, table.num_tokens + (case.step if table.num_tokens else first))
            memory.reserve(table, end)
            memory.commit(table, tokens, end)
        tables = [table]
        while table.num_tokens < length:
            if case.shared or len(tables) == 1:  # beams go on from the same one
                forks = [memory.fork(table) for _ in range(case.branches - 1)]
                for old in tables[1:]:
                    memory.release(old)
                tables = [table, *forks]
            for each in tables:
                memory.reserve(each, each.num_tokens + 1)
            for each in tables:
                memory.commit(each, tokens, each.num_tokens + 1)
        memory.check(tables)
    except OutOfPages:
        return False
    return True


CASES = [(1, 3, 1), (2, 4, 3), (3, 2, 2), (4, 5, 1), (4, 4, 4)]  # page size, tokens of a step, branches


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("shared", [False, True])
def test_most_tokens_is_what_a_request_gets_to_and_not_one_more(
    windows: tuple[int | None, ...], shared: bool
) -> None:
    for (size, step, branches), num_pages, prompt_len in product(CASES, (5, 9, 14), (1, 6, 8)):
        memory = PagedMemory(num_pages, size, windows)
        most = memory.most_tokens(prompt_len, branches, step, shared)

        case = Alone(num_pages, size, windows, prompt_len, branches, step, shared)
        for length in {1, prompt_len, prompt_len + 1, min(most, 24) - 1, min(most, 24)}:
            assert not 0 < length <= most or case.reaches(length), (case, most, length)
        if most < 1000 and (branches == 1 or windows == (None,)):
            if branches == 1:
                case = case._replace(prompt_len=most + 1)  # all is computed again, as of a prompt
            assert not case.reaches(most + 1), (case, most)
