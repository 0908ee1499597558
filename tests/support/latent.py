"""Hand-written latent attention, in the spelling of DeepSeek's own code, and what differs from it by one thing."""

import torch
from models import HEAD_DIM, HEADS, HIDDEN, RMSNorm, Spelling, TinyLM, angles, rotate_half, with_margin
from torch import Tensor, nn

NOPE, ROPE, VALUE, RANK = 12, HEAD_DIM, 10, 24


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (1, heads, T, ROPE) with the elements of a pair next to each other; tables of halves."""
    sizes = x.shape
    x = x.view(*sizes[:3], ROPE // 2, 2).transpose(4, 3).reshape(sizes)
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


def rotate_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (1, heads, T, ROPE), each pair a complex number."""
    table = torch.complex(cos[..., : ROPE // 2].float(), sin[..., : ROPE // 2].float())
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:3], -1, 2)) * table[:, None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class LatentAttention(nn.Module):
    """Products and a softmax; keys and values made of one latent, written into fresh memory."""

    bias = False

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_down = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.kv_norm = RMSNorm(RANK)
        self.kv_up = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=self.bias)
        self.out = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)

    def expand(self, latent: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys without their rotated part and values, (1, heads, T, NOPE or VALUE)."""
        both = self.kv_up(latent).view(*latent.shape[:2], HEADS, NOPE + VALUE).transpose(1, 2)
        return torch.split(both, [NOPE, VALUE], dim=-1)  # type: ignore[return-value]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate_pairs(x, *angles(positions, x.dtype))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        length = x.shape[1]
        q = self.q(x).view(1, length, HEADS, NOPE + ROPE).transpose(1, 2)
        q_nope, q_rope = torch.split(q, [NOPE, ROPE], dim=-1)
        latent, k_rope = torch.split(self.kv_down(x), [RANK, ROPE], dim=-1)
        k_rope = self.rotate(k_rope.view(1, length, 1, ROPE).transpose(1, 2), positions)
        k_nope, v = self.expand(self.kv_norm(latent), x)
        query, key = (q.new_empty(1, HEADS, length, NOPE + ROPE) for _ in range(2))
        query[..., :NOPE], query[..., NOPE:] = q_nope, self.rotate(q_rope, positions)
        key[..., :NOPE], key[..., NOPE:] = k_nope, k_rope
        scores = query @ key.transpose(2, 3) * (NOPE + ROPE) ** -0.5
        hidden = torch.full((length, length), float("-inf")).triu(1)
        weights = (scores + hidden).softmax(-1, dtype=torch.float32).to(v.dtype)
        merged = (weights @ v).transpose(1, 2).reshape(1, length, HEADS * VALUE)
        result: Tensor = self.out(merged)
        return result


class ComplexLatentAttention(LatentAttention):
    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate_complex(x, *angles(positions, x.dtype))


class BiasedLatentAttention(LatentAttention):
    bias = True


class TwoLatents(LatentAttention):
    """Values of another latent than the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.v_down = nn.Linear(HIDDEN, RANK, bias=False)
        self.v_up = nn.Linear(RANK, HEADS * VALUE, bias=False)

    def expand(self, latent: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        k_nope, _ = super().expand(latent, x)
        return k_nope, self.v_up(self.v_down(x)).view(1, -1, HEADS, VALUE).transpose(1, 2)


class NormedKeys(LatentAttention):
    """A norm of each head's key, which no product can take up."""

    def __init__(self) -> None:
        super().__init__()
        self.k_norm = RMSNorm(NOPE)

    def expand(self, latent: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        k_nope, v = super().expand(latent, x)
        return self.k_norm(k_nope), v


LATENT: dict[str, type[nn.Module]] = {
    "latent": LatentAttention,
    "latent_complex": ComplexLatentAttention,
    "latent_biased": BiasedLatentAttention,
    "latent_two": TwoLatents,
    "latent_normed": NormedKeys,
}


def latent_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model of LATENT. Equal names give equal weights."""
    torch.manual_seed(0)
    return with_margin(TinyLM(Spelling(LATENT[name]))).to(dtype).eval()
