"""Which collective leads from one placement to another, and where none does."""

import pytest

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.placement import REPLICATED, Placement, Where, collective


@pytest.mark.parametrize(
    ("has", "wants", "name"),
    [("partial", None, "all_reduce"), ("partial", 2, "reduce_scatter"), (2, None, "all_gather")],
)
def test_a_collective_for_each_change(has: Where, wants: Where, name: str) -> None:
    assert collective(has, wants) == name


@pytest.mark.parametrize(
    ("has", "wants"), [(None, "partial"), (2, "partial"), ("tokens", None), (None, 2), (1, 2)]
)
def test_what_no_collective_makes_is_refused(has: Where, wants: Where) -> None:
    """A whole value is no part of a sum: it would count once a rank."""
    with pytest.raises(IllegalGraphError, match="no collective makes a value"):
        collective(has, wants)


def test_text() -> None:
    assert str(REPLICATED) == "replicated"
    assert str(Placement(dp="tokens", tp=2).at("ep", "partial")) == "dp own tokens, ep partial, tp sharded(2)"
