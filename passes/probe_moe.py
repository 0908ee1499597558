"""What a region of a graph makes of stacked weights, found by running it: which mixture of experts it is, if any.

A region is not trusted to be what it looks like, and its spelling does not matter: it runs once in fp64 on random
rows, experts and weights, and the result is compared with octavo.moe for every way to read its weights: transposed or
not, gate before up or in turn, which bias is whose, activations and clamps. Called by fuse_moe, whose sites are proven
again.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler.ops.moe import gate
from octavo.compiler.pointwise import ACTIVATIONS
from octavo.compiler.reduced_sizes import reductions
from octavo.compiler.wide import Wide, widened
from octavo.passes.pattern import aten
from octavo.passes.rewrite import Site, extract, held

TOKENS = 5
# Rows from small to large, so that some are below and some beyond every clamp.
SCALES = torch.tensor([0.3, 1.0, 3.0, 12.0, 50.0], dtype=torch.float64)
BOUND = 1e-8
LARGEST_NUMBER = 1e4  # no clamp and no factor of a gate is larger
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default)


class Refused(Exception):
    """Why a region is not a mixture of experts that the op describes."""


@dataclass(frozen=True)
class Region:
    """The nodes from x, experts and weights to `root`.

    x        (T, H) or (1, T, H); root likewise
    experts  (T, K) or (1, T, K) int64: the indices of a top-k
    weights  one a slot (T, K), or where `of_all` one of each expert (T, E), zero for those not selected
    stacks   weights (E, ...) of all experts, and biases
    others   sizes, constants: whatever else the region reads
    """

    root: Node
    x: Node
    experts: Node
    weights: Node
    of_all: bool
    stacks: tuple[Node, ...]
    others: tuple[Node, ...]

    @property
    def leaves(self) -> list[Node]:
        return list(dict.fromkeys((self.x, self.experts, self.weights, *self.stacks, *self.others)))


@dataclass(frozen=True)
class Reading:
    """How the stacks of a region are the weights of octavo.moe.

    gate_up       one stack (gates and ups in it), or two: the gate's and the up's
    interleaved   of one: gates and ups in turn, otherwise halves
    up_first      of one: the ups lie before the gates
    transposed    of gate_up, of down: whether a stack is (E, inputs, outputs)
    """

    gate_up: tuple[Node, ...]
    down: Node
    transposed: tuple[bool, bool]
    interleaved: bool = False
    up_first: bool = False
    gate_up_bias: tuple[Node, ...] = ()
    down_bias: Node | None = None
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 1.0


def matrix_sizes(stack: Node) -> list[int]:
    """Sizes of one expert's part, without axes of size one."""
    return [int(d) for d in stack.meta["val"].shape[1:] if d != 1]


def read(graph_module: GraphModule, region: Region) -> Reading:
    """How `region` is a mixture of experts. Raises Refused."""
    count = region.stacks[0].meta["val"].shape[0]
    matrices = [s for s in region.stacks if len(matrix_sizes(s)) == 2]
    biases = [s for s in region.stacks if len(matrix_sizes(s)) == 1]
    if len(matrices) not in (2, 3):
        raise Refused(
            f"it reads {len(matrices)} stacks of matrices ({', '.join(str(m.target) for m in matrices)}), expected "
            "two (gates with ups, and downs) or three"
        )
    if any(s.meta["val"].shape[0] != count for s in region.stacks):
        raise Refused(
            f"its stacks have {[s.meta['val'].shape[0] for s in region.stacks]} experts, expected equally many"
        )
    probe = _run(graph_module, region)
    numbers = _numbers(region)
    for reading in _readings(region, matrices, biases):
        found = _gating(probe, region, reading, numbers)
        if found is not None:
            return found
    raise Refused(_why_not(probe, region, matrices, biases, numbers))


@dataclass(frozen=True)
class _Probe:
    """Values of a region's leaves by name, fp64, and its result (T, H)."""

    values: dict[str, Tensor]
    result: Tensor

    def rows(self, node: Node) -> Tensor:
        value = self.values[node.name]
        return value.reshape(-1, value.shape[-1])

    def matrix(self, stack: Node) -> Tensor:
        """(E, rows, columns) or (E, rows)."""
        value = self.values[stack.name]
        return value.reshape([d for i, d in enumerate(value.shape) if i == 0 or d != 1])


