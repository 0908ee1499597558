"""Mixtures of experts as people write them: a small module for each spelling, and a language model around any."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from models import LAYERS, RMSNorm, SdpaAttention, with_margin
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, EXPERTS, INNER, TOP, VOCAB = 64, 6, 40, 2, 128
Pair = tuple[Tensor, Tensor]


class Routed(nn.Module):
    """A router and rows (T, WIDTH) in and out. Subclasses say how they multiply."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)

    def route(self, x: Tensor) -> Pair:
        """weights and experts (T, TOP)."""
        weights, chosen = torch.topk(self.router(x).softmax(-1, dtype=torch.float32), TOP, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), chosen

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return self.mix(rows, *self.route(rows)).view(x.shape)


class Stacked(Routed):
    """Experts' weights in stacks, gates before ups."""

    def __init__(self, experts: int = EXPERTS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__(experts, width)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))
        self.experts = experts

    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up


class OneHotEinsum(Stacked):
    """Every expert of every token; one-hot rows pick."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shares = torch.einsum("tk,tke->te", weights, F.one_hot(chosen, self.experts).to(x.dtype))
        hidden = self.gate(torch.einsum("td,efd->tef", x, self.gate_up))
        return torch.einsum("tef,edf,te->td", hidden, self.down, shares)


class ScatteredWeights(Stacked):
    """Weights scattered over all experts, one product each for gates, ups and downs, as (inputs, outputs)."""

    def __init__(self, experts: int = EXPERTS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__(experts, width, inner)
        del self.gate_up, self.down
        self.w1, self.w3 = (nn.Parameter(torch.empty(experts, width, inner)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(experts, inner, width))

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shares = torch.zeros(x.shape[0], self.experts, dtype=weights.dtype).scatter_(1, chosen, weights)
        gates, ups = (torch.einsum("td,edf->etf", x, w) for w in (self.w1, self.w3))
        made = torch.bmm(F.gelu(gates, approximate="tanh") * ups, self.w2)
        return (made * shares.t()[:, :, None]).sum(0)


class RepeatedTokens(Stacked):
    """Tokens repeated for every expert, two batched products, the scores of experts masked and divided."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        kept = scores * torch.zeros_like(scores).scatter(-1, scores.topk(TOP)[1], 1.0)
        shares = kept / kept.sum(-1, keepdim=True)
        rows = x.repeat(self.experts, 1).view(self.experts, -1, x.shape[-1])
        hidden = self.gate(torch.bmm(rows, self.gate_up.transpose(1, 2)))
        made = torch.bmm(hidden, self.down.transpose(1, 2))
        return torch.einsum("etd,te->td", made, shares)


class Gathered(Stacked):
    """Weights of each slot gathered; biases, and gates and ups in turn, clamped as gpt-oss does."""

    def __init__(self, experts: int = EXPERTS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__(experts, width, inner)
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * inner))
        self.down_bias = nn.Parameter(torch.empty(experts, width))

    def route(self, x: Tensor) -> Pair:
        values, chosen = torch.topk(self.router(x), TOP, dim=-1, sorted=True)
        return values.softmax(1), chosen

    def gate(self, both: Tensor) -> Tensor:
        gate, up = both[..., ::2], both[..., 1::2]
        gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
        return gate * torch.sigmoid(gate * 1.702) * (up + 1)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        both = torch.einsum("beck,bk->bec", self.gate_up[chosen], x) + self.gate_up_bias[chosen]
        made = torch.einsum("beck,bek->bec", self.down[chosen], self.gate(both)) + self.down_bias[chosen]
        return torch.einsum("bec,be->bc", made, weights)


class GroupedProducts(Stacked):
    """Slots sorted by expert, two grouped products, and what they make put back where it came from."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        flat = chosen.reshape(-1)
        order = flat.argsort()
        ends = F.one_hot(flat, self.experts).sum(0).cumsum(0).to(torch.int32)
        token = order // TOP
        hidden = self.gate(F.grouped_mm(x[token], self.gate_up.transpose(1, 2), offs=ends))
        made = F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
        made = made * weights.reshape(-1)[order][:, None]
        return torch.zeros_like(x).index_add_(0, token, made.to(x.dtype))


class SharedExpert(OneHotEinsum):
    """One expert that all tokens pass, behind a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_gate_proj, self.shared_up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.shared_down = nn.Linear(INNER, WIDTH, bias=False)
        self.shared_gate = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared_down(F.silu(self.shared_gate_proj(x)) * self.shared_up(x))
        result: Tensor = super().forward(x) + torch.sigmoid(self.shared_gate(x)) * shared
        return result


EXPORTABLE: dict[str, Callable[[], nn.Module]] = {
    "one-hot einsum": OneHotEinsum, "scattered weights": ScatteredWeights, "repeated tokens": RepeatedTokens,
    "gathered": Gathered, "grouped products": GroupedProducts, "shared expert": SharedExpert,
}  # fmt: skip


class _Layer(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.attention, self.mlp = SdpaAttention(), mixture

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), positions)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class MixtureLM(nn.Module):
    """input_ids and positions (1, T) to logits (1, T, VOCAB)."""

    def __init__(self, mixture: Callable[[], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(_Layer(mixture()) for _ in range(layers))
        self.norm = RMSNorm()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        logits: Tensor = F.linear(self.norm(x), self.embed.weight)
        return logits


def mixture_model(
    mixture: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **changes: Any
) -> MixtureLM:
    torch.manual_seed(0)
    model = with_margin(MixtureLM(mixture, **changes))
    assert isinstance(model, MixtureLM)
    return copy.deepcopy(model).to(dtype).eval()
