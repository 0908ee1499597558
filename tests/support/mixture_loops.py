"""Loops over experts as people and libraries write them: each expert's tokens are looked up, or all are weighted."""

from collections.abc import Callable
from typing import Any, cast

import torch
from mixtures import EXPERTS, INNER, TOP, WIDTH, Gathered, Pair, Routed, Stacked
from torch import Tensor, nn
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, width: int = WIDTH, inner: int = INNER, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return hidden


class Apart(Routed):
    """A module for each expert, and a loop over them."""

    def __init__(self, experts: int = EXPERTS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__(experts, width)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(experts))

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError


class MixtralLoop(Apart):
    """The expert mask of one-hot rows, (E, K, T), and index_add_."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in range(len(self.experts)):
            expert = self.experts[number]
            slot, token = torch.where(mask[number])
            rows = x[None, token].reshape(-1, x.shape[-1])
            made = expert(rows) * weights[token, slot, None]
            result.index_add_(0, token, made.to(x.dtype))
        return result


class HitLoop(MixtralLoop):
    """Only experts that some token chose."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        experts: Any = self.experts
        for number in hit:
            slot, token = torch.where(mask[number].squeeze(0))
            made = experts[number](x[token]) * weights[token, slot, None]
            result.index_add_(0, token, made.to(x.dtype))
        return result


class DeepSeekLoop(Apart):
    """Comparisons, counts, `continue`, and sums into indexed rows."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            result[token] += expert(x[token]) * weights[token, slot, None]
        return result


class NonzeroLoop(Apart):
    """Weights of one expert of all tokens, tokens by nonzero."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shares = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter_(1, chosen, weights)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token = (chosen == number).any(dim=-1).nonzero().squeeze(-1)
            if token.shape[0] > 0:
                made = expert(x[token]) * shares[token, number].unsqueeze(-1)
                result = result.index_add(0, token, made)
        return result


class MaskLoop(Apart):
    """Boolean masks as an index; the experts see (1, T, WIDTH)."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        shares = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(dim=-1)
            if mask.any():
                made = expert(x[mask]) * shares[mask, number].unsqueeze(1)
                result[mask] += made
        return result


class RepeatedLoop(Apart):
    """Every slot a row: tokens repeated, rows overwritten, and summed by slot."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows, flat = x.repeat_interleave(TOP, dim=0), chosen.view(-1)
        made = torch.empty_like(rows)
        for number, expert in enumerate(self.experts):
            made[flat == number] = expert(rows[flat == number])
        return (made.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class DenseLoop(Apart):
    """Every expert of every token, weighted."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shares = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter(1, chosen, weights)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            result = result + expert(x) * shares[:, number, None]
        return result


class StackOfOutputs(Apart):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        made = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (made.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1])) * weights[..., None]).sum(1)


class StackedLoop(Stacked):
    """Stacked weights, functional experts."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number in range(self.experts):
            token, slot = torch.where(chosen == number)
            hidden = self.gate(F.linear(x[token], self.gate_up[number]))
            result.index_add_(0, token, F.linear(hidden, self.down[number]) * weights[token, slot, None])
        return result


class GptOssLoop(Gathered):
    """Weights as (inputs, outputs), biases, clamps in place of a name, and `@`."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number in range(self.experts):
            token, slot = torch.where(chosen == number)
            both = x[token] @ self.gate_up[number].T + self.gate_up_bias[number]
            made = self.gate(both) @ self.down[number].T + self.down_bias[number]
            result.index_add_(0, token, made * weights[token, slot, None])
        return result


class LitLoop(Apart):
    """One mask an expert, of a comparison with all numbers at once."""

    def route(self, x: Tensor) -> Pair:
        values, chosen = torch.topk(self.router(x), TOP)
        return values.softmax(dim=1, dtype=torch.float).to(x.dtype), chosen

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        masks = chosen.unsqueeze(-1) == torch.arange(len(self.experts), device=x.device)
        result = torch.zeros_like(x)
        for mask, expert in zip(masks.permute(2, 0, 1), self.experts, strict=True):
            token, slot = torch.where(mask)
            result[token] += weights[token, slot, None] * expert(x[token])
        return result


class BackwardsLoop(Apart):
    """The last expert first; weights by a product with the mask."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number in reversed(range(len(self.experts))):
            mask = chosen == number
            if not mask.any():
                continue
            token = mask.any(-1)
            shares = (weights * mask).sum(-1, keepdim=True)
            result[token] = result[token] + self.experts[number](x[token]) * shares[token]
        return result


class JoinedOutputs(Apart):
    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shares = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter_(1, chosen, weights)
        made = torch.cat([expert(x).unsqueeze(1) for expert in self.experts], dim=1)
        return torch.einsum("te,teh->th", shares, made)


class SumOfAll(Routed):
    """sum() of a generator, experts by name."""

    def __init__(self) -> None:
        super().__init__(EXPERTS, WIDTH)
        self.by_name = nn.ModuleDict({f"expert_{i}": Expert() for i in range(EXPERTS)})

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shares = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter_(1, chosen, weights)
        parts = (shares[:, i : i + 1] * self.by_name[f"expert_{i}"](x) for i in range(EXPERTS))
        return cast(Tensor, sum(parts))


class QwenLoop(MixtralLoop):
    """A shared expert of another width behind a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_expert = Expert(inner=2 * INNER)
        self.shared_expert_gate = nn.Linear(WIDTH, 1, bias=False)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shared: Tensor = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return super().mix(x, weights, chosen) + shared


class DeepSeekV3(nn.Module):
    """Sigmoid scores, a bias in fp32 that selects, groups by their two best, counts of tokens, a shared expert."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, WIDTH))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.shared_experts = Expert()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DeepSeekV3":
        result: DeepSeekV3 = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.e_score_correction_bias = self.e_score_correction_bias.float()
        return result

    def route(self, x: Tensor) -> Pair:
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        groups = (scores + self.e_score_correction_bias).view(x.size(0), 4, -1)
        best = groups.topk(2, dim=-1)[0].sum(dim=-1).topk(2, dim=-1)[1]
        mask = scores.new_ones(x.size(0), 4, dtype=torch.bool).scatter_(1, best, False)
        chosen = torch.topk(groups.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(1), TOP, dim=-1)[1]
        weights = scores.gather(1, chosen)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights *= 2.5
        return weights.type_as(x), chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        weights, chosen = self.route(rows)
        result = torch.zeros_like(rows)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        for number in range(len(self.experts)):
            if counts[number] == 0:
                continue
            token, slot = torch.where(chosen == number)
            result[token] += self.experts[number](rows[token]) * weights[token, slot, None]
        whole: Tensor = result + self.shared_experts(rows)
        return whole.view(x.shape)


LOOPS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": MixtralLoop, "hit": HitLoop, "deepseek": DeepSeekLoop, "nonzero": NonzeroLoop, "mask": MaskLoop,
    "repeated": RepeatedLoop, "dense": DenseLoop, "stack of outputs": StackOfOutputs, "stacked": StackedLoop,
    "gpt-oss": GptOssLoop, "lit": LitLoop, "backwards": BackwardsLoop, "joined outputs": JoinedOutputs,
    "sum of all": SumOfAll, "qwen": QwenLoop, "deepseek-v3": DeepSeekV3,
}  # fmt: skip
