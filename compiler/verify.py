"""Prove rewrite sites: both forms are executed on fresh inputs, in fp64 and in the model's own dtype.

In fp64 the two forms must agree to the rounding of fp64: they are the same function. In the model's dtype
the new form must stay within the bound of its arithmetic around the fp64 result. Sites of equal structure
are proven once.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from octavo.compiler.errors import PassError
from octavo.compiler.fresh_inputs import (
    Chunk,
    fresh_inputs,
    is_cache,
    page_size_of,
    random_floats,
    step_inputs,
)
from octavo.compiler.reduced_sizes import reductions
from octavo.compiler.wide import Wide, widened
from octavo.passes.rewrite import Site
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
PAGED = (
    (octavo.attention.default, octavo.paged_attention.default),
    (octavo.latent_attention.default, octavo.paged_mla_attention.default),
)
TOKENS = (5, 11)  # sizes of the symbolic axis; neither is the one that models are captured with
CODES = (torch.uint8, torch.float8_e4m3fn)
SAFETY = 16.0  # the arithmetic's worst case is a bound for one order of summation, not for all


@dataclass(frozen=True)
class Evidence:
    """The largest error of a site relative to the largest reference value, and its bound."""

    error: float
    bound: float


class _Unproven(Exception):
    """Carries the sentence that says what differs."""


def prove_report(report: PassReport, proven: dict[str, Evidence], context: str = "") -> None:
    """Prove every distinct site of a pass and fill in its proof. Raises PassError naming both."""
    fresh: dict[str, Site] = {}
    for site in report.sites:
        # That a rewrite keeps every bit is not shown by a proof that did not ask for it.
        fresh.setdefault(f"{site.key} {report.exactness}", site)
    with one_thread():
        for key, site in fresh.items():
            if key not in proven:
                proven[key] = _prove(site, report, context)
    evidence = [proven[key] for key in fresh]
    report.proof.sites = len(evidence)
    worst = max(evidence, key=lambda e: e.error / e.bound if e.bound else e.error, default=Evidence(0.0, 0.0))
    report.proof.worst, report.proof.bound = worst.error, worst.bound


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For tensors this small threads only wait for each other: with two, a proof took seven times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _prove(site: Site, report: PassReport, context: str) -> Evidence:
    try:
        return prove(site, bitwise=report.exactness == "bitwise")
    except _Unproven as failure:
        what = str(failure)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        what = f"it does not run ({type(error).__name__}: {first_line})"
    raise PassError(
        f"{report.name}: the rewrite of {site.where} is not equal to what it replaced: {what}{context}"
    )


def prove(site: Site, bitwise: bool = False) -> Evidence:
    """Evidence that both forms of a site are equal. Raises when they are not."""
    if _inserts_pages(site):
        return _prove_paging(site)
    if site.table is not None:
        return _prove_table(site, site.constants[site.table])
    for narrow in reductions(site):
        try:
            return _prove_values(narrow, bitwise)
        except Exception:  # whatever the reason, the site is judged at its own size
            continue
    return _prove_values(site, bitwise)


def _prove_values(site: Site, bitwise: bool) -> Evidence:
    if bitwise and _gives_codes(site):
        return _prove_codes(site)
    evidence = []
    for seed, tokens in enumerate(TOKENS):
        inputs = fresh_inputs(site.after, site.examples, tokens, seed, site.constants)
        reference = _run_wide(site.before, [widened(v) for v in inputs])
        if any(bool(r.isnan().any()) for r in reference):
            # A root or a logarithm of what was never negative where it came from.
            inputs = [_positive(v, site) for v in inputs]
            reference = _run_wide(site.before, [widened(v) for v in inputs])
        after = _run_wide(site.after, [widened(v) for v in inputs])
        _compare(
            reference, after, _depth(site) * torch.finfo(torch.float64).eps * SAFETY, f"fp64, {tokens} tokens"
        )
        narrow = _run(site.after, inputs)
        evidence.append(_compare(reference, narrow, rounding_bound(site), f"model dtype, {tokens} tokens"))
        if bitwise:
            _compare_bitwise(_run(site.before, inputs), narrow)
    return max(evidence, key=lambda e: e.error)


def _gives_codes(site: Site) -> bool:
    (results,) = site.after.graph.output_node().args
    return any(node.meta["val"].dtype in CODES for node in results)  # type: ignore[union-attr]


def _prove_codes(site: Site) -> Evidence:
    """Bit for bit in the model's dtype alone: a code says which interval a value lies in, and fp64 moves the value."""
    for seed, tokens in enumerate(TOKENS):
        inputs = fresh_inputs(site.after, site.examples, tokens, seed, site.constants)
        _compare_bitwise(_run(site.before, inputs), _run(site.after, inputs))
    return Evidence(0.0, 0.0)


