"""Child of device_check: decode tokens a second of a Llama of a billion parameters: ours, eager and torch.compile.

The model is that of examples/hand_written.py with other sizes and random weights, so it needs no library of models
and no download. Prints lines of JSON.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.compiler.api import compile
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

# Llama-3.2-1B's, but for the width of the MLP.
SIZES = {"VOCAB": 128_256, "WIDTH": 2048, "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 64, "LAYERS": 16}
SMALL = {"VOCAB": 512, "WIDTH": 128, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 32, "LAYERS": 2}
MAX_LEN, PROMPT, TOKENS = 512, 64, 128
TOLERANCE = 0.05  # of the largest logit: two ways through 16 layers in bf16
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "hand_written.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--small", action="store_true", help="a model that costs seconds")
    parser.add_argument("--output", type=Path, required=True, help="directory of the artifact")
    options = parser.parse_args()
    sizes = SMALL if options.small else SIZES
    model = build(sizes)
    began = time.perf_counter()
    compiled = compile(
        model, options.target, output=options.output, dtype="bf16", max_model_len=MAX_LEN, max_batch_tokens=1024,
        verify="off", progress=False,
    )  # fmt: skip
    say(
        compile_s=round(time.perf_counter() - began, 1), parameters=sum(p.numel() for p in model.parameters())
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    eager = Cached(model.to(device), sizes)
    for batch in options.batch:
        prompts = np.random.default_rng(batch).integers(1, sizes["VOCAB"], (batch, PROMPT)).tolist()
        say(batch=batch, **measure(compiled, eager, prompts))
    say(done=True)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def build(sizes: dict[str, int]) -> nn.Module:
    """The example's model at these sizes, in bf16."""
    specification = importlib.util.spec_from_file_location("hand_written", EXAMPLE)
    assert specification is not None and specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    sys.modules["hand_written"] = example  # torch.compile looks it up
    specification.loader.exec_module(example)
    vars(example).update(sizes)  # its classes read their sizes from there
    torch.manual_seed(0)
    model: nn.Module = example.Model().to(torch.bfloat16).eval()
    return model


def measure(compiled: Any, eager: "Cached", prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens a second of each way, and how far the logits of the first step are from eager's."""
    found: dict[str, Any] = {}
    recorder = Recorder(compiled.runner(max_requests=8))
    engine = Engine(recorder, compiled.artifact.model, max_requests=8)
    found["octavo"] = decode_rate(engine, prompts)
    found["octavo_no_graphs"] = decode_rate(
        Engine(compiled.runner(max_requests=8, graphs=False), compiled.artifact.model, max_requests=8),
        prompts,
    )
    tokens = torch.tensor(prompts, device=eager.device)
    expected = eager.prefill(tokens).float().cpu().numpy()
    found["error"] = float(np.abs(recorder.first - expected).max() / np.abs(expected).max())
    found["ok"] = found["error"] <= TOLERANCE
    found["eager"] = eager.decode_rate(tokens, eager.step)
    try:
        step = torch.compile(eager.step, mode="reduce-overhead", fullgraph=True)
        found["torch_compile"] = eager.decode_rate(tokens, step)
    except Exception as error:  # a figure to compare with, not what is checked
        found["torch_compile_note"] = f"{type(error).__name__}: {error}"[:300]
    return found


class Recorder:
    """A runner that keeps the logits of its first step that had some."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.num_pages, self.page_size = runner, runner.num_pages, runner.page_size
        self.num_host_pages, self.page_windows = runner.num_host_pages, runner.page_windows
        self.page_bytes, self.move_pages = runner.page_bytes, runner.move_pages
        self.first = np.zeros(0)

    @property
    def features(self) -> Any:
        return self.runner.features

    def run(self, batch: Any) -> Any:
        logits = self.runner.run(batch)
        if self.first.size == 0:
            self.first = logits.copy()
        return logits


def decode_rate(engine: Engine, prompts: list[list[int]]) -> float:
    """Tokens a second once every prompt has its first token; the first of two rounds warms up."""
    rate = 0.0
    for _ in range(2):
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        engine.step()
        began, count = time.perf_counter(), 0
        while engine.has_unfinished:
            count += len(engine.step())
        rate = count / (time.perf_counter() - began)
    return rate


class Cached:
    """The example's model with a KV cache of fixed size: what eager and torch.compile run, a token at a time."""

    def __init__(self, model: Any, sizes: dict[str, int]) -> None:
        self.model, self.sizes = model, sizes
        self.device = next(model.parameters()).device
        self.caches: list[Tensor] = []

    def prefill(self, tokens: Tensor) -> Tensor:
        """Logits (B, vocab) of the last tokens; fills the caches."""
        batch, length = tokens.shape
        heads, dim = self.sizes["KV_HEADS"], self.sizes["HEAD_DIM"]
        shape = (2, batch, heads, MAX_LEN, dim)
        if not self.caches or self.caches[0].shape != shape:
            self.caches = [
                torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in self.model.layers
            ]
            for cache in self.caches:  # else torch.compile makes no CUDA graphs of what writes to them
                torch._dynamo.mark_static_address(cache)
        with torch.no_grad():
            return self.step(tokens, torch.arange(length, device=self.device))

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (B, vocab) of the last of these tokens (B, n), which are at `positions` (n,) of every sequence."""
        sizes, model = self.sizes, self.model
        dim = sizes["HEAD_DIM"]
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=self.device).float() / dim)
        angles = (positions[:, None].float() * frequencies).repeat(1, 2)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        mask = torch.arange(MAX_LEN, device=self.device)[None, :] <= positions[:, None]
        x = model.embedding(tokens)
        for layer, cache in zip(model.layers, self.caches, strict=True):
            h = layer.norm_1(x)
            attention = layer.attention
            q, k, v = (
                linear(h).unflatten(-1, (-1, dim)).transpose(1, 2)
                for linear in (attention.q, attention.k, attention.v)
            )
            cache[0].index_copy_(2, positions, turned(k, cos, sin))
            cache[1].index_copy_(2, positions, v)
            mixed = F.scaled_dot_product_attention(
                turned(q, cos, sin), cache[0], cache[1], attn_mask=mask, enable_gqa=True
            )
            x = x + attention.out(mixed.transpose(1, 2).flatten(2))
            h = layer.norm_2(x)
            x = x + layer.down(F.silu(layer.gate(h)) * layer.up(h))
        logits: Tensor = model.head(model.norm(x[:, -1:]))[:, 0]
        return logits

    def decode_rate(self, tokens: Tensor, step: Any) -> float:
        """As the engine's, sampling included; the first of two rounds warms up."""
        rate = 0.0
        for _ in range(2):
            latest = self.prefill(tokens).argmax(-1, keepdim=True)
            self.synchronize()
            began = time.perf_counter()
            with torch.no_grad():
                for index in range(TOKENS - 1):
                    position = torch.full((1,), tokens.shape[1] + index, device=self.device)
                    latest = step(latest, position).argmax(-1, keepdim=True)
                    latest.cpu()  # a server hands every token on
            self.synchronize()
            rate = len(tokens) * (TOKENS - 1) / (time.perf_counter() - began)
        return rate

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


if __name__ == "__main__":
    main()
