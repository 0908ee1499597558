"""One chain of launches for steps of every size: which launches stay, and that no size is without them."""

from dataclasses import replace

import pytest
from stages import BF16, before

from octavo.codegen.any_rows import for_any_rows
from octavo.codegen.catalogue import CORNERS
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.select import select
from octavo.codegen.specs_triton import in_order
from octavo.compiler.build import build
from octavo.compiler.expression import holds
from octavo.compiler.legality import op
from octavo.compiler.target import load_target

TARGETS = ("b200", "h100")
SIZES = [
    (t, r, n) for t, r in ((1, 1), (2, 2), (16, 1), (17, 17), (64, 3), (65, 65), (4096, 1)) for n in (0, 1, r)
]


def launched(spec: KernelSpec, sizes: tuple[int, int, int]) -> list[str]:
    """Names of what runs at (T, R, L)."""
    dims = {**dict(zip("TRL", sizes, strict=True)), "P": 4, "num_pages": 9}
    return [one.name for one in spec.launches if holds(one.when, dims)]


@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_of_every_corner_has_a_form_for_any_rows(target: str) -> None:
    """What runs at any size is what runs with many rows, or nothing where there is no row."""
    machine = load_target(target)
    for corner in CORNERS:
        if corner.refuse(machine):
            continue
        spec = corner.make(machine)
        any_rows = for_any_rows(spec)
        most = launched(spec, (2**20, 2**8, 2**20))
        for sizes in SIZES:
            ran = launched(any_rows, sizes)
            assert ran == most or (not ran and sizes[2] == 0 and not launched(spec, sizes)), corner.name
        assert any_rows.scratch == spec.scratch


@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "gpt_oss"])
def test_no_context_is_split_and_no_product_streams_its_weights(name: str) -> None:
    for node in before("", name, BF16).graph.nodes:
        if node.op == "call_function" and op(node).startswith("octavo::"):
            templates = [
                one.template for one in for_any_rows(select(node, load_target("b200")).spec).launches
            ]
            assert not [
                t for t in templates if "few" in t or "decode" in t or ("combine" in t and "moe" not in t)
            ]


def test_the_scratch_of_launches_that_are_gone_stays() -> None:
    spec = select_first("linear")
    few, many = (replace(spec, when=when, also=()) for when in ("L <= 16", "L > 16"))
    both = in_order(replace(few, scratch=(("parts", "fp32", (4, "T")),)), many)
    found = for_any_rows(both)
    assert (found.when, found.scratch, found.also) == ("L > 0", both.scratch, ())


def select_first(name: str) -> KernelSpec:
    graph = before("", "llama", BF16).graph
    node = next(n for n in graph.nodes if n.op == "call_function" and op(n) == f"octavo::{name}")
    return select(node, load_target("b200")).spec


def test_a_host_program_is_the_same_with_and_without() -> None:
    """Its kernels have one order of sums as they are."""
    programs = [
        build(before("", "llama"), load_target("cpu"), 4, deterministic=wanted).program
        for wanted in (False, True)
    ]
    assert programs[0] == programs[1]
    assert all(step.when == "" for step in programs[0].steps)