def _positive(value: Any, site: Site) -> Any:
    """The magnitudes of fresh values; weights that are part of the proof stay."""
    is_fresh = all(value is not constant for constant in site.constants.values())
    floats = isinstance(value, Tensor) and value.dtype.is_floating_point
    return value.abs() if floats and is_fresh else value


def _prove_table(site: Site, table: Tensor) -> Evidence:
    """Every row, in shuffled order, bit for bit: the table was rounded, so fp64 says nothing."""
    rows = len(table) if table.dim() else 1
    positions = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[None]
    names = [n.name for n in site.before.graph.nodes if n.op == "placeholder"]
    inputs = [site.constants.get(name, positions) for name in names]
    if any(value.is_meta for value in inputs):
        return _prove_shapes(site, [value.to("meta") for value in inputs])
    _compare_bitwise(_run(site.before, inputs), _run(site.after, inputs))
    return Evidence(0.0, 0.0)


def _prove_shapes(site: Site, inputs: list[Tensor]) -> Evidence:
    """Weights without values have no more than this to compare."""
    before, after = ([(r.shape, r.dtype) for r in _run(form, inputs)] for form in (site.before, site.after))
    if before != after:
        raise _Unproven(f"shapes and dtypes {after}, expected {before}")
    return Evidence(0.0, 0.0)


def _inserts_pages(site: Site) -> bool:
    before = {n.target for n in site.before.graph.nodes}
    after = {n.target for n in site.after.graph.nodes}
    return any(captured in before and paged in after for captured, paged in PAGED)


def _prove_paging(site: Site) -> Evidence:
    """Three sequences in shuffled pages, written in two steps, against each sequence on its own."""
    generator = torch.Generator().manual_seed(0)
    names = [n.name for n in site.after.graph.nodes if n.op == "placeholder"]
    lengths, cuts = (6, 9, 2), (4, 3, 1)
    page_size = page_size_of(site.after)
    evidence = []
    for wide in (True, False):
        run = _run_wide if wide else _run
        sequences = [_sequence(names, site.examples, n, generator, wide) for n in lengths]
        # What has no token axis, sinks for one, is the same for all sequences.
        shared = {name: value for name, value in sequences[0].items() if value.dim() < 3}
        sequences = [{**s, **shared} for s in sequences]
        expected = [_run_wide(site.before, [widened(v) for v in s.values()])[0] for s in sequences]
        caches: dict[str, Tensor] = {}
        outputs: list[list[Tensor]] = [[] for _ in lengths]
        for is_last in (False, True):
            spans = [(c, n - c) if is_last else (0, c) for n, c in zip(lengths, cuts, strict=True)]
            chunks = [Chunk(i, start, length) for i, (start, length) in enumerate(spans)]
            step = step_inputs(chunks, page_size, len(lengths), torch.Generator().manual_seed(1))
            if not caches:
                caches = _poisoned_caches(names, site.examples, step.num_pages, wide)
            inputs = _step_values(names, sequences, chunks, step.tensors, caches)
            result = run(site.after, inputs, keep_inputs=True)[0]
            for i, part in enumerate(result.split([c.length for c in chunks], dim=1)):
                outputs[i].append(part)
        bound = _depth(site) * torch.finfo(torch.float64).eps * SAFETY if wide else rounding_bound(site)
        joined = [torch.cat(parts, dim=1) for parts in outputs]
        evidence.append(_compare(expected, joined, bound, "fp64, paged" if wide else "model dtype, paged"))
    return evidence[-1]


def _sequence(
    names: list[str], examples: tuple[Any, ...], length: int, generator: torch.Generator, wide: bool
) -> dict[str, Any]:
    """Values of the captured form's inputs for one sequence."""
    values: dict[str, Any] = {}
    for name, example in zip(names, examples, strict=True):
        shape = [d if isinstance(d, int) else length for d in example.shape]
        value = (
            random_floats(shape, example.dtype, generator)
            if example.dtype.is_floating_point
            else torch.zeros(1)
        )
        values[name] = widened(value) if wide else value
    return values


