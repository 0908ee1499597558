"""Equal layers are left out and put back: the whole model's logits, with every layer's own weights."""

from typing import Any

import pytest
import torch
from models import LONGEST, SPELLINGS, GatedMLP, TinyLM, llama, with_margin
from stages import SETTINGS, logits, tokens
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import AutoModelForCausalLM, Gemma2Config

from octavo.compiler.capture import capture, reference_logits
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.errors import PassError
from octavo.compiler.layer_folding import Folded, fold, unfold
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import PIPELINE, Lowered, lower

octavo = torch.ops.octavo
WITHOUT_PROOF = CompileOptions(verify="off")


def gemma(layers: int) -> nn.Module:
    """Sliding and full attention take turns."""
    config = Gemma2Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=LONGEST, sliding_window=5,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return with_margin(model)


class Stack(TinyLM):
    """A hand-written model of more layers; `wide` of them have a larger block first."""

    layers: nn.ModuleList

    def __init__(self, layers: int, wide: int = 0, spelling: str = "sdpa") -> None:
        super().__init__(SPELLINGS[spelling])
        one = type(self.layers[0])
        attention = SPELLINGS[spelling].attention
        self.layers = nn.ModuleList(one(attention(), False) for _ in range(layers))
        for layer in self.layers[:wide]:
            layer.mlp = nn.Sequential(GatedMLP(), GatedMLP())


class Scaled(nn.Module):
    """Multiplies by a number of its own."""

    def __init__(self, inner: nn.Module, factor: float, as_parameter: bool) -> None:
        super().__init__()
        self.inner = inner
        value = torch.full((1,), factor)
        self.factor = nn.Parameter(value) if as_parameter else nn.Buffer(value)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * self.factor
        return result


class Recalling(Stack):
    """The head also sees what the third layer made."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input_ids)
        states = []
        for layer in self.layers:
            x = layer(x, positions)
            states.append(x)
        result: Tensor = self.head(self.norm(x + states[2]))
        return result


def folded(model: nn.Module) -> Folded | None:
    return fold(capture(model).graph_module)


def lowered(model: nn.Module) -> Lowered:
    return lower(capture(model), WITHOUT_PROOF, SETTINGS)


def attentions(graph_module: GraphModule) -> int:
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]
    return sum("attention" in name or "softmax" in name for name in names)


def kept(model: nn.Module) -> int:
    result = folded(model)
    assert result is not None
    return attentions(result.graph_module)


def assert_same_logits(model: nn.Module, result: Lowered) -> None:
    for length in (7, 12):
        with torch.no_grad():
            expected = reference_logits(model, tokens(length))[0]
        difference = (logits(result.graph_module, tokens(length)) - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("model", "layers", "seen"),
    [
        (lambda: llama(num_hidden_layers=7), 7, 3),
        (lambda: gemma(11), 11, 7),
        (lambda: with_margin(Stack(8, wide=2)), 8, 5),
        (lambda: with_margin(Stack(6, spelling="fused")), 6, 3),
    ],
    ids=["like", "alternating", "two kinds", "parts of one weight"],
)
def test_the_whole_model_comes_back(model: Any, layers: int, seen: int) -> None:
    original = model()
    assert kept(original) == seen
    result = lowered(original)
    assert (attentions(result.graph_module), result.num_layers) == (layers, layers)
    assert result.reports[-1].notes["layers"] == f"{layers}, of which the passes saw {seen}"
    assert_same_logits(original, result)


def test_the_graph_is_the_one_that_all_layers_give(tmp_path: Any) -> None:
    """Dumps show every layer, so with them nothing is left out."""
    short = lowered(llama(num_hidden_layers=6))
    dumps = DumpWriter(tmp_path)
    whole = lower(capture(llama(num_hidden_layers=6)), WITHOUT_PROOF, SETTINGS, dumps=dumps)
    assert [r.name for r in whole.reports] == [step.name for step in PIPELINE]
    for kind in ("call_function", "placeholder"):
        names = [[str(n.target) for n in g.graph_module.graph.nodes if n.op == kind] for g in (short, whole)]
        assert names[0] == names[1]
    weights = [{n.target for n in g.graph_module.graph.nodes if n.op == "get_attr"} for g in (short, whole)]
    assert len(weights[0]) == len(weights[1])


def test_few_layers_stay_as_they_are() -> None:
    assert folded(llama(num_hidden_layers=3)) is None
    assert kept(llama(num_hidden_layers=4)) == 3


@pytest.mark.parametrize("as_parameter", [True, False])
def test_layers_with_numbers_of_their_own_differ(as_parameter: bool) -> None:
    """Single numbers become part of kernels, so they are not weights of any value."""
    model = Stack(6)
    for index, layer in enumerate(model.layers):
        layer.mlp = Scaled(layer.get_submodule("mlp"), 1.0 + index, as_parameter)
    with_margin(model)
    assert folded(model) is None
    assert_same_logits(model, lowered(model))


def test_equal_numbers_do_not_differ() -> None:
    model = Stack(6)
    for layer in model.layers:
        layer.mlp = Scaled(layer.get_submodule("mlp"), 0.5, False)
    with_margin(model)
    assert kept(model) == 3
    assert_same_logits(model, lowered(model))


def test_a_value_that_is_read_far_behind_keeps_its_layer() -> None:
    model = with_margin(Recalling(8))
    assert_same_logits(model, lowered(model))


def test_copies_carry_their_own_module_path() -> None:
    graph_module = lowered(llama(num_hidden_layers=8)).graph_module
    paths = [
        list(n.meta["nn_module_stack"].values())[-1][0]
        for n in graph_module.graph.nodes
        if n.target is octavo.paged_attention.default
    ]
    assert paths == [f"model.layers.{i}.self_attn" for i in range(8)]


def test_unequal_results_are_refused() -> None:
    result = folded(llama(num_hidden_layers=6))
    assert result is not None
    graph = result.graph_module.graph
    down = [n for n in graph.nodes if n.target is torch.ops.aten.linear.default and "down" in str(n.args[1])]
    with graph.inserting_after(down[0]):
        twice = graph.call_function(torch.ops.aten.mul.Tensor, (down[0], 2.0))
    twice.meta = dict(down[0].meta)
    down[0].replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    with pytest.raises(PassError, match="equal layers became unequal"):
        unfold(result)


def test_reports_count_the_whole_model() -> None:
    """What was found in a layer that stands for others counts as often, and is proven once."""
    reports = {r.name: r for r in lowered(llama(num_hidden_layers=7)).reports}
    assert reports["fuse_attention"].notes["attentions"] == "7 of 7"
    assert (reports["fuse_rms_norm"].matched, len(reports["fuse_rms_norm"].sites)) == (15, 7)
    assert (reports["fuse_rope"].matched, reports["merge_qkv"].matched) == (14, 7)
