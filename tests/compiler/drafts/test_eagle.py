"""An EAGLE head is the layers that its authors describe, beside the target's own table and last product."""

import copy

import pytest
import torch
from heads import IDS, head_of, results, step_of, target_of
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from octavo.compiler.drafts.eagle import EagleHead


def test_it_is_one_layer_without_its_first_norm() -> None:
    """Written out from the paper's figure, in NumPy's order of things: no module of the head is called."""
    head = head_of("eagle")
    assert isinstance(head, EagleHead)
    ids, positions, features = step_of(head, 5)
    w = dict(head.named_parameters())
    x = F.linear(torch.cat((w["embed_tokens.weight"][ids], features), -1), w["fc.weight"], w["fc.bias"])
    q, k, v = (
        F.linear(x, w[f"layers.0.self_attn.{n}_proj.weight"]).view(1, 5, -1, 16).transpose(1, 2)
        for n in "qkv"
    )
    q, k = apply_rotary_pos_emb(q, k, *head.rotary_emb(x, positions))
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 4
    scores += torch.full((5, 5), float("-inf")).triu(1)
    mixed = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2).reshape(1, 5, 64)
    x = x + F.linear(mixed, w["layers.0.self_attn.o_proj.weight"])
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps)
    normed = normed * w["layers.0.post_attention_layernorm.weight"]
    gate, up = (F.linear(normed, w[f"layers.0.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
    x = x + F.linear(F.silu(gate) * up, w["layers.0.mlp.down_proj.weight"])
    logits, hidden = results(head, ids, positions, features)
    torch.testing.assert_close(hidden, x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        logits, F.linear(x, target_of("eagle").lm_head.weight[IDS]), rtol=1e-4, atol=1e-3
    )


def test_the_targets_parts_are_its_own_and_not_trained() -> None:
    target = target_of("eagle")
    head = EagleHead.for_target(target)
    assert head.embed_tokens is target.model.embed_tokens and head.lm_head is target.lm_head
    trained = head.trained_parameters()
    assert {name.split(".")[0] for name in trained} == {"fc", "layers"}
    assert not any(p is q for p in trained.values() for q in target.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_the_targets_dtype(dtype: torch.dtype) -> None:
    target = copy.deepcopy(target_of("eagle")).to(dtype)
    head = EagleHead.for_target(target, IDS)
    assert {p.dtype for p in head.parameters()} == {dtype}
    assert head.max_model_len == 48 and head.features_width == 64
