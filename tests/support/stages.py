"""Tiny models captured once a run, as they are before and after each pass, and their logits at any stage."""

from functools import cache
from typing import Any

import torch
from latent import LATENT, latent_model
from mixtures import ScatteredWeights, mixture_model
from models import LONGEST, SPELLINGS, VOCAB, tiny
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from zoo import build

import octavo
from octavo.compiler.capture import Captured, capture, reference_logits
from octavo.compiler.compiled import Compiled
from octavo.compiler.errors import OctavoError
from octavo.compiler.fresh_inputs import Chunk, is_cache, step_inputs
from octavo.compiler.pipeline import PIPELINE, Settings, Step, apply_step
from octavo.passes.rule import PassReport

torch.set_num_threads(1)  # for tensors this small, threads only wait for each other
SETTINGS = Settings(page_size=4, max_model_len=LONGEST)
FP32, BF16 = torch.float32, torch.bfloat16
LENGTHS = (7, 12)  # the length that models are captured with, and another
# Largest difference of two logits relative to the largest logit.
BOUND = {FP32: 1e-5, BF16: 4e-2}


def copied(graph_module: GraphModule) -> GraphModule:
    """A graph of its own over the same weights and shapes."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    result = GraphModule(graph_module, graph)
    result.meta = {}
    return result


def model_of(name: str, dtype: torch.dtype = FP32) -> nn.Module:
    """A fresh model of SPELLINGS, LATENT, "llama", or an architecture of the zoo."""
    if name in LATENT:
        return latent_model(name, dtype)
    if name == "mixture":
        return mixture_model(ScatteredWeights, dtype)
    return tiny(name, dtype) if name == "llama" or name in SPELLINGS else build(name).to(dtype).eval()


@cache
def _captured(name: str, dtype: torch.dtype) -> Captured:
    return capture(model_of(name, dtype))


def captured(name: str = "llama", dtype: torch.dtype = FP32) -> Captured:
    """The captured model `name`, to do with as one likes."""
    found = _captured(name, dtype)
    return Captured(copied(found.graph_module), dict(found.model_info), found.route, list(found.notes))


@cache
def _snapshots(name: str, dtype: torch.dtype) -> dict[str, GraphModule]:
    """The graph before each pass (its first run), and "" after all; short where a pass refuses the model."""
    graph_module = captured(name, dtype).graph_module
    found: dict[str, GraphModule] = {}
    try:
        for step in PIPELINE:
            found.setdefault(step.name, copied(graph_module))
            apply_step(step, graph_module, SETTINGS)
        found[""] = graph_module
    except OctavoError:
        pass
    return found


def before(pass_name: str, name: str = "llama", dtype: torch.dtype = FP32) -> GraphModule:
    """The model's graph as the pass finds it. "" gives the lowered graph."""
    return copied(_snapshots(name, dtype)[pass_name])


def step_of(pass_name: str) -> Step:
    return next(step for step in PIPELINE if step.name == pass_name)


def after(pass_name: str, name: str = "llama", dtype: torch.dtype = FP32) -> tuple[GraphModule, PassReport]:
    """The model's graph after the pass and its tidying, and what the pass reported."""
    graph_module = before(pass_name, name, dtype)
    return graph_module, apply_step(step_of(pass_name), graph_module, SETTINGS)[0]


def count(graph_module: GraphModule, *targets: Any) -> int:
    return sum(node.target in targets for node in graph_module.graph.nodes)


def calls(graph_module: GraphModule, target: Any) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.target is target]


def tokens(length: int) -> Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def logits(graph_module: GraphModule, input_ids: Tensor, caches: dict[str, Tensor] | None = None) -> Tensor:
    """(T, vocab) of one sequence, at any stage; over pages it comes in two steps, which leave them in `caches`."""
    names = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        if "page_table" not in names:
            (result,) = graph_module(input_ids, torch.arange(input_ids.shape[1])[None])
            return result[0]  # type: ignore[no-any-return]
        return torch.cat(_paged_logits(graph_module, names, input_ids, {} if caches is None else caches))


def _paged_logits(
    graph_module: GraphModule, names: list[str], input_ids: Tensor, caches: dict[str, Tensor]
) -> list[Tensor]:
    length, results = input_ids.shape[1], []
    for start, end in ((0, 4), (4, length)):
        chunk = Chunk(0, start, end - start)
        step = step_inputs([chunk], SETTINGS.page_size, 1, torch.Generator().manual_seed(0), length)
        for node in graph_module.graph.nodes:
            if node.op == "placeholder" and is_cache(node.name):
                shape, dtype = node.meta["val"].shape[1:], node.meta["val"].dtype
                # Codes have no nan: their scales have.
                poison = float("nan") if dtype.is_floating_point else 0xFF
                empty = torch.full((step.num_pages, *shape), poison, dtype=dtype)
                caches.setdefault(node.name, empty)
        given = {
            **step.tensors,
            "input_ids": input_ids[:, start:end],
            "logit_rows": torch.arange(end - start),
        }
        (result,) = graph_module(*({**given, **caches}[name] for name in names))
        results.append(result[0])
    return results


@cache
def compiled(name: str, dtype: torch.dtype = FP32) -> Compiled:
    """The model compiled for this machine; built once a run."""
    return octavo.compile(tiny(name, dtype), page_size=4, max_model_len=LONGEST)


def greedy(
    name: str, prompt: list[int], max_tokens: int, dtype: torch.dtype = FP32
) -> tuple[list[int], float]:
    """What the model itself generates, token by token, and the smallest gap between its two best logits."""
    model, ids, gap = tiny(name, dtype), list(prompt), float("inf")
    for _ in range(max_tokens):
        with torch.no_grad():
            last = reference_logits(model, torch.tensor([ids]))[0, -1].float()
        best = last.topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], gap


def assert_same_numbers(graph_module: GraphModule, name: str, dtype: torch.dtype = FP32) -> None:
    """The graph's logits are the original model's, for the captured length and for another."""
    model = model_of(name, dtype)
    for length in LENGTHS:
        with torch.no_grad():
            expected = reference_logits(model, tokens(length))[0].double()
        difference = (
            logits(graph_module, tokens(length)).double() - expected
        ).abs().max() / expected.abs().max()
        assert difference <= BOUND[dtype], f"{length} tokens: {float(difference):.1e}"


def assert_idempotent(pass_name: str, name: str = "llama") -> None:
    """A second run of the pass finds nothing and leaves every node alone."""
    graph_module, _ = after(pass_name, name)
    text = str(graph_module.graph)
    report = apply_step(step_of(pass_name), graph_module, SETTINGS)[0]
    assert (report.matched, report.changed) == (0, False)
    assert str(graph_module.graph) == text
