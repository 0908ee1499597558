"""The model without some layers: the same weights, told apart by what its artifact says."""

from typing import Any

import pytest
import torch
from models import SPELLINGS, TinyLM, llama
from stages import tokens
from zoo import build

from octavo.compiler.capture import reference_logits
from octavo.compiler.drafts.head import draft_facts
from octavo.compiler.drafts.layer_skip import without_layers
from octavo.compiler.errors import OptionError


def test_it_is_the_model_with_these_layers_made_to_do_nothing() -> None:
    model, like = llama(num_hidden_layers=5), llama(num_hidden_layers=5)
    draft = without_layers(model, (1, 3, 3))
    with torch.no_grad():
        for number in (1, 3):  # a layer adds nothing where its two last products are zeros
            layer = like.model.layers[number]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        expected = reference_logits(like, tokens(6))
        torch.testing.assert_close(reference_logits(draft, tokens(6)), expected)
    assert draft_facts(draft) == {"kind": "layer_skip", "layers": [0, 2, 4]}


def test_weights_are_shared_and_the_model_stays_as_it_was() -> None:
    model = llama(num_hidden_layers=3)
    before = reference_logits(model, tokens(4))
    draft = without_layers(model, (1,))
    own = {id(p) for p in model.parameters()}
    assert {id(p) for p in draft.parameters()} < own
    assert len(model.model.layers) == model.config.num_hidden_layers == 3
    assert torch.equal(reference_logits(model, tokens(4)), before)


def test_kinds_of_layers_go_with_them() -> None:
    """Every second layer of it looks back a window only."""
    model: Any = build("gemma2")
    kinds = list(model.config.layer_types)
    assert len(kinds) == 2 and kinds[0] != kinds[1]
    assert without_layers(model, (0,)).config.layer_types == kinds[1:]  # type: ignore[union-attr]


def test_hand_written_models_too() -> None:
    draft = without_layers(TinyLM(SPELLINGS["sdpa"]), (0,))
    assert len(draft.layers) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("skipped", [(), (0, 1, 2), (3,), (-1,)])
def test_none_all_and_others_are_refused(skipped: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="expected some of the layers 0 to 2 of LlamaForCausalLM, not all"):
        without_layers(llama(num_hidden_layers=3), skipped)
