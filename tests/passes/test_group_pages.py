from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from stages import before, copied
from torch import Tensor, fx

from octavo.compiler.fresh_inputs import Chunk, step_inputs
from octavo.compiler.legality import named_arguments
from octavo.compiler.page_groups import page_windows
from octavo.passes.group_pages import group_pages
from octavo.passes.rule import PassReport, run_pass

octavo = torch.ops.octavo
HEADS, PAGE_SIZE, DIM = 2, 4, 16
STEP = ("slot_mapping", "page_table", "seq_lens", "cu_seqlens_q")


def layers(windows: Sequence[int], dims: Sequence[int] = (), latents: bool = False) -> fx.GraphModule:
    """Attentions side by side, each over keys and values of its own."""
    g = LoweredGraph()
    step = {name: g.input(name) for name in STEP}
    read = [step[name] for name in STEP[1:]]
    given = []
    for i, dim in enumerate(dims or [DIM] * len(windows)):
        tokens = [g.tokens(f"{kind}_{i}", (HEADS, dim), torch.float32) for kind in "qkv"]
        sizes = ((1, 2 * dim),) if latents else ((HEADS, dim), (HEADS, dim))
        caches = [
            g.cache(f"{kind}_cache_{i}", heads, PAGE_SIZE, width, torch.float32)
            for kind, (heads, width) in zip("kv", sizes, strict=False)
        ]
        given.append((tokens, caches))
    results = []
    for window, ((q, k, v), caches) in zip(windows, given, strict=True):
        if latents:
            flat = [g.function(torch.ops.aten.select.int, node, 2, 0) for node in (k, v)]
            g.call("latent_write", *flat, *caches, step["slot_mapping"])
            results.append(g.call("paged_mla_attention", q, v, *caches, *read, 0.25, window))
        else:
            g.call("kv_write", k, v, *caches, step["slot_mapping"])
            results.append(g.call("paged_attention", q, *caches, *read, None, 0.25, window))
    return g.finish(*results)


def grouped(graph_module: fx.GraphModule) -> PassReport:
    return run_pass(group_pages, graph_module)


def found(graph_module: fx.GraphModule) -> list[tuple[str, str, str, str]]:
    """Of each attention in order: its table, the slots of its write, its caches."""
    rows = []
    nodes = list(graph_module.graph.nodes)
    reads = [named_arguments(n) for n in nodes if n.target is octavo.paged_attention.default]
    writes = [named_arguments(n) for n in nodes if n.target is octavo.kv_write.default]
    for read, write in zip(reads, writes, strict=True):
        assert (read["k_cache"], read["v_cache"]) == (write["k_cache"], write["v_cache"])
        rows.append(
            tuple(
                n.name for n in (read["page_table"], write["slot_mapping"], read["k_cache"], read["v_cache"])
            )
        )
    return rows


def row(group: int, index: int) -> tuple[str, str, str, str]:
    suffix = f"_{group}" if group else ""
    return f"page_table{suffix}", f"slot_mapping{suffix}", f"k_cache_{index}", f"v_cache_{index}"


def placeholders(graph_module: fx.GraphModule) -> list[str]:
    return [n.name for n in graph_module.graph.nodes if n.op == "placeholder"]


@pytest.mark.parametrize(
    ("windows", "expected", "page_windows_"),
    [
        ([6, 0, 6, 0], [(1, 0), (0, 0), (1, 1), (0, 1)], (None, 6)),
        ([6, 6, 0], [(1, 0), (2, 0), (0, 0)], (None, 6, 6)),
        (
            [6, 6, 6, 6, 6, 0, 6, 0],
            [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (0, 0), (3, 1), (0, 1)],
            (None, 6, 6, 6),
        ),
        (
            [0, 0, 6, 0, 6, 0, 0],
            [(0, 0), (0, 1), (3, 0), (1, 0), (3, 1), (1, 1), (2, 0)],
            (None, None, None, 6),
        ),
        ([6, 9, 6, 9], [(0, 0), (1, 0), (0, 1), (1, 1)], (6, 9)),
        ([9, 0, 6, 0], [(3, 0), (0, 0), (2, 0), (1, 0)], (None, None, 6, 9)),
    ],
)
def test_layers_of_equal_windows_share_tables_and_places_share_caches(
    windows: list[int], expected: list[tuple[int, int]], page_windows_: tuple[int | None, ...]
) -> None:
    graph_module = layers(windows)
    report = grouped(graph_module)
    assert found(graph_module) == [row(*place) for place in expected]
    assert page_windows(graph_module.graph) == page_windows_
    assert [entry["window"] for entry in report.notes["groups"]] == list(page_windows_)
    assert sum(entry["layers"] for entry in report.notes["groups"]) == len(windows)
    size = min(windows.count(window) for window in windows)
    caches = [name for name in placeholders(graph_module) if "cache" in name]
    assert caches == [f"{kind}_cache_{i}" for i in range(size) for kind in "kv"]
    again = copied(graph_module)
    assert not grouped(again).notes
    assert (found(again), placeholders(again)) == (found(graph_module), placeholders(graph_module))


@pytest.mark.parametrize(
    ("windows", "expected"), [([0, 0, 0], (None,)), ([6, 6], (6,)), ([0], (None,)), ([], (None,))]
)
def test_layers_that_are_all_alike_are_one_group(
    windows: list[int], expected: tuple[int | None, ...]
) -> None:
    graph_module = layers(windows)
    names = placeholders(graph_module)
    report = grouped(graph_module)
    assert page_windows(graph_module.graph) == expected
    assert placeholders(graph_module) == names and not report.notes and not report.rejected


