"""Captured graphs: one form for every model, its own names and lines, and clear refusals."""

import re
from typing import Any

import pytest
import torch
from models import COMPILABLE, LONGEST, SPELLINGS, VOCAB, SdpaAttention, Spelling, TinyLM, llama, tiny
from stages import FP32, LENGTHS, assert_same_numbers, captured, logits, tokens
from torch import Tensor, nn

from octavo.compiler.capture import capture, reference_logits
from octavo.compiler.errors import CaptureError
from octavo.compiler.model_call import EXAMPLE_LEN
from octavo.passes.pattern import arguments


@pytest.mark.parametrize("name", COMPILABLE)
def test_computes_what_the_model_computes(name: str) -> None:
    graph_module = captured(name).graph_module
    assert_same_numbers(graph_module, name)
    assert LENGTHS[0] == EXAMPLE_LEN != LENGTHS[1]
    inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    assert [n.name for n in inputs] == ["input_ids", "position_ids"]
    length = inputs[0].meta["val"].shape[1]
    assert isinstance(length, torch.SymInt) and inputs[1].meta["val"].shape[1] == length
    ((result,),) = arguments(graph_module.graph.output_node())
    assert tuple(result.meta["val"].shape[::2]) == (1, VOCAB)


def test_knows_a_librarys_model_by_its_configuration() -> None:
    found = captured()
    assert found.route == "interface"
    assert found.model_info == {
        "name": "tiny-llama", "vocab_size": VOCAB, "num_layers": 2, "max_model_len": LONGEST,
        "eos_token_ids": [], "bos_token_id": 1,
    }  # fmt: skip


def test_knows_of_other_models_what_their_code_says() -> None:
    found = captured("fused")
    assert (found.route, found.model_info["name"]) == ("patterns", "TinyLM")
    assert found.model_info["max_model_len"] == LONGEST  # the registered mask ends there
    assert captured("sdpa").model_info["max_model_len"] is None
    model = TinyLM(Spelling(SdpaAttention, learned=True))
    assert capture(model).model_info["max_model_len"] == LONGEST  # the learned positions end there


def test_weights_keep_the_models_names_and_memory() -> None:
    model = tiny("sdpa")
    weights = dict(capture(model).graph_module.named_buffers())
    assert "layers.0.attention.q.weight" in weights
    for name, tensor in model.state_dict().items():
        if name != "head.weight":
            assert weights[name].data_ptr() == tensor.data_ptr(), name


def test_tied_weights_are_one() -> None:
    for name, tied in (("sdpa", True), ("softmax", False)):
        weights = [
            n for n, _ in captured(name).graph_module.named_buffers() if n.split(".")[-2] in ("embed", "head")
        ]
        assert len(weights) == (1 if tied else 2)


def test_two_views_of_one_square_weight_stay_two() -> None:
    class Turned(nn.Module):
        turned: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.register_buffer("turned", self.weight.detach().T)
            self.embed = nn.Embedding(VOCAB, 8)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return x @ self.weight + 2 * (x @ self.turned)  # type: ignore[no-any-return]

    model = Turned()
    expected = reference_logits(model, tokens(9))[0]
    assert torch.allclose(logits(capture(model).graph_module, tokens(9)), expected, atol=1e-5)


def test_nodes_know_their_module_and_source_line() -> None:
    graph_module = captured("sdpa").graph_module
    (node, *_) = (n for n in graph_module.graph.nodes if "scaled_dot_product" in str(n.target))
    assert list(node.meta["nn_module_stack"].values())[-1][0] == "layers.0.attention"
    assert "models.py" in node.meta["stack_trace"]


def test_the_model_is_left_as_it_was() -> None:
    model = llama().train()
    model.get_submodule("model.norm").eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    capture(model)
    reference_logits(model, tokens(4))
    assert {name: module.training for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


class Writing(nn.Module):
    """Adds in place, so its graph has to be made functional."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids).clone()
        x += 1.0
        x[:, :, :4] *= 2.0
        return x


def test_writes_in_place_become_values() -> None:
    model = Writing()
    graph_module = capture(model).graph_module
    assert not [
        n
        for n in graph_module.graph.nodes
        if str(n.target).split(".")[1:2] in (["add_"], ["mul_"], ["copy_"])
    ]
    assert torch.equal(logits(graph_module, tokens(9)), reference_logits(model, tokens(9))[0])


class Returning(nn.Module):
    """A model whose forward takes and gives what the test wants."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.result = result

    def forward(self, ids: Tensor) -> Any:
        return self.result(self.embed(ids))


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize("result", [lambda x: x, lambda x: (x, None), lambda x: [x], Output])
def test_takes_logits_out_of_what_a_model_returns(result: Any) -> None:
    model = Returning(result)
    assert torch.equal(logits(capture(model).graph_module, tokens(5)), model.embed(tokens(5))[0])


def test_refuses_inputs_that_it_cannot_fill() -> None:
    class Masked(nn.Module):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return ids

    with pytest.raises(CaptureError) as raised:
        capture(Masked())
    assert str(raised.value) == (
        "capture: Masked.forward takes ['ids', 'attention_mask']; expected token ids and optionally "
        "positions (one of position_ids, positions, position, pos, input_pos) and features; wrap the model in a module "
        "that fills in ['attention_mask']"
    )


def test_an_optional_input_is_left_alone() -> None:
    class Optional(TinyLM):
        def forward(self, input_ids: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
            assert cache is None
            return super().forward(input_ids, positions)

    torch.manual_seed(0)
    assert capture(Optional(SPELLINGS["none"])).route == "patterns"


def test_control_flow_on_tokens_is_refused_with_the_models_line() -> None:
    class Branching(Writing):
        def forward(self, ids: Tensor) -> Tensor:
            x: Tensor = self.embed(ids)
            return x if ids[0, 0] > 3 else x * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branching()

        def forward(self, ids: Tensor) -> Tensor:
            result: Tensor = self.inner(ids)
            return result

    with pytest.raises(CaptureError) as raised:
        capture(Outer())
    text = str(raised.value)
    assert text.startswith("capture: torch.export failed on Outer (")
    assert re.search(r" in inner at \S*test_capture\.py:\d+; ", text)
    assert "without Python control flow that depends on token values" in text


def test_a_length_turned_into_a_number_is_refused() -> None:
    class Fixed(Writing):
        def forward(self, ids: Tensor) -> Tensor:
            x: Tensor = self.embed(ids)
            return x + sum(range(int(ids.shape[1])))

    with pytest.raises(CaptureError, match="Fixed fixed the sequence length to 7 while it was traced"):
        capture(Fixed())


def test_models_on_the_meta_device_can_be_captured() -> None:
    with torch.device("meta"):
        model = TinyLM(SPELLINGS["sdpa"])
    graph_module = capture(model).graph_module
    assert {b.device.type for b in graph_module.buffers()} == {"meta"}
    assert next(iter(captured("sdpa").graph_module.buffers())).dtype is FP32


class Gathering(nn.Module):
    """Only some tokens go through a layer: how many, their ids decide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.embed(input_ids)
        rows = torch.nonzero(input_ids[0] > 3)[:, 0]
        return logits.index_add(1, rows, logits[:, rows].tanh())


def test_refuses_sizes_that_token_values_give() -> None:
    with pytest.raises(CaptureError, match=r"that token values give \(node \w+, test_capture.py:\d+\)"):
        capture(Gathering().eval())
