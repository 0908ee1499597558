"""Hugging Face's attention and masks arrive as one op with their attributes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import LAYERS, SCALE, llama, tiny, with_margin
from stages import assert_same_numbers, calls, captured
from torch import nn
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from octavo.compiler.capture import capture
from octavo.compiler.errors import CaptureError
from octavo.compiler.huggingface import (
    MaskSpec,
    _attention,
    _build_mask,
    attention_as_op,
    description,
    is_model,
    mask_spec,
)

attention = torch.ops.octavo.attention.default


def test_every_layer_is_one_op_with_its_scale() -> None:
    graph_module = captured().graph_module
    found = calls(graph_module, attention)
    assert [n.args[4:] for n in found] == [(SCALE,)] * LAYERS
    assert [n.args[1].meta["val"].shape[2] for n in found] == [2] * LAYERS  # type: ignore[union-attr]
    assert_same_numbers(graph_module, "llama")


def test_a_sliding_window_arrives_as_a_number() -> None:
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=6, max_position_embeddings=64,
    )  # fmt: skip
    (node,) = calls(capture(MistralForCausalLM(config)).graph_module, attention)
    assert node.args[5:] == (True, 6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_model_gets_its_implementation_back(implementation: str) -> None:
    model = llama(attn_implementation=implementation)
    with attention_as_op(model):
        assert model.config._attn_implementation == "octavo"
    assert model.config._attn_implementation == implementation
    with pytest.raises(ZeroDivisionError), attention_as_op(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (causal_mask_function, MaskSpec(True, 0)),
        (bidirectional_mask_function, MaskSpec(False, 0)),
        (sliding_window_causal_mask_function(9), MaskSpec(True, 9)),
        (and_masks(causal_mask_function, sliding_window_causal_mask_function(4)), MaskSpec(True, 4)),
    ],
)
def test_reads_masks(function: object, expected: MaskSpec) -> None:
    assert mask_spec(function) == expected


def test_refuses_masks_that_cannot_be_paged() -> None:
    with pytest.raises(
        CaptureError, match=r"the mask 'or_masks.<locals>.or_mask' is not one that can be paged"
    ):
        mask_spec(or_masks(causal_mask_function, bidirectional_mask_function))
    with pytest.raises(CaptureError, match="the model makes a padding mask of its own"):
        _build_mask(attention_mask=torch.ones(1, 4))


def test_refuses_a_mask_tensor_handed_to_the_interface() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(CaptureError, match="Identity passes a mask tensor to the attention interface"):
        _attention(nn.Identity(), q, q, q, torch.zeros(1, 1, 3, 3))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"position_bias": torch.zeros(1, 2, 3, 3)},
            r"Identity passes position_bias \(1, 2, 3, 3\) to the attention",
        ),
        (
            {"chunk_size": 4, "indices": torch.zeros(3)},
            r"Identity passes chunk_size=4, indices \(3,\) to the attention",
        ),
    ],
)
def test_refuses_arguments_that_may_change_the_result(given: dict[str, object], reason: str) -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(CaptureError, match=reason):
        _attention(nn.Identity(), q, q, q, None, **given)  # type: ignore[arg-type]


def test_takes_arguments_that_say_nothing() -> None:
    q = torch.randn(1, 2, 3, 4)
    plain, _ = _attention(nn.Identity(), q, q, q, None)
    given = {"dropout": 0.0, "position_ids": torch.arange(3), "alibi": None, "output_attentions": False}
    assert torch.equal(_attention(nn.Identity(), q, q, q, None, **given)[0], plain)  # type: ignore[arg-type]
    free, _ = _attention(nn.Identity(), q, q, q, None, is_causal=False)
    assert not torch.allclose(free, plain)


class ModelConfig(SimpleNamespace):
    """A configuration without token ids."""

    name_or_path, num_hidden_layers = "", 2

    def get_text_config(self) -> "ModelConfig":
        return self


class Reading(nn.Module):
    """An attention that changes what it calls the interface with, in a model of another."""

    def __init__(self, inner: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, **arguments: Any) -> Any:
        self.change(arguments)
        return self.inner(**arguments)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda given: given.update(head_bias=0.5),
            "LlamaAttention passes head_bias=0.5 to the attention interface",
        ),
        (lambda given: given["attention_mask"][:, :1], "the model's code reads the attention mask itself"),
    ],
)
def test_refusals_name_the_module_and_the_line(change: Callable[[dict[str, Any]], None], reason: str) -> None:
    model = llama()
    model.model.layers[1].self_attn = Reading(model.model.layers[1].self_attn, change)
    with pytest.raises(CaptureError, match=rf"{reason}.* in model\.layers\.1\.self_attn\S* at /\S+\.py:\d+"):
        capture(model)


def test_chunks_of_tokens_are_refused_where_the_mask_is_made() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "attention_chunk_size": 4, "num_local_experts": 2, "pad_token_id": 0,
    }  # fmt: skip
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes))
    with pytest.raises(
        CaptureError, match=r"in chunks of 4 tokens is not served.* in model at \S+/modeling_llama4\.py:\d+"
    ):
        capture(model)


def test_a_module_says_itself_whether_it_is_causal() -> None:
    q, module = torch.randn(1, 2, 3, 4), nn.Identity()
    causal, _ = _attention(module, q, q, q, None)
    module.is_causal = False  # type: ignore[assignment]
    free, _ = _attention(module, q, q, q, None)
    assert torch.equal(causal[0, -1], free[0, -1])
    assert torch.equal(causal[0, 0], q[0, :, 0])
    assert not torch.allclose(causal, free)


def test_describes_a_model() -> None:
    model = llama(eos_token_id=[2, 5])
    assert description(model)["eos_token_ids"] == [2, 5]
    model = llama(eos_token_id=2, name_or_path="")
    found = description(model)
    assert (found["eos_token_ids"], found["name"]) == ([2], "LlamaForCausalLM")
    model.generation_config, model.config = (
        None,
        ModelConfig(vocab_size=9),
    )  # of a library's model that has neither
    found = description(model)
    assert (found["eos_token_ids"], found["bos_token_id"]) == ([], None)


def test_knows_its_models() -> None:
    assert is_model(tiny("llama"))
    assert not is_model(nn.Linear(2, 2))


@pytest.mark.parametrize("padding", [0, 1])
def test_refuses_models_that_count_positions_otherwise(padding: int) -> None:
    sizes = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 64, "is_decoder": True, "pad_token_id": padding,
    }  # fmt: skip
    torch.manual_seed(0)
    model = with_margin(RobertaForCausalLM(RobertaConfig(**sizes)))
    with pytest.raises(
        CaptureError, match=r"RobertaForCausalLM counts positions otherwise than 0, 1, 2, \.\.\. where"
    ):
        capture(model)
