"""Models without values: captured, rewritten and proven like the others, and computed buffers are made again."""

import pytest
import torch
from models import LONGEST, SPELLINGS, TinyLM, llama
from stages import SETTINGS
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from octavo.compiler.capture import Captured, capture
from octavo.compiler.errors import CaptureError
from octavo.compiler.meta_model import has_values
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import lower
from octavo.passes.rewrite import held

META = torch.device("meta")


def meta_llama(tied: bool = False) -> nn.Module:
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, tie_word_embeddings=tied,
    )  # fmt: skip
    with META:
        model: nn.Module = LlamaForCausalLM(config)
    return model


def kernels(captured: Captured) -> list[str]:
    graph = lower(captured, CompileOptions(), SETTINGS).graph_module.graph
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_the_program_is_that_of_the_model_with_values() -> None:
    assert kernels(capture(meta_llama())) == kernels(capture(llama()))


def test_everything_counts_as_the_cpus() -> None:
    graph_module = capture(meta_llama()).graph_module
    for node in graph_module.graph.nodes:
        assert torch.device("meta") not in [*node.args, *node.kwargs.values()], node.format_node()
        if isinstance(node.meta.get("val"), torch.Tensor):
            assert node.meta["val"].device.type == "cpu", node.format_node()


def test_computed_buffers_have_their_values_again() -> None:
    angles = held(capture(meta_llama()).graph_module, "model.rotary_emb.inv_freq")
    assert torch.equal(angles, llama().model.rotary_emb.inv_freq)


def test_tied_weights_are_one() -> None:
    graph = capture(meta_llama(tied=True)).graph_module.graph
    assert "lm_head.weight" not in {n.target for n in graph.find_nodes(op="get_attr")}
    graph = capture(meta_llama()).graph_module.graph
    assert "lm_head.weight" in {n.target for n in graph.find_nodes(op="get_attr")}


def test_a_buffer_that_cannot_be_made_again_is_named() -> None:
    config = Gemma3TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=LONGEST,
    )  # fmt: skip
    with META:
        model = Gemma3ForCausalLM(config)
    with pytest.raises(
        CaptureError, match=r"buffer model\.embed_tokens\.embed_scale of \w+ is computed when"
    ):
        capture(model)


def test_hand_written_models_too() -> None:
    with META:
        model = TinyLM(SPELLINGS["sdpa"])
    assert not has_values(model)
    assert "octavo.paged_attention.default" in kernels(capture(model))
