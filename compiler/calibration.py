"""What the products of a lowered graph read when it runs over calibration tokens, and what goes into its pages.

The whole graph runs in steps of several sequences, each over pages of its own, as a server would run it. A value is
looked at where it is made, once for all products that read it. Equal graphs and tokens give equal numbers.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from octavo.compiler.dims import cache_number, caches_of
from octavo.compiler.errors import OptionError
from octavo.compiler.fresh_inputs import StepInputs, empty_pages, whole_sequences
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS
from octavo.compiler.observed import Observed, ObservedInput, ObservedPages
from octavo.compiler.ops.moe import gate
from octavo.compiler.pipeline import Progress
from octavo.compiler.replay import linear
from octavo.passes.balance_channels import Balance

octavo = torch.ops.octavo
LINEAR, MOE = octavo.linear.default, octavo.moe.default
WRITES = (octavo.kv_write.default, octavo.rope_kv_write.default, octavo.latent_write.default)

SEQUENCE_TOKENS = 512
# Sequences share a step up to here: products of this many rows use the cores well, and activations stay small.
STEP_TOKENS = 2048
HELD_OUT_PART = 10  # one token of so many
# Block magnitudes are counted by their sign-free upper bits: 32 bins for each power of two.
_BIN_SHIFT = 18
_BINS = 1 << (31 - _BIN_SHIFT)
QUANTILES = (0.01, 0.5, 0.99)


def calibrate(
    graph_module: GraphModule, sequences: Sequence[Sequence[int]], page_size: int, moments: bool = False,
    progress: Progress | None = None, balance: Balance | None = None,
) -> Observed:  # fmt: skip
    """Run a lowered graph over token sequences (each starts at position 0) and say what was seen.

    moments  keep the (K, K) second moments of every product's input too
    balance  inputs are looked at as they will be once their channels are balanced
    The last tenth of the tokens is held out: it counts in held_out_amax and in the pages only.
    Raises OptionError without tokens, and where a value is not finite, naming the product.
    """
    tokens = sum(map(len, sequences))
    if not tokens:
        raise OptionError("calibration: expected tokens, got none")
    observer = _Observer(graph_module, tokens - tokens // HELD_OUT_PART, moments, balance or Balance())
    steps = list(_steps(sequences))
    with torch.no_grad():
        for index, step in enumerate(steps):
            observer.run_step(step, page_size, _Share(progress, index, len(steps)))
    return observer.result(tokens, digest_of(sequences))


def digest_of(sequences: Sequence[Sequence[int]]) -> str:
    """sha256 of the lengths and the ids."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(np.array([len(sequence), *sequence], dtype="<i8").tobytes())
    return digest.hexdigest()


