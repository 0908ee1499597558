"""DeepSeek's module for the token after next is a layer like the target's own."""

import copy

import pytest
import torch
from heads import head_of, results, step_of, target_of
from torch.nn import functional as F

from octavo.compiler.drafts.mtp import MtpHead
from octavo.compiler.errors import OptionError


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def test_it_is_a_layer_between_norms() -> None:
    head = head_of("mtp")
    assert isinstance(head, MtpHead)
    ids, positions, features = step_of(head, 5)
    w = dict(head.named_parameters())
    both = normed(w["embed_tokens.weight"][ids], w["enorm.weight"]), normed(features, w["hnorm.weight"])
    x = F.linear(torch.cat(both, -1), w["eh_proj.weight"])
    with torch.no_grad():
        angles = head.rotary_emb(x, positions)
        x = head.layer(x, attention_mask=None, position_embeddings=angles)
    logits, hidden = results(head, ids, positions, features)
    torch.testing.assert_close(hidden, x, rtol=1e-4, atol=1e-4)
    last = F.linear(normed(x, w["shared_head.norm.weight"]), target_of("mtp").lm_head.weight)
    torch.testing.assert_close(logits, last, rtol=1e-4, atol=1e-3)


def test_its_layer_has_experts_and_the_targets_positions() -> None:
    head, target = head_of("mtp"), target_of("mtp")
    assert isinstance(head, MtpHead)
    assert type(head.layer.mlp) is type(target.model.layers[-1].mlp)
    assert head.layer_number == len(target.model.layers)
    assert head.embed_tokens is target.model.embed_tokens and head.shared_head.head is target.lm_head
    assert target.config._attn_implementation == copy.deepcopy(target).config._attn_implementation
    assert head.config is not target.config


def test_what_corrects_the_choice_of_experts_stays_exact() -> None:
    target = copy.deepcopy(target_of("mtp")).bfloat16()
    head = MtpHead.for_target(target)
    assert head.eh_proj.weight.dtype == torch.bfloat16
    assert {b.dtype for b in head.layer.buffers()} == {torch.float32}


def test_other_targets_are_refused() -> None:
    with pytest.raises(OptionError, match="expected a DeepSeek-V3 target, got LlamaForCausalLM"):
        MtpHead.for_target(target_of("eagle"))
