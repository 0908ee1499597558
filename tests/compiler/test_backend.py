"""The torch.compile backend against eager: the same numbers under changing sizes, few graphs, nothing hidden."""

import importlib.metadata
import logging
import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import LAYERS, VOCAB, llama, tiny
from torch import Tensor, nn

import octavo
from octavo.compiler import backend
from octavo.compiler.backend import octavo_backend
from octavo.passes.rewrite import Builder

torch.set_num_threads(1)
FP32, BF16 = torch.float32, torch.bfloat16
# Largest difference of two logits relative to the largest logit: products are torch's own, so little can differ.
BOUND = {FP32: 1e-5, BF16: 4e-2}
# Sites of a Llama of one layer.
FUSED = {"fuse_rms_norm": 3, "fuse_rope": 2, "fuse_attention": 1, "fuse_gated_mlp": 1, "fuse_add_norm": 2}
SIZES = ((2, 5), (3, 7), (4, 4), (5, 17), (2, 2), (16, 3), (3, 64), (2, 47))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: Any, dynamic: bool | None = True, **options: Any) -> Any:
    return torch.compile(model, backend=octavo_backend, dynamic=dynamic, options=options or {"verify": "off"})


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def assert_same(result: Tensor, expected: Tensor, what: str = "") -> None:
    assert result.shape == expected.shape and result.dtype == expected.dtype
    difference = (result.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert difference <= BOUND[expected.dtype], f"{what}: {float(difference):.1e}"


class Batched(nn.Module):
    """A model by hand that counts positions inside, for any number of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny("sdpa")
        self.inner.layers = self.inner.layers[:1]  # type: ignore[index]

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        result: Tensor = self.inner(input_ids, positions)
        return result


def rewritten() -> list[dict[str, int]]:
    return [graph.rewritten for graph in octavo.backend_report().graphs]


def test_the_entry_point_is_the_backend() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["torch_dynamo_backends"].items()
    point = importlib.metadata.EntryPoint(name, value, "torch_dynamo_backends")
    assert (point.name, point.load()) == ("octavo", octavo_backend)


BY_NAME = """
import sys, torch
assert "octavo" in torch.compiler.list_backends() and "octavo" not in sys.modules
fast = torch.compile(lambda x: x * 2, backend="octavo")
with torch.no_grad():
    assert fast(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
import octavo
assert len(octavo.backend_report().graphs) == 1
"""


def test_once_installed_its_name_is_enough(tmp_path: Path) -> None:
    """With the metadata that pip writes, and nothing of ours imported before."""
    root = Path(__file__).parents[2]
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "octavo-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo\nVersion: 0\n")
    group = "torch_dynamo_backends"
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points[group].items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    paths = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(root / "src")))}
    subprocess.run([sys.executable, "-c", BY_NAME], env={**os.environ, **paths}, check=True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@torch.no_grad()
def test_every_layer_is_fused_and_proven_and_one_graph_serves_all_sizes(dtype: torch.dtype) -> None:
    model = llama(num_hidden_layers=1).to(dtype)
    fast = compiled(model, verify="sites")
    for batch, length in SIZES:
        expected = model(input_ids=ids(batch, length)).logits
        assert_same(fast(input_ids=ids(batch, length)).logits, expected, f"{batch} x {length}")
    (graph,) = octavo.backend_report().graphs
    assert graph.rewritten == FUSED
    assert all(report.proof.sites for report in graph.passes if report.matched)


@torch.no_grad()
def test_lengths_and_batches_that_change_take_three_graphs_at_most() -> None:
    """As torch.compile does by itself: fixed sizes first, then each that changed becomes a symbol."""
    model = Batched()
    fast = compiled(model, dynamic=None)
    for length in range(3, 23):
        given = ids(2 + length % 5, length)
        assert_same(fast(given), model(given))
    assert len(octavo.backend_report().graphs) <= 3


@torch.no_grad()
def test_one_token_and_one_sequence_have_graphs_of_their_own() -> None:
    model = Batched()
    fast = compiled(model)
    for batch, length in ((1, 1), (1, 9), (3, 1), (2, 6), (1, 30), (7, 1), (1, 1)):
        assert_same(fast(ids(batch, length)), model(ids(batch, length)), f"{batch} x {length}")
    assert len(octavo.backend_report().graphs) == 4


@torch.no_grad()
def test_padding_masks_keep_their_attention_and_the_rest_is_fused() -> None:
    model = llama(num_hidden_layers=1)
    fast = compiled(model)
    for length, side in ((9, "left"), (12, "right")):
        mask = torch.ones(3, length, dtype=torch.long)
        for row, padding in enumerate((0, 3, 5)):
            mask[row, :padding] = 0
        mask = mask if side == "left" else mask.flip(1)
        given = {"input_ids": ids(3, length), "attention_mask": mask}
        assert_same(fast(**given).logits[mask.bool()], model(**given).logits[mask.bool()])
    (graph,) = octavo.backend_report().graphs
    assert graph.rewritten == {name: count for name, count in FUSED.items() if name != "fuse_attention"}
    reasons = [
        r.reason for report in graph.passes for r in report.rejected if report.name == "fuse_attention"
    ]
    assert len(reasons) == 1 and all("depends on tokens" in reason for reason in reasons)


@pytest.mark.parametrize("name", ["sdpa", "window", "bidirectional", "fused"])
@torch.no_grad()
def test_models_by_hand_keep_their_numbers(name: str) -> None:
    model = tiny(name)
    has_positions = "positions" in model.forward.__code__.co_varnames
    fast = compiled(model, verify="sites")
    for length in (5, 9, 33):
        given = (ids(1, length), torch.arange(length)[None])[: 1 + has_positions]
        assert_same(fast(*given), model(*given), f"{length} tokens")
    # A mask made from a length that is not fixed cannot be proven for every length, so it stays.
    sites = rewritten()[0].get("fuse_attention", 0)
    assert sites == (LAYERS if name in ("sdpa", "bidirectional") else 0)


@torch.no_grad()
def test_a_mask_of_a_fixed_length_is_classified() -> None:
    model = tiny("window")
    fast = compiled(model, dynamic=False, verify="sites")
    assert_same(fast(ids(1, 9)), model(ids(1, 9)))
    assert rewritten()[0]["fuse_attention"] == LAYERS


@pytest.mark.parametrize("dynamic", [True, False])
@torch.no_grad()
def test_keys_of_earlier_steps_keep_their_attention(dynamic: bool) -> None:
    """Three queries over seven keys are not one sequence that looks at itself."""
    fast = compiled(nn.functional.scaled_dot_product_attention, dynamic, verify="sites")
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 7, 8)
    assert_same(fast(q, k, k), nn.functional.scaled_dot_product_attention(q, k, k))
    (graph,) = octavo.backend_report().graphs
    assert graph.rewritten == {} and "queries look at" in str(graph)


@torch.no_grad()
def test_generate_with_a_growing_cache() -> None:
    model, prompt = llama(num_hidden_layers=1), ids(2, 6)
    given = {
        "max_new_tokens": 5,
        "do_sample": False,
        "attention_mask": torch.ones_like(prompt),
        "pad_token_id": 0,
    }
    expected = model.generate(prompt, **given)
    model.forward = compiled(model.forward)
    assert torch.equal(model.generate(prompt, **given), expected)
    assert rewritten()[0]["fuse_rms_norm"] == FUSED["fuse_rms_norm"]
    assert len(octavo.backend_report().graphs) <= 4


def broken(x: Tensor) -> Tensor:
    y = x * 2
    print("a graph ends here")
    return y + 1


def test_graph_breaks_are_reported_with_their_line(caplog: pytest.LogCaptureFixture) -> None:
    fast = compiled(broken, dynamic=False)
    with caplog.at_level(logging.WARNING, "octavo.backend"):
        for size in (3, 4):
            assert torch.equal(fast(torch.ones(size)), torch.full((size,), 3.0))
    line = broken.__code__.co_firstlineno + 2
    report = octavo.backend_report()
    (place,) = report.graph_breaks
    assert place.where == f"{__file__}:{line}" and "print" in str(place)
    assert [graph.graph_break is not None for graph in report.graphs].count(True) == 2
    assert f"graph break at {__file__}:{line}" in caplog.text
    assert f"{len(report.graphs)} graphs compiled, 1 graph breaks" in str(report)
    torch.compiler.reset()
    assert octavo.backend_report().graphs == ()


def test_gradients_are_right_and_the_graph_says_why_it_was_left_alone() -> None:
    layer = nn.Linear(4, 4)
    fast = compiled(layer)
    with pytest.warns(UserWarning, match="backend for inference.*no_grad"):
        fast(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))
    (graph,) = octavo.backend_report().graphs
    assert graph.left_alone == "not rewritten: gradients are wanted" and graph.left_alone in str(graph)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error")
        assert_same(fast(torch.ones(2, 4)), layer(torch.ones(2, 4)))


def copy(x: Tensor) -> Tensor:
    return x.clone()


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.clone()


def old_and_new(x: Tensor) -> Tensor:
    before = x.clone()
    x.add_(1)
    return before


def view(x: Tensor) -> Tensor:
    return x.t()


@pytest.mark.parametrize("function", [copy, twice, old_and_new, view])
@torch.no_grad()
def test_what_shares_memory_is_what_shared_it(function: Callable[[Tensor], Any]) -> None:
    """Writing to each result and to the input shows in the same places as in eager."""
    outcomes = []
    for run in (function, compiled(function)):
        seen: list[list[float]] = []
        x = torch.arange(6.0).view(2, 3)
        results = run(x)
        results = results if isinstance(results, tuple) else (results,)
        for value in (x, *results):
            value += 10 ** len(seen)
            seen.append([float(v.sum()) for v in (x, *results)])
        outcomes.append((seen, [r.stride() for r in results]))
    assert outcomes[0] == outcomes[1]


@torch.no_grad()
def test_weights_are_read_when_the_graph_runs() -> None:
    model = tiny("sdpa")
    fast, given = compiled(model), (ids(1, 5), torch.arange(5)[None])
    fast(*given)
    model.layers[0].attention.q.weight.mul_(0.5)  # type: ignore[union-attr, index]
    assert_same(fast(*given), model(*given))
    assert len(octavo.backend_report().graphs) == 1


@torch.no_grad()
def test_a_wrong_rewrite_does_not_compile() -> None:
    def wrong(self: Builder, target: Any, *args: Any, **options: Any) -> Any:
        if target is torch.ops.octavo.rms_norm.default:
            args = (*args[:2], 0.1)
        return right(self, target, *args, **options)

    right = Builder.call
    fast = compiled(tiny("sdpa"), verify="sites")
    with mock.patch.object(Builder, "call", wrong):
        with pytest.raises(
            Exception, match=r"PassError: fuse_rms_norm: the rewrite of node .*models\.py:\d+ is not"
        ):
            fast(ids(1, 5), torch.arange(5)[None])


def test_options_are_checked() -> None:
    with pytest.raises(
        Exception, match=r"expected options verify: one of 'sites', 'off'.*got verify: 'maybe'"
    ):
        compiled(broken, verify="maybe")(torch.ones(2))


def test_only_passes_short_of_paging_run() -> None:
    names = [step.name for step in backend.STEPS]
    assert names[0] == "canonicalize" and {"fuse_attention", "fuse_add_norm"} <= set(names)
    assert not {"insert_paged_kv", "merge_qkv", "fold_constants", "fold_position_tables"} & set(names)
