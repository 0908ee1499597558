"""Tokens may see each other in attention and nowhere else; a test for each kind of state, in small modules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import COMPILABLE, HIDDEN, SPELLINGS, Spelling, TinyLM, tiny, with_margin
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.compiler.capture import capture
from octavo.compiler.errors import CaptureError
from octavo.compiler.token_mixing import mixing

Mixer = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """(1, T, HIDDEN) to (1, T, HIDDEN) by `mix`, with a few weights to use."""

    def __init__(self, mix: Mixer) -> None:
        super().__init__()
        self.mix = mix
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 4, padding=3, groups=HIDDEN)
        self.pointwise = nn.Conv1d(HIDDEN, HIDDEN, 1)
        self.dilated = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, dilation=2)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.group_norm = nn.GroupNorm(4, HIDDEN)
        self.triangle = nn.Parameter(torch.ones(64, 64).tril())

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, x)


class Model(nn.Module):
    def __init__(self, mix: Mixer) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, HIDDEN)
        self.block = Block(mix)
        self.head = nn.Linear(HIDDEN, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        result: Tensor = self.head(x + self.block(x))
        return result


def linear_attention(b: Block, x: Tensor) -> Tensor:
    q, k = F.elu(b.linear(x)) + 1, F.elu(x) + 1
    scores = q @ k.transpose(1, 2)
    return scores.tril() @ x


def decayed(b: Block, x: Tensor) -> Tensor:
    """The pairwise form of a state-space model."""
    decay = b.linear(x)[..., 0]
    distance = torch.arange(x.shape[1])
    weights = torch.exp(-(distance[:, None] - distance[None]).abs() * decay[:, :, None])
    return torch.einsum("bts,bsd->btd", weights.tril(), x)


def loop(b: Block, x: Tensor) -> Tensor:
    state, outputs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = state * 0.5 + x[:, t]
        outputs.append(state)
    return torch.stack(outputs, dim=1)


def written(b: Block, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :, :4] *= 2.0
    return y


def overwritten(b: Block, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] += x[:, :-1]
    return y


def shifted(b: Block, x: Tensor) -> Tensor:
    return torch.cat((x.new_zeros(1, 1, HIDDEN), x[:, :-1]), dim=1)


KINDS: dict[str, tuple[Mixer, str]] = {
    "conv": (
        lambda b, x: b.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2),
        "convolution over tokens: state of 3 tokens outside attention",
    ),
    "dilated": (
        lambda b, x: b.dilated(x.transpose(1, 2)).transpose(1, 2),
        "convolution over tokens: state of 4 tokens",
    ),
    "cumsum": (lambda b, x: b.linear(x).cumsum(1), "cumsum over tokens: a running sum"),
    "cumprod": (lambda b, x: x.sigmoid().cumprod(dim=-2), "cumprod over tokens: a running product"),
    "mean": (lambda b, x: x - x.mean(1, keepdim=True), "mean over tokens: a value of the whole sequence"),
    "total": (lambda b, x: x / x.abs().sum(), "sum over tokens"),
    "max": (lambda b, x: x - x.amax(dim=(1, 2), keepdim=True), "amax over tokens"),
    "roll": (lambda b, x: x.roll(1, 1), "roll over tokens: token shift"),
    "flip": (lambda b, x: x + x.flip(1), "flip over tokens: tokens read backwards"),
    "pad": (lambda b, x: F.pad(x, (0, 0, 1, -1)), r"padding of the tokens by \(1, -1\)"),
    "shift": (shifted, "slice over tokens 0:-1: a shift or a loop"),
    "overwritten": (overwritten, "slice over tokens 1:"),
    "loop": (loop, "select of token 0: a loop over tokens with state"),
    "linear attention": (linear_attention, "matmul over tokens without a softmax: linear attention or a recurrence"),
    "decay": (decayed, "einsum over tokens without a softmax"),
    "mixer": (
        lambda b, x: b.triangle[: x.shape[1], : x.shape[1]] @ x,
        "matmul over tokens without a softmax: a matrix of fixed weights",
    ),
    "pooling": (
        lambda b, x: (b.linear(x)[..., :1].softmax(1) * x),
        r"softmax over tokens that is not over the keys of q k\^T: pooling",
    ),
    "gru": (lambda b, x: b.gru(x)[0], "gru over tokens: a recurrent network"),
    "group norm": (lambda b, x: b.group_norm(x.transpose(1, 2)).transpose(1, 2), "group_norm over tokens"),
    "fft": (lambda b, x: torch.fft.fft(x.to(torch.complex64), dim=1).real, "fft_fft over tokens"),
    "fixed places": (
        lambda b, x: x[:, (torch.arange(x.shape[1]) - 1).clamp(min=0)],
        "index of tokens at fixed places: token shift",
    ),
    "gather": (
        lambda b, x: x.gather(1, (torch.arange(x.shape[1]) - 1).clamp(min=0)[None, :, None].expand_as(x)),
        "gather of tokens at fixed places",
    ),
    "ranked": (lambda b, x: x.sort(dim=1).values, "sort over tokens: tokens ranked"),
    "average": (
        lambda b, x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
        "avg_pool1d over tokens: state of neighbouring tokens",
    ),
    "fixed queries": (
        lambda b, x: F.scaled_dot_product_attention(b.triangle[None, :1], x, x) + x,
        "attention of fixed queries over all tokens: pooling",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_refused_with_node_module_and_line(kind: str) -> None:
    mix, reason = KINDS[kind]
    with pytest.raises(CaptureError, match=f"^capture: {reason}") as raised:
        capture(Model(mix).eval())
    assert ", block" in str(raised.value)
    assert "test_token_mixing.py:" in str(raised.value)


POINTWISE: dict[str, Mixer] = {
    "conv of one": lambda b, x: b.pointwise(x.transpose(1, 2)).transpose(1, 2),
    "conv over features": lambda b, x: b.conv(x[0][..., None].expand(-1, -1, 4))[..., 3][None],
    "reductions": lambda b, x: x - x.mean(-1, keepdim=True) + x.amax(2)[..., None] + x.var(2, keepdim=True),
    "cumsum": lambda b, x: x.cumsum(-1) + x.flip(-1) + x.roll(1, -1) + x.sort(-1).values,
    "parts": lambda b, x: torch.cat([p * 2 for p in x.view(*x.shape[:2], 4, -1).transpose(1, 2).unbind(1)], -1),
    "heads": lambda b, x: torch.stack(x.unflatten(2, (2, -1)).unbind(2), 2).flatten(2).softmax(-1),
    "padded": lambda b, x: F.pad(x[..., 1:], (1, 0)),
    "products": lambda b, x: (x.unflatten(2, (8, 8)) @ b.linear(x).unflatten(2, (8, 8))).flatten(2),
    "einsum": lambda b, x: torch.einsum("btd,de->bte", x, b.linear.weight),
    "positions": lambda b, x: x * torch.arange(x.shape[1]).cumsum(0)[None, :, None],
    "written": written,
    "dead": lambda b, x: (x.cumsum(1), x * 2)[1],
}  # fmt: skip


@pytest.mark.parametrize("kind", POINTWISE)
def test_what_keeps_tokens_apart_passes(kind: str) -> None:
    capture(Model(POINTWISE[kind]).eval())


@pytest.mark.parametrize("name", [*COMPILABLE, "prefix", "bidirectional"])
def test_attention_is_no_state_in_any_spelling(name: str) -> None:
    assert mixing(capture(tiny(name)).graph_module.graph) == []


def test_state_beside_attention_is_found() -> None:
    class Conv(SPELLINGS["sdpa"].attention):  # type: ignore[misc]
        """A short convolution in front of the values, as in many hybrids."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            mixed = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
            result: Tensor = super().forward(mixed, positions)
            return result

    model = with_margin(TinyLM(Spelling(Conv)))
    with pytest.raises(CaptureError) as raised:
        capture(model)
    assert "state of 2 tokens outside attention (node conv1d, layers.0.attention.conv, " in str(raised.value)
    assert "the first of 2 such places" in str(raised.value)


HYBRIDS: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 8}, r"state of 3 tokens .*backbone\.layers\.0\.mixer, modeling_mamba\.py:\d+"),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
        r"state of 2 tokens .*model\.layers\.0\.conv, modeling_lfm2\.py:\d+",
    ),
    "rwkv": (
        {"attention_hidden_size": 64},
        r"the model writes to rwkv\.blocks\.0\.attention\.output\.weight.* while it runs: state outside attention",
    ),
    "recurrent_gemma": (
        {"lru_width": 64, "num_key_value_heads": 1},
        r"state of 3 tokens .*model\.layers\.0\.temporal_block\.conv_1d, modeling_recurrent_gemma\.py:\d+",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HYBRIDS)
def test_libraries_models_with_state_are_refused(kind: str) -> None:
    changes, reason = HYBRIDS[kind]
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**sizes, **changes})).eval()
    with pytest.raises(CaptureError, match=reason):
        capture(model)
