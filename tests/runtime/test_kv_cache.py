import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.compiler.errors import OutOfPages
from octavo.runtime.kv_cache import NULL_PAGE, PagePool


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share and give back pages in any order; the pool must agree with a plain list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        held = {page for owner in self.owners for page in owner}
        if count > 8 - len(held):
            free_before = self.pool.num_free
            with pytest.raises(OutOfPages, match=f"expected {count} free pages, got {free_before} of 8"):
                self.pool.allocate(count)
            assert self.pool.num_free == free_before, "all or nothing"
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count and not held & set(pages) and NULL_PAGE not in pages
        self.owners.append(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            pages = data.draw(st.sampled_from(self.owners))
            self.pool.share(pages)
            self.owners.append(list(pages))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.owners:
            owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            cut = data.draw(
                st.integers(0, len(owner))
            )  # a tail first, then the rest: fewer pages than before
            self.pool.free(owner[cut:])
            self.owners.append(owner[:cut])

    @rule()
    def rebuild(self) -> None:
        self.pool.allocate(min(2, self.pool.num_free))  # lost by an interrupt
        self.pool.rebuild(self.owners)

    @invariant()
    def conserves(self) -> None:
        self.pool.check(self.owners)
        assert self.pool.num_free == 8 - len({page for owner in self.owners for page in owner})


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_double_free_is_an_assertion() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="is freed but nobody holds it"):
        pool.free(pages)


def test_null_pages_of_a_row_are_nobody_s() -> None:
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    pool.share([NULL_PAGE, page])
    pool.free([NULL_PAGE, page])
    pool.check([[NULL_PAGE, page]])


def test_sharing_a_free_page_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="page 2 is shared but nobody holds it"):
        PagePool(4).share([2])


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([], "counts 1 holders, owners list it 0 times"),
        ([[1, 2], [1]], "owners list it 2 times"),
    ],
)
def test_check_finds_leaks_and_double_use(owners: list[list[int]], message: str) -> None:
    pool = PagePool(4)
    assert sorted(pool.allocate(2)) == [1, 2]
    with pytest.raises(AssertionError, match=message):
        pool.check(owners)


def test_check_finds_a_broken_free_list() -> None:
    pool = PagePool(4)
    pool._clean.append(pool._clean[0])
    with pytest.raises(AssertionError, match="clean list"):
        pool.check([])
