"""Prove sites that quantise: each weight and input within the rounding of its format, each product that of what codes
stand for.

A form with codes does not compute what the plain form did, so the proof has two halves. Elements: every code must be
the one that its format's rules give for the plain value (compiler/quantized_values.py). Products: what the new form
returns must be the plain product of the values that the codes stand for, in fp64, within the roundings of an fp32 sum
in any order. Weights are the real ones; a site of pages writes and reads fresh keys and values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler.errors import PassError
from octavo.compiler.fresh_inputs import fresh_inputs, is_cache
from octavo.compiler.legality import named_arguments
from octavo.compiler.precision import QuantizedWeight
from octavo.compiler.quantized_forms import (
    EXTRA_ROUNDINGS,
    LIMITS,
    ROWS,
    UNIT,
    Recorder,
    checked,
    fresh_rows,
    product_by_rows,
    quantized_weight,
    within,
)
from octavo.compiler.quantized_values import Deviation, blocks, check_fp8, check_nvfp4, fp8_values
from octavo.compiler.verify import Evidence, one_thread
from octavo.compiler.verify_experts import EXPERTS, prove_experts
from octavo.passes.pattern import arguments
from octavo.passes.rewrite import Site
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
PRODUCTS = (octavo.nvfp4_linear.default, octavo.nvfp4_weight_linear.default, octavo.fp8_linear.default)
PAGED = (octavo.paged_attention.default, octavo.paged_mla_attention.default)


def prove_quantized(
    report: PassReport, site: Site, weights: Sequence[QuantizedWeight], context: str = ""
) -> None:
    """Prove one site whose weights were just quantised, and count it in the report. Raises PassError naming it."""
    try:
        with torch.no_grad():
            evidence = _prove(site, weights)
    except Deviation as failure:
        what = str(failure)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        what = f"it does not run ({type(error).__name__}: {first_line})"
    else:
        proof = report.proof
        proof.sites += 1
        if evidence.error * proof.bound >= proof.worst * evidence.bound:
            proof.worst, proof.bound = evidence.error, evidence.bound
        return
    raise PassError(
        f"{report.name}: the rewrite of {site.where} is not what its formats allow: {what}{context}"
    )


def _prove(site: Site, weights: Sequence[QuantizedWeight]) -> Evidence:
    calls = [n for n in site.after.graph.nodes if n.op == "call_function"]
    if any(n.target in PAGED for n in calls):
        with one_thread():
            return _prove_pages(site)
    (call,) = [n for n in calls if n.target in PRODUCTS or n.target in EXPERTS]
    if call.target in EXPERTS:
        return prove_experts(site, call, weights)
    return _prove_product(site, call, weights[0])


def _prove_product(site: Site, call: Node, weight: QuantizedWeight) -> Evidence:
    (plain,) = [n for n in site.before.graph.nodes if n.op == "call_function"]
    x_node, weight_node, *rest = arguments(plain)
    names = [n.name for n in site.before.graph.nodes if n.op == "placeholder"]
    example = site.examples[names.index(x_node.name)]
    quantizer = _producer(site.after)
    outer = None if quantizer is None else _constant(site, quantizer.args[1])
    x = fresh_rows(example, outer, "" if quantizer is None else str(quantizer.args[2]))
    bias = _constant(site, rest[0]) if rest else None
    values = {**site.constants, x_node.name: x}
    recorder = Recorder(site.after)
    (result,) = recorder.run(*(values[name] for name in names))
    given = recorder.given(call)
    left = x.reshape(ROWS, -1).double()
    if quantizer is not None:
        left = _quantized_input(left, given, outer)
    own = given["alpha"].double() / (1.0 if outer is None else float(outer))
    parts = (given["weight"], given.get("weight_scale"), str(given.get("layout")))
    right = quantized_weight(site.constants[weight_node.name], *parts, own, weight.rule, weight.seen)
    expected, room = product_by_rows(left, right, len(given["weight"]), bias)
    return within(expected, result.reshape(ROWS, -1), room)


def _producer(form: GraphModule) -> Node | None:
    found = form.graph.find_nodes(op="call_function", target=octavo.quantize.default)
    return found[0] if found else None


def _constant(site: Site, node: Any) -> Tensor | None:
    return site.constants[node.name] if isinstance(node, Node) else None


def _quantized_input(x: Tensor, given: Mapping[str, Any], outer: Tensor | None) -> Tensor:
    """What the codes of x stand for, once they are those of x."""
    is_fp8 = "x_scale" not in given
    own = given["row_scale"]
    if outer is None:
        if own is None:
            raise Deviation("rows with outer scales of their own are multiplied without them")
        _check_outer(x, own.double().reshape(-1, 1), LIMITS["fp8" if is_fp8 else "nvfp4"])
    scale = (own if outer is None else outer).double().reshape(-1, 1)
    codes = given["x"].reshape(len(x), -1)
    if is_fp8:
        checked("x", check_fp8, x, codes, scale, True)
        return fp8_values(codes) * scale
    quantized = checked("x", blocks, codes, given["x_scale"], given["layout"], scale)
    checked("x", check_nvfp4, x, quantized, "nearest")
    return quantized.decoded()


def _check_outer(x: Tensor, own: Tensor, limit: float) -> None:
    largest = x.abs().amax(-1, keepdim=True)
    wanted = torch.where(largest == 0, torch.ones_like(largest), largest / limit)
    if not bool(((own - wanted).abs() <= wanted * 4 * UNIT).all()):
        raise Deviation("the outer scales of x's rows are not those that carry their largest elements")


@dataclass(frozen=True)
class _Paged:
    """The write and the read of a form, what it was given, and all that its nodes gave."""

    recorder: Recorder
    write: Node
    attention: Node

    @classmethod
    def run(cls, form: GraphModule, inputs: Sequence[Any]) -> "_Paged":
        recorder = Recorder(form)
        recorder.run(*(v.clone() if isinstance(v, Tensor) else v for v in inputs))
        calls = [n for n in form.graph.nodes if n.op == "call_function"]
        (attention,) = [n for n in calls if n.target in PAGED]
        (write,) = [n for n in calls if "write" in str(n.target)]
        return cls(recorder, write, attention)


def _prove_pages(site: Site) -> Evidence:
    """Pages hold what the format makes of keys and values, and attention is that over what they stand for."""
    names = [n.name for n in site.after.graph.nodes if n.op == "placeholder"]
    inputs = dict(zip(names, fresh_inputs(site.after, site.examples, 11, 0, site.constants), strict=True))
    for name, example in zip(names, site.examples, strict=True):
        if is_cache(name):
            inputs[name] = torch.zeros(inputs[name].shape, dtype=example.dtype)
    multiplier = _multiplier(site.after)
    written = _Paged.run(site.before, [*inputs.values()])
    plain = _caches(written)
    limit = LIMITS["nvfp4" if any("scales" in n for n in names) else "fp8"]
    # Half of the largest key or value, so that saturation is proven too.
    inputs[multiplier] = torch.stack([value.float().abs().amax() for value in plain]) / limit / 2
    after = _Paged.run(site.after, [*inputs.values()])
    pages = _decoded_pages(after, plain, inputs[multiplier])
    return _prove_attention(after, pages)


def _multiplier(form: GraphModule) -> str:
    """The name of the input that holds the multipliers."""
    (write,) = [n for n in form.graph.nodes if n.op == "call_function" and "write" in str(n.target)]
    found = [
        v.name
        for name, v in named_arguments(write).items()
        if name.startswith("multiplier") and isinstance(v, Node)
    ]
    if not found:
        raise Deviation("pages are written without multipliers")
    return found[0]


def _caches(run: _Paged) -> list[Tensor]:
    given = run.recorder.given(run.write)
    return [given[name] for name in ("k_cache", "v_cache", "cache") if name in given]


def _decoded_pages(after: _Paged, plain: Sequence[Tensor], multipliers: Tensor) -> list[Tensor]:
    """fp64 pages, once every row is what the format makes of the plain one."""
    given = after.recorder.given(after.write)
    pages = []
    for index, (cache, wanted) in enumerate(zip(_caches(after), plain, strict=True)):
        outer, what = multipliers[index].double().reshape(1, 1), ("keys", "values")[index]
        rows, codes = wanted.reshape(-1, wanted.shape[-1]), cache.reshape(-1, cache.shape[-1])
        if cache.dtype is torch.uint8:
            scales = given[("k_scales", "v_scales")[index]]
            quantized = blocks(codes, scales.contiguous(), "linear", outer)
            checked(what, check_nvfp4, rows, quantized, "nearest")
            pages.append(quantized.decoded().reshape(wanted.shape))
        else:
            checked(what, check_fp8, rows, codes, outer, True)
            pages.append((fp8_values(codes) * outer).reshape(wanted.shape))
    return pages


def _prove_attention(after: _Paged, pages: Sequence[Tensor]) -> Evidence:
    """Against the same attention in fp64 over pages of fp64: sums over the context, and of exponentials."""
    given = after.recorder.given(after.attention)
    names = [name for name in ("k_cache", "v_cache", "cache") if name in given]
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    wide |= dict(zip(names, pages, strict=True))
    wide |= {name: None for name in given if "scales" in name or name.startswith("multiplier")}
    target: Any = after.attention.target
    expected = target(*(wide[p.name] for p in target._schema.arguments))
    got = after.recorder.env[after.attention]
    longest, widest = int(given["seq_lens"].max()), max(page.shape[-1] for page in pages)
    # Scores are off by a sum over the head, exponentials by as much of their largest score, results by a sum over keys.
    keys = float(pages[0].abs().max() * max(v.abs().max() for v in _queries(given)))
    depth = longest + widest + EXTRA_ROUNDINGS
    spread = 1.0 + 2.0 * keys * widest * float(given["scale"])
    largest = float(pages[-1].abs().max())
    room = largest * (depth * UNIT * spread + 2 * torch.finfo(got.dtype).eps)
    return within(expected, got, torch.full_like(expected, room))


def _queries(given: Mapping[str, Any]) -> list[Tensor]:
    return [given[name].double() for name in ("q", "q_latent", "q_rope") if name in given]