def _steps(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Sequences in order, as many as fit a step; a longer one has a step of its own."""
    step: list[Sequence[int]] = []
    for sequence in sequences:
        if step and sum(map(len, step)) + len(sequence) > STEP_TOKENS:
            yield step
            step = []
        if sequence:
            step.append(sequence)
    if step:
        yield step


class _Share:
    """The progress of one step of several."""

    def __init__(self, progress: Progress | None, index: int, steps: int) -> None:
        self.progress, self.index, self.steps = progress, index, steps

    def __call__(self, name: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(name, self.index * total + done, self.steps * total)


class _Statistics:
    """Of a value (rows, K), over all steps, times `scale` (K,)."""

    def __init__(self, name: str, moments: bool, scale: Tensor | None = None) -> None:
        self.name, self.wants_moments, self.scale = name, moments, scale
        self.rows, self.amax, self.held_out_amax = 0, 0.0, 0.0
        self.blocks = torch.zeros(_BINS, dtype=torch.int64)
        self.squares: Tensor | None = None
        self.moments: Tensor | None = None

    def add(self, kept: Tensor, held_out: Tensor) -> None:
        if self.scale is not None:
            kept, held_out = kept * self.scale.to(kept.dtype), held_out * self.scale.to(kept.dtype)
        self.held_out_amax = max(self.held_out_amax, self._largest(held_out.abs()))
        if not kept.shape[0]:
            return
        wide = kept.float()
        magnitudes = wide.abs()
        if magnitudes.shape[1] % BLOCK_ELEMENTS:
            magnitudes = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[1] % BLOCK_ELEMENTS))
        amax = magnitudes.unflatten(-1, (-1, BLOCK_ELEMENTS)).amax(-1)
        self.amax = max(self.amax, self._largest(amax))
        self.rows += wide.shape[0]
        self.blocks += torch.bincount(amax.flatten().view(torch.int32) >> _BIN_SHIFT, minlength=_BINS)
        squares = wide.square().sum(0, dtype=torch.float64)
        self.squares = squares if self.squares is None else self.squares + squares
        if self.wants_moments:
            if self.moments is None:
                self.moments = wide.new_zeros(wide.shape[1], wide.shape[1])
            self.moments.addmm_(wide.T, wide)

    def _largest(self, magnitudes: Tensor) -> float:
        largest = float(magnitudes.amax()) if magnitudes.numel() else 0.0
        if not largest < float("inf"):
            raise OptionError(
                f"calibration: the input of {self.name} is not finite on these tokens; the model overflows there, "
                "so compile it in fp32 or bf16, or mend the checkpoint"
            )
        return largest

    def result(self) -> ObservedInput | None:
        """None where no row came: experts that no token went to."""
        if self.squares is None:
            return None
        second = (self.squares / self.rows).float()
        moments = None if self.moments is None else self.moments / self.rows
        return ObservedInput(self.rows, self.amax, self._quantiles(), second, moments, self.held_out_amax)

    def _quantiles(self) -> tuple[float, float, float]:
        """Upper ends of the bins in which the quantiles lie, so to 3 %."""
        below = self.blocks.cumsum(0)
        wanted = torch.tensor([q * float(below[-1]) for q in QUANTILES], dtype=torch.float64)
        bins = torch.searchsorted(below.double(), wanted)
        ends = ((bins + 1).to(torch.int32) << _BIN_SHIFT).view(torch.float32)
        first, middle, last = (float(end) for end in torch.where(bins == 0, torch.zeros_like(ends), ends))
        return first, middle, last


class _Observer(Interpreter):
    """Runs the part of a graph that leads to products and pages, and keeps statistics of what they take."""

    def __init__(self, graph_module: GraphModule, kept: int, moments: bool, balance: Balance) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False  # it adds lines to the messages of errors
        self.kept, self.moments, self.balance = kept, moments, balance
        self.products: dict[str, _Statistics] = {}
        self.readers: dict[Node, list[_Statistics]] = {}
        self.pages: dict[int, ObservedPages] = {}
        self.start = 0  # tokens of the steps before
        self.step = StepInputs({}, 0)
        self.progress = _Share(None, 0, 1)
        self._find_products(graph_module)
        writes = [n for n in graph_module.graph.nodes if n.target in WRITES]
        experts = graph_module.graph.find_nodes(op="call_function", target=MOE)
        self.needed = _ancestors([*self.readers, *writes, *experts])
        self.order = {node: index for index, node in enumerate(self.readers)}

    def _find_products(self, graph_module: GraphModule) -> None:
        inputs: dict[str, list[Node]] = {}
        for node in graph_module.graph.nodes:
            if node.target is LINEAR and node.args[1].op == "get_attr":
                inputs.setdefault(node.args[1].target, []).append(node.args[0])
            elif node.target is MOE and node.args[3].op == "get_attr":
                inputs.setdefault(node.args[3].target, []).append(node.args[0])
                self.products.setdefault(node.args[5].target, _Statistics(node.args[5].target, self.moments))
        # Weights that read the same values share their statistics.
        known: dict[tuple[Node, ...], _Statistics] = {}
        for name, values in inputs.items():
            key = tuple(dict.fromkeys(values))
            if key not in known:
                known[key] = _Statistics(name, self.moments, self.balance.inputs.get(name))
                for value in key:
                    self.readers.setdefault(value, []).append(known[key])
            self.products[name] = known[key]

    def run_step(self, sequences: list[Sequence[int]], page_size: int, progress: _Share) -> None:
        self.step = whole_sequences(sequences, page_size)
        self.progress = progress
        self.run()
        self.start += sum(map(len, sequences))

    def run_node(self, n: Node) -> Any:
        if n not in self.needed:
            return None
        if n.op == "placeholder":
            return self.step.tensors.get(n.name)  # None for a cache, which is made when it is written
        self._make_caches(n)
        if n.target is MOE:
            self._look_at_experts(n)
        value = super().run_node(n)
        if n.target in WRITES:
            self._look_at_pages(n)
        if n in self.readers:
            self.progress(self.readers[n][0].name, self.order[n], len(self.order))
            rows = value.flatten(0, -2)
            cut = min(max(self.kept - self.start, 0), rows.shape[0])
            for statistics in self.readers[n]:
                statistics.add(rows[:cut], rows[cut:])
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_bf16 = target is LINEAR and args[0].dtype is torch.bfloat16
        return linear(*args) if is_bf16 else super().call_function(target, args, kwargs)

    def _make_caches(self, node: Node) -> None:
        for cache in caches_of(node):
            if self.env[cache] is None:
                self.env[cache] = empty_pages(cache, self.step.num_pages)

    def _look_at_pages(self, node: Node) -> None:
        """Pages were empty before, so what they hold now is what was written."""
        caches = caches_of(node)
        largest = {n.name[0]: float(self.env[n].abs().amax()) for n in caches}
        seen = self.pages.setdefault(cache_number(caches[0]), ObservedPages(0.0, 0.0))
        seen.k_amax = max(seen.k_amax, largest.get("k", 0.0))
        seen.v_amax = max(seen.v_amax, largest.get("v", 0.0))

    def _look_at_experts(self, node: Node) -> None:
        """What the experts' activations make, all experts together; rows of held-out tokens apart."""
        values: tuple[Any, ...] = self.fetch_args_kwargs_from_env(node)[0]
        x, experts, _, gate_up, bias, _, _, activation, limit, alpha = values
        statistics = self.products[str(node.args[5].target)]  # type: ignore[union-attr]
        rows, slots = x.reshape(-1, x.shape[-1]), experts.reshape(-1, experts.shape[-1])
        for e in slots.unique().tolist():
            chosen = torch.where(slots == e)[0]
            projected = rows[chosen].float() @ gate_up[e].float().T
            projected = projected if bias is None else projected + bias[e].float()
            hidden = gate(projected, activation, limit, alpha).to(x.dtype)
            is_kept = chosen + self.start < self.kept
            statistics.add(hidden[is_kept], hidden[~is_kept])

    def result(self, tokens: int, digest: str) -> Observed:
        results = {id(statistics): statistics.result() for statistics in self.products.values()}
        found = {name: results[id(statistics)] for name, statistics in self.products.items()}
        products = {name: seen for name, seen in found.items() if seen is not None}
        return Observed(products, dict(sorted(self.pages.items())), tokens, digest)


def _ancestors(ends: Sequence[Node]) -> set[Node]:
    """The nodes that lead to these, and these."""
    found: set[Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found