def _poisoned_caches(
    names: list[str], examples: tuple[Any, ...], num_pages: int, wide: bool
) -> dict[str, Tensor]:
    """Rows that are read before they are written show as NaN in the result."""
    dtype = torch.float64 if wide else None
    return {
        name: torch.full((num_pages, *example.shape[1:]), float("nan"), dtype=dtype or example.dtype)
        for name, example in zip(names, examples, strict=True)
        if is_cache(name)
    }


def _step_values(
    names: list[str], sequences: list[dict[str, Any]], chunks: list[Chunk], step: dict[str, Tensor],
    caches: dict[str, Tensor],
) -> list[Any]:  # fmt: skip
    values: list[Any] = []
    for name in names:
        if name in caches or name in step:
            values.append(caches[name] if name in caches else step[name])
        elif sequences[0][name].dim() >= 3:
            values.append(
                torch.cat([sequences[c.request][name][:, c.start : c.start + c.length] for c in chunks], 1)
            )
        else:
            values.append(sequences[0][name])
    return values


def rounding_bound(site: Site) -> float:
    """Roundings to the model's dtype in both forms, and fp32 sums of the longest reduction, relative."""
    dtypes = [n.meta["val"].dtype for n in _calls(site) if isinstance(n.meta.get("val"), Tensor)]
    narrow = [torch.finfo(d).eps for d in dtypes if d.is_floating_point]
    sums = _depth(site) * torch.finfo(torch.float32).eps
    return SAFETY * sums + 2.0 * sum(eps for eps in narrow if eps > torch.finfo(torch.float32).eps)


def _calls(site: Site) -> list[Node]:
    return [n for g in (site.before, site.after) for n in g.graph.nodes if n.op == "call_function"]


def _depth(site: Site) -> int:
    """Length of the longest sum, plus one operation for each node."""
    widths = [
        int(d) for v in site.examples if isinstance(v, Tensor) for d in v.shape[-1:] if isinstance(d, int)
    ]
    return max([*widths, max(TOKENS)]) + len(_calls(site))


def _run(graph_module: GraphModule, inputs: Sequence[Any], keep_inputs: bool = False) -> list[Tensor]:
    return _execute(Interpreter(graph_module), inputs, keep_inputs)


def _run_wide(graph_module: GraphModule, inputs: Sequence[Any], keep_inputs: bool = False) -> list[Tensor]:
    return _execute(Wide(graph_module), inputs, keep_inputs)


def _execute(interpreter: Interpreter, inputs: Sequence[Any], keep_inputs: bool) -> list[Tensor]:
    """Results, and the inputs that were written to. Inputs are copied unless the caller wants the writes."""
    own = list(inputs) if keep_inputs else [v.clone() if isinstance(v, Tensor) else v for v in inputs]
    names = [n.name for n in interpreter.module.graph.nodes if n.op == "placeholder"]  # type: ignore[union-attr]
    with torch.no_grad():
        results = interpreter.run(*own)
    written = [v for name, v in zip(names, own, strict=True) if is_cache(name)]
    return [r for r in results if isinstance(r, Tensor)] + written


def _compare(reference: Sequence[Tensor], results: Sequence[Tensor], bound: float, setting: str) -> Evidence:
    if len(reference) != len(results):
        raise _Unproven(f"{len(results)} results, expected {len(reference)} ({setting})")
    worst = 0.0
    for expected, got in zip(reference, results, strict=True):
        if expected.shape != got.shape:
            raise _Unproven(f"shape {tuple(got.shape)}, expected {tuple(expected.shape)} ({setting})")
        if not expected.dtype.is_floating_point:
            if not torch.equal(expected, got):
                raise _Unproven(f"integer results differ ({setting})")
            continue
        if expected.numel() == 0:
            continue
        scale = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        difference = (got.double() - expected.double()).abs().max() / scale
        if not bool(difference <= bound):
            raise _Unproven(f"relative error {float(difference):.2e}, bound {bound:.2e} ({setting})")
        worst = max(worst, float(difference))
    return Evidence(worst, bound)


def _compare_bitwise(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    for expected, got in zip(before, after, strict=True):
        if expected.dtype != got.dtype or not torch.equal(_comparable(expected), _comparable(got)):
            raise _Unproven("the pass claims to keep every bit, and values or dtypes differ")


def _comparable(value: Tensor) -> Tensor:
    """E4M3 as its bits: torch compares none."""
    return value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