@pytest.mark.parametrize("options", [{"dims": (16, 32)}, {"latents": True}])
def test_unequal_pages_and_latents_are_left_alone(options: dict[str, Any]) -> None:
    graph_module = layers([6, 0], **options)
    names = placeholders(graph_module)
    (rejection,) = grouped(graph_module).rejected
    assert ("latents" if "latents" in options else "pages of layers differ") in rejection.reason
    assert placeholders(graph_module) == names
    assert page_windows(graph_module.graph) == (None,)


def test_pages_of_codes_share_with_their_scales() -> None:
    g = LoweredGraph()
    step = {name: g.input(name) for name in STEP}
    given = []
    for i in range(4):
        tokens = [g.tokens(f"{kind}_{i}", (HEADS, 32), torch.float32) for kind in "qkv"]
        caches = [g.cache(f"{kind}_cache_{i}", HEADS, PAGE_SIZE, 16, torch.uint8) for kind in "kv"]
        scales = [g.cache(f"{kind}_scales_{i}", HEADS, PAGE_SIZE, 2, torch.float8_e4m3fn) for kind in "kv"]
        given.append((tokens, caches, scales))
    results = []
    for i, ((q, k, v), caches, scales) in enumerate(given):
        extra = {
            "k_scales": scales[0],
            "v_scales": scales[1],
            "multipliers": g.weight(f"kv_multipliers_{i}", torch.ones(2)),
        }
        g.call("kv_write", k, v, *caches, step["slot_mapping"], **extra)
        read = [step[name] for name in STEP[1:]]
        results.append(g.call("paged_attention", q, *caches, *read, None, 0.25, 6 * (i % 2), **extra))
    graph_module = g.finish(*results)
    grouped(graph_module)
    assert found(graph_module) == [row(0, 0), row(1, 0), row(0, 1), row(1, 1)]
    names = [name for name in placeholders(graph_module) if "cache" in name or "scales" in name]
    assert names == [f"{kind}_{i}" for i in (0, 1) for kind in ("k_cache", "v_cache", "k_scales", "v_scales")]
    for node in graph_module.graph.nodes:
        if node.target in (octavo.kv_write.default, octavo.paged_attention.default):
            read_ = named_arguments(node)
            places = {read_[name].name[-1] for name in ("k_cache", "v_cache", "k_scales", "v_scales")}
            assert len(places) == 1


def results(graph_module: fx.GraphModule, windows: Sequence[int | None], poison: float) -> list[list[Tensor]]:
    """Of two steps over the same tokens; each group has pages of its own, and what no page table holds is poison."""
    generator = torch.Generator().manual_seed(3)
    lengths = (23, 9)
    values = {
        n: torch.randn((1, sum(lengths), HEADS, DIM), generator=generator) for n in tokens_of(graph_module)
    }
    whole = {n: value.split(lengths, 1) for n, value in values.items()}
    caches: dict[str, Tensor] = {}
    rows = []
    for chunks in ([Chunk(0, 0, 14), Chunk(1, 0, 4)], [Chunk(0, 14, 9), Chunk(1, 4, 5)]):
        step = step_inputs(chunks, PAGE_SIZE, 2, torch.Generator().manual_seed(1), 24, windows)
        given: dict[str, Tensor] = dict(step.tensors)
        for name, parts in whole.items():
            given[name] = torch.cat([parts[c.request][:, c.start : c.start + c.length] for c in chunks], 1)
        for name in placeholders(graph_module):
            if "cache" in name and name not in caches:
                caches[name] = torch.full((step.num_pages, HEADS, PAGE_SIZE, DIM), poison)
                caches[name][0] = 0
        for cache in caches.values():  # nobody has pages that slid out of every window
            held = {int(p) for name, table in given.items() if "page_table" in name for p in table.flatten()}
            gone = [p for p in range(1, step.num_pages) if p not in held]
            cache[gone] = poison
        rows.append(list(graph_module(*({**given, **caches}[name] for name in placeholders(graph_module)))))
    return rows


def tokens_of(graph_module: fx.GraphModule) -> list[str]:
    return [
        name for name in placeholders(graph_module) if name[:2] in ("q_", "k_", "v_") and "cache" not in name
    ]


@pytest.mark.parametrize("windows", [[6, 0, 6, 0], [6, 6, 6, 0], [3, 0, 9, 3, 0, 0]])
def test_groups_over_pages_of_their_own_compute_what_one_did(windows: list[int]) -> None:
    """Also when a window's old pages are the null page, and those of nobody hold nan."""
    plain = layers(windows)
    graph_module = copied(plain)
    grouped(graph_module)
    found_windows = page_windows(graph_module.graph)
    expected = results(plain, (None,), 0.0)
    for wanted, got in zip(expected, results(graph_module, found_windows, float("nan")), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_a_fused_write_and_a_captured_model() -> None:
    graph_module = before("", "gemma3")
    assert len(page_windows(graph_module.graph)) == 1
    grouped(graph_module)
    assert page_windows(graph_module.graph) == (None, 6)
    names = placeholders(graph_module)
    assert names[:5] == ["input_ids", "positions", "slot_mapping", "slot_mapping_1", "page_table"]
    assert [name for name in names if "cache" in name] == ["k_cache_0", "v_cache_0"]
    writes = [n for n in graph_module.graph.nodes if n.name.startswith(("kv_write", "rope_kv_write"))]
    slots = [named_arguments(n)["slot_mapping"].name for n in writes]
    assert sorted(slots) == ["slot_mapping", "slot_mapping_1"]