def _run(graph_module: GraphModule, region: Region) -> _Probe:
    """At smaller widths if it runs there."""
    leaves = region.leaves
    form = extract([region.root], leaves)
    fixed = {n.name: held(graph_module, str(n.target)) for n in region.others if n.op == "get_attr"}
    site = Site(
        region.root.name, "", form, form, tuple(n.meta["val"] for n in leaves), fixed, region.root.name
    )  # fmt: skip
    for narrow in itertools.islice(reductions(site), 1):
        with contextlib.suppress(Exception):  # whatever the reason, it runs at its own size then
            return _run_at(narrow, region)
    try:
        return _run_at(site, region)
    except Exception as error:
        what = f"{type(error).__name__}: {_first_line(error)}"
        raise Refused(f"it does not run on its own ({what})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _run_at(site: Site, region: Region) -> _Probe:
    names = [n.name for n in site.before.graph.nodes if n.op == "placeholder"]
    examples = dict(zip(names, site.examples, strict=True))
    generator = torch.Generator().manual_seed(0)
    values = {name: _value(name, examples[name], site, generator) for name in names}
    count = examples[region.stacks[0].name].shape[0]
    slots = values[region.experts.name].shape[-1]
    experts = torch.rand(TOKENS, count, generator=generator).argsort(-1)[:, :slots]
    values[region.experts.name] = experts.reshape(values[region.experts.name].shape)
    if region.of_all:
        chosen = torch.zeros(TOKENS, count, dtype=torch.float64)
        chosen.scatter_(1, experts, torch.rand(TOKENS, slots, generator=generator).double() + 0.5)
        values[region.weights.name] = chosen.reshape(values[region.weights.name].shape)
    else:
        values[region.weights.name] = values[region.weights.name].abs() + 0.5
    x = values[region.x.name]
    values[region.x.name] = x * SCALES[:, None]
    with torch.no_grad():
        (result,) = Wide(site.before).run(*(values[name].clone() if isinstance(values[name], Tensor) else values[name]
                                            for name in names))  # fmt: skip
    return _Probe(values, result.reshape(-1, result.shape[-1]))


def _value(name: str, example: object, site: Site, generator: torch.Generator) -> Tensor:
    if name in site.constants and not site.constants[name].is_meta:
        return widened(site.constants[name])  # type: ignore[no-any-return]
    if not isinstance(example, Tensor):
        return _size(example)  # type: ignore[return-value]
    shape = [_size(d) for d in example.shape]
    if not example.dtype.is_floating_point:
        return torch.zeros(shape, dtype=example.dtype)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    return value / max(value.shape[-1], 1) ** 0.5 if len(shape) > 2 else value


def _size(size: object) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr  # type: ignore[attr-defined]
    return int(expression.subs({symbol: TOKENS for symbol in expression.free_symbols}))


def _numbers(region: Region) -> tuple[list[float], list[float]]:
    """Numbers of the region's clamps, and all of them."""
    clamps, every = set[float](), set[float]()
    for node in _inner(region):
        found = {
            abs(float(v))
            for v in (*node.args, *node.kwargs.values())
            if isinstance(v, int | float) and not isinstance(v, bool) and 0 < abs(v) < LARGEST_NUMBER
        }
        every |= found
        if node.target in CLAMPS:
            clamps |= found
    return sorted(clamps), sorted(every)


def _inner(region: Region) -> list[Node]:
    leaves, found, pending = set(region.leaves), dict.fromkeys([region.root]), [region.root]
    while pending:
        fresh = [n for n in pending.pop().all_input_nodes if n not in leaves and n not in found]
        found.update(dict.fromkeys(fresh))
        pending += fresh
    return list(found)


def _readings(region: Region, matrices: Sequence[Node], biases: Sequence[Node]) -> Iterator[Reading]:
    """Every assignment of stacks to roles that their sizes allow; activations are still open."""
    hidden, out = (int(n.meta["val"].shape[-1]) for n in (region.x, region.root))
    for order in itertools.permutations(matrices):
        *first, down = order
        for flip_first, flip_down in itertools.product((False, True), repeat=2):
            rows = [matrix_sizes(m)[:: -1 if flip_first else 1] for m in first]
            last = matrix_sizes(down)[:: -1 if flip_down else 1]
            width = last[1]
            expected = [2 * width, hidden] if len(first) == 1 else [width, hidden]
            if last[0] != out or any(r != expected for r in rows):
                continue
            plain = Reading(tuple(first), down, (flip_first, flip_down))
            layouts = itertools.product((False, True), repeat=2) if len(first) == 1 else [(False, False)]
            for interleaved, up_first in layouts:
                shaped = replace(plain, interleaved=interleaved, up_first=up_first)
                yield from _with_biases(shaped, biases, expected[0], out)


def _with_biases(reading: Reading, biases: Sequence[Node], rows: int, out: int) -> Iterator[Reading]:
    """Each bias has a role; roles without one have none."""
    roles = [*(rows for _ in reading.gate_up), out]
    padded: list[Node | None] = [*biases, *(None for _ in range(len(roles) - len(biases)))]
    seen = set()
    for order in itertools.permutations(padded):
        fits = all(b is None or matrix_sizes(b) == [n] for b, n in zip(order, roles, strict=False))
        first = order[: len(reading.gate_up)]
        all_or_none = all(b is None for b in first) or all(b is not None for b in first)
        if len(order) == len(roles) and fits and all_or_none and order not in seen:
            seen.add(order)
            given = tuple(b for b in first if b is not None)
            yield replace(reading, gate_up_bias=given, down_bias=order[-1])


def _gating(
    probe: _Probe, region: Region, reading: Reading, numbers: tuple[list[float], list[float]],
    on_inputs: bool = False,
) -> Reading | None:  # fmt: skip
    """The reading with the activation and limits that give the region's result, or None."""
    projected = _projected(probe, region, reading, on_inputs)
    clamps, every = numbers
    activations = [*((name, 1.0) for name in ACTIVATIONS), *(("swiglu_oai", n) for n in every)]
    for limit, (activation, alpha) in itertools.product((0.0, *clamps), activations):
        found = replace(reading, activation=activation, limit=limit, alpha=alpha)
        if _agrees(probe, region, found, projected, on_inputs):
            return found
    return None


def _slots(probe: _Probe, region: Region) -> tuple[Tensor, Tensor]:
    """experts and weights (T, K)."""
    experts, weights = probe.rows(region.experts), probe.rows(region.weights)
    return experts, weights.gather(1, experts) if region.of_all else weights


def _projected(probe: _Probe, region: Region, reading: Reading, on_inputs: bool) -> Tensor:
    """Gates and ups of every slot (T, K, 2, width)."""
    x = probe.rows(region.x)
    experts, weights = _slots(probe, region)
    parts = [_outputs(probe.matrix(g), reading.transposed[0]) for g in reading.gate_up]
    biases = [probe.matrix(b) for b in reading.gate_up_bias]
    rows = []
    for token, slot in itertools.product(range(len(x)), range(experts.shape[1])):
        e = int(experts[token, slot])
        given = x[token] * weights[token, slot] if on_inputs else x[token]
        made = [part[e] @ given for part in parts]
        if biases:
            made = [one + bias[e] for one, bias in zip(made, biases, strict=True)]
        rows.append(torch.cat(made))
    joined = torch.stack(rows).unflatten(0, tuple(experts.shape))
    both: Tensor = (
        joined.unflatten(-1, (-1, 2)).transpose(-1, -2)
        if reading.interleaved
        else joined.unflatten(-1, (2, -1))
    )
    return both.flip(-2) if reading.up_first else both


def _outputs(stack: Tensor, transposed: bool) -> Tensor:
    return stack.transpose(1, 2) if transposed else stack


def _agrees(probe: _Probe, region: Region, reading: Reading, projected: Tensor, on_inputs: bool) -> bool:
    hidden = gate(projected.flatten(-2), reading.activation, reading.limit, reading.alpha)
    experts, weights = _slots(probe, region)
    down = _outputs(probe.matrix(reading.down), reading.transposed[1])
    bias = None if reading.down_bias is None else probe.matrix(reading.down_bias)
    total = torch.zeros_like(probe.result)
    for token, slot in itertools.product(range(len(experts)), range(experts.shape[1])):
        e = int(experts[token, slot])
        made = down[e] @ hidden[token, slot]
        if bias is not None:
            made = made + bias[e]
        total[token] += made if on_inputs else made * weights[token, slot]
        if slot == experts.shape[1] - 1 and not _close(probe.result[token], total[token]):
            return False
    return True


def _close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() <= BOUND * expected.abs().max().clamp_min(1e-30))


def _why_not(
    probe: _Probe, region: Region, matrices: Sequence[Node], biases: Sequence[Node],
    numbers: tuple[list[float], list[float]],
) -> str:  # fmt: skip
    readings = list(_readings(region, matrices, biases))
    sizes = {str(m.target): matrix_sizes(m) for m in matrices}
    hidden, out = (int(n.meta["val"].shape[-1]) for n in (region.x, region.root))
    if not readings:
        return (
            f"its stacks {sizes} with {len(biases)} biases are no gate, up and down of {hidden} inputs and {out} "
            "outputs"
        )
    if any(_gating(probe, region, reading, numbers, on_inputs=True) for reading in readings):
        return "its weights multiply what goes into the experts, expected what comes out of them"
    known = ", ".join((*ACTIVATIONS, "swiglu_oai"))
    return (
        f"what it makes of {sizes} is no weighted sum over the selected experts with a gate of {known}, clamped or "
        "not"
    )
