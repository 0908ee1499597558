"""A language model written by hand, compiled and sampled: no library's classes, no configuration file.

    python examples/hand_written.py
    octavo compile examples/hand_written.py:build && octavo run hand_written-cpu.octavo "1 2 3"

The module takes token ids and positions (1, T) and returns logits (1, T, vocab). Its weights are random, so
its tokens mean nothing; what counts is that they are those of the module itself.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 64, 4, 2, 16, 2


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (1, heads, T, HEAD_DIM), turned by the angles of its positions."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm_1, self.norm_2 = Attention(), Norm(), Norm()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        h = self.norm_2(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angles = (positions[..., None].float() * frequencies).repeat(1, 1, 2)[:, None]
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos.to(x.dtype), sin.to(x.dtype))
        result: Tensor = self.head(self.norm(x))
        return result


def build() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def main() -> None:
    model = build()
    compiled = octavo.compile(model, max_model_len=128)
    print(compiled.report())

    prompts = [[1, 2, 3], [200, 100]]
    for prompt, completion in zip(
        prompts, compiled.generate(prompts, octavo.SamplingParams(max_tokens=8)), strict=True
    ):
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            expected = model(tokens, torch.arange(tokens.shape[1])[None]).argmax(-1)[0, len(prompt) - 1 : -1]
        assert expected.tolist() == list(completion.token_ids), "greedy tokens are the module's own"
        print(f"{prompt} -> {list(completion.token_ids)}")

    sampled = octavo.SamplingParams(max_tokens=8, temperature=1.0, top_k=20, seed=1)
    print("sampled, seed 1:", list(compiled.generate([1, 2, 3], sampled)[0].token_ids))


if __name__ == "__main__":
    main()
