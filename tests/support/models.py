"""Tiny causal language models with random weights: the spellings that real models use, each in a page."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, INTERMEDIATE, LAYERS = 96, 64, 96, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LONGEST = 48  # tokens that the models with a registered mask or learned positions can see
WINDOW = 5
SCALE = HEAD_DIM**-0.5


def llama(**changes: Any) -> Any:
    """A Llama of Hugging Face. `changes` go to its configuration."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": LONGEST,
    }  # fmt: skip
    names = {"eos_token_id": None, "bos_token_id": 1, "name_or_path": "tiny-llama"}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **names, **changes}))
    with_margin(model)
    return model


def with_margin(model: nn.Module) -> nn.Module:
    """Weights that make every part count, and logits far enough apart for greedy decoding to be stable."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            scale = 1.0 if "embed" in name or "head" in name else 1.5 / parameter.shape[-1] ** 0.5
            nn.init.normal_(parameter, std=scale)
        else:
            nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.5)
    return model.eval()


class RMSNorm(nn.Module):
    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


class GatedMLP(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=bias)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=bias)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return hidden


def angles(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (..., T, HEAD_DIM) of positions (..., T)."""
    inverse = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=positions.device).float() / HEAD_DIM)
    half = positions[..., None].float() * inverse
    both = torch.cat((half, half), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Projections(nn.Module):
    """q (1, HEADS, T, HEAD_DIM) and k, v (1, KV_HEADS, T, HEAD_DIM), q and k rotated."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=bias)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=bias)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=bias)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=bias)

    def split(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            linear(x).view(*x.shape[:2], heads, HEAD_DIM).transpose(1, 2)
            for linear, heads in ((self.q, HEADS), (self.k, KV_HEADS), (self.v, KV_HEADS))
        )
        cos, sin = angles(positions, x.dtype)
        q, k = (t * cos[:, None] + rotate_half(t) * sin[:, None] for t in (q, k))
        return q, k, v

    def join(self, heads: Tensor) -> Tensor:
        merged = heads.transpose(1, 2).reshape(*heads.shape[:1], heads.shape[2], HEADS * HEAD_DIM)
        result: Tensor = self.out(merged)
        return result


class SdpaAttention(Projections):
    """scaled_dot_product_attention with is_causal and enable_gqa."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.split(x, positions)
        return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


class BidirectionalAttention(Projections):
    """Every token sees every other: cannot be paged."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.split(x, positions)
        return self.join(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


class SoftmaxAttention(Projections):
    """Products and a softmax, heads repeated, an additive triangle; positions counted inside."""

    def mask(self, positions: Tensor) -> Tensor:
        length = positions.shape[-1]
        return torch.full((length, length), float("-inf"), device=positions.device).triu(1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        q, k, v = self.split(x, positions)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        scores = q @ k.transpose(2, 3) * SCALE + self.mask(positions)
        return self.join(scores.float().softmax(-1).to(v.dtype) @ v)


class WindowAttention(SoftmaxAttention):
    """A query sees WINDOW keys, itself included."""

    def mask(self, positions: Tensor) -> Tensor:
        distance = positions[0][:, None] - positions[0][None]
        hidden = (distance < 0) | (distance >= WINDOW)
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))


class AlibiAttention(SoftmaxAttention):
    """Every head has a slope, by which it looks less at keys that are further away (Press et al. 2022)."""

    def mask(self, positions: Tensor) -> Tensor:
        distance = (positions[0][:, None] - positions[0][None]).float()
        slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=positions.device).float()
        return super().mask(positions) - slopes[:, None, None] * distance


class PrefixAttention(SoftmaxAttention):
    """The first three tokens see each other: cannot be paged."""

    def mask(self, positions: Tensor) -> Tensor:
        row = positions[0]
        hidden = (row[None] > row[:, None]) & (row[None] >= 3)
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))


class EinsumAttention(Projections):
    """einsum for both products, masked_fill for the mask, every head its own keys."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, HEAD_DIM)) for p in (self.q, self.k, self.v))
        cos, sin = angles(positions, x.dtype)
        q, k = (t * cos[:, :, None] + rotate_half(t) * sin[:, :, None] for t in (q, k))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_DIM**0.5
        later = positions[0][None] > positions[0][:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        merged = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
        result: Tensor = self.out(merged)
        return result


class FusedAttention(nn.Module):
    """One projection cut in three, and a registered triangle that bounds the length. No rotation."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST).tril().bool())

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = (q * SCALE) @ k.transpose(-1, -2)
        scores = torch.where(self.mask[:length, :length], scores, torch.finfo(x.dtype).min)
        merged = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        result: Tensor = self.out(merged)
        return result


class NoAttention(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * 0.5


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.attention, self.mlp = attention, GatedMLP(bias)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), positions)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


@dataclass(frozen=True)
class Spelling:
    """How a hand-written model differs from the others. learned: position rows are added to the embedding."""

    attention: type[nn.Module]
    tied: bool = False
    learned: bool = False
    bias: bool = False


class TinyLM(nn.Module):
    """input_ids (1, T) and positions (1, T) to logits (1, T, VOCAB)."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.embed_positions = nn.Embedding(LONGEST, HIDDEN) if spelling.learned else None
        kind = spelling.attention
        biased = {"bias": True} if spelling.bias else {}
        self.layers = nn.ModuleList(Layer(kind(**biased), spelling.bias) for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=spelling.bias)
        if spelling.tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits


class WithoutPositions(nn.Module):
    """A model that takes token ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens, torch.arange(tokens.shape[1], device=tokens.device)[None])
        return logits


SPELLINGS = {
    "sdpa": Spelling(SdpaAttention, tied=True),
    "softmax": Spelling(SoftmaxAttention),
    "fused": Spelling(FusedAttention, learned=True),
    "einsum": Spelling(EinsumAttention, tied=True),
    "window": Spelling(WindowAttention),
    "prefix": Spelling(PrefixAttention),
    "alibi": Spelling(AlibiAttention),
    "bidirectional": Spelling(BidirectionalAttention),
    "none": Spelling(NoAttention),
    "biased": Spelling(SdpaAttention, bias=True),
}
COMPILABLE = ("llama", "sdpa", "softmax", "fused", "einsum", "window")


def tiny(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A fresh model of SPELLINGS, or "llama". Equal names give equal weights."""
    torch.manual_seed(0)
    model: nn.Module = llama() if name == "llama" else with_margin(TinyLM(SPELLINGS[name]))
    if name in ("softmax", "window", "prefix", "alibi"):
        model = WithoutPositions(model)
    return model.to(dtype).eval()
