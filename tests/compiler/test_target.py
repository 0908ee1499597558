"""Targets are files: all of them load, and mistakes in a name or a file are named."""

from dataclasses import FrozenInstanceError

import pytest

from octavo.compiler.errors import OptionError
from octavo.compiler.target import load_target, parse_target, target_names

MINIMAL = {"name": "x", "family": "cpp", "page_size": 16}


@pytest.mark.parametrize("name", target_names())
def test_every_target_loads_under_its_name(name: str) -> None:
    target = load_target(name)
    assert target.name == name and target.page_size > 0
    assert hash(target) == hash(load_target(name))


def test_b200_is_described() -> None:
    target = load_target("b200")
    assert (target.family, target.arch, target.sm_count) == ("triton", 100, 148)
    assert target.flops["bf16"] == 2.25e15


def test_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"target: expected one of b200.*cpu.*, got 'b2000'"):
        load_target("b2000")
    with pytest.raises(OptionError, match=r"got '\.\./cpu'"):
        load_target("../cpu")


def test_file_with_wrong_entries_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"x.toml: missing entries \['page_size'\], unknown entries \['smem'\]"
    ):
        parse_target({"name": "x", "family": "cpp", "smem": 1}, "x.toml")
    with pytest.raises(OptionError, match=r"missing entries \[\], unknown entries \['smem'\]"):
        parse_target(MINIMAL | {"smem": 1}, "x.toml")
    with pytest.raises(OptionError, match="family must be cpp or triton, got 'cuda'"):
        parse_target(MINIMAL | {"family": "cuda"}, "x.toml")


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        parse_target(MINIMAL, "x.toml").page_size = 8  # type: ignore[misc]
