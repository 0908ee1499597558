"""Latent attention is absorbed: products for each head around attention over the latents themselves."""

import pytest
import torch
from latent import NOPE, RANK, VALUE
from models import HEADS, LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, before, calls, count

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["deepseek_v3_dense", "latent"])
def test_fires_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("absorb_mla", name, dtype)
    assert report.matched == count(graph_module, octavo.latent_attention.default) == LAYERS
    assert count(graph_module, octavo.mla_attention.default) == 0
    assert_same_numbers(graph_module, name, dtype)


def test_weights_are_folded_into_one_product_for_each_head() -> None:
    graph_module = before("", "latent")
    first, second = calls(graph_module, octavo.head_linear.default)[:2]
    assert [n.args[1].op for n in (first, second)] == ["get_attr"] * 2  # type: ignore[union-attr]
    shapes = [tuple(n.args[1].meta["val"].shape) for n in (first, second)]  # type: ignore[union-attr]
    assert shapes == [(HEADS, RANK, NOPE), (HEADS, VALUE, RANK)]
    assert graph_module.get_buffer(str(first.args[1].target)).is_contiguous()  # type: ignore[union-attr]


def test_keys_and_values_of_the_heads_are_never_made() -> None:
    graph_module = before("", "latent")
    widths = {n.meta["val"].shape[-1] for n in calls(graph_module, octavo.linear.default)}
    assert HEADS * VALUE not in widths
    assert HEADS * (NOPE + VALUE) not in widths


def test_idempotent() -> None:
    assert_idempotent("absorb_mla", "latent")
