"""What each op makes of where its arguments lie, along one axis at a time.

A rule returns where the op needs every argument, and where its results then lie. Where an argument lies otherwise, a
collective brings it there; where none can, the graph is refused. So a sum of what every rank has whole with what is
still partial is never made: it would count the whole once a rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from octavo.compiler.legality import named_arguments, op
from octavo.compiler.placement import Where

Places = Mapping[str, Where]  # of the arguments that are values, by the schema's names
Results = Where | tuple[Where, ...]
EXPERT_OPS = frozenset("octavo::" + name for name in ("moe", "nvfp4_moe", "nvfp4_weight_moe", "fp8_moe"))
# Arguments of those ops that have an axis of experts.
EXPERT_WEIGHTS = (
    "gate_up", "gate_up_scale", "gate_up_alpha", "gate_up_bias", "hidden_outer", "down", "down_scale", "down_alpha",
    "down_bias",
)  # fmt: skip
WIDTH = 2  # the dimension of channels of token values (1, T, channels), and of heads in (1, T, heads, D)


@dataclass(frozen=True)
class Outcome:
    """needs: where each argument must lie; gives: where the result lies, or each of the results."""

    needs: Places
    gives: Results


def outcome(node: Node, at: Places) -> Outcome:
    """The rule of the node's op. at: where its arguments lie along the axis."""
    rule = RULES.get(op(node), _whole)
    return rule(node, at)


def _whole(node: Node, at: Places) -> Outcome:
    """The default: everything is needed whole."""
    return Outcome(dict.fromkeys(at), _same(node, None))


def _same(node: Node, where: Where) -> Results:
    value = node.meta.get("val")
    return (where,) * len(value) if isinstance(value, tuple | list) else where


def _linear(node: Node, at: Places) -> Outcome:
    """x @ w.T: rows of the weight make channels of the result; columns take channels of x and leave a sum."""
    rest: dict[str, Where] = {name: where for name, where in at.items() if name not in ("x", "weight")}
    if at["weight"] == 1:
        # A bias counts once: partial, as only the first rank has it.
        return Outcome({**rest, "x": _last(node, "x"), "weight": 1, "bias": "partial"}, "partial")
    where = _last(node, "x") if at["weight"] == 0 else None
    bias = 0 if at["weight"] == 0 else None
    return Outcome({**rest, "x": None, "weight": at["weight"], "bias": bias}, where)


def _last(node: Node, name: str) -> int:
    return len(named_arguments(node)[name].meta["val"].shape) - 1


def _quantized_linear(node: Node, at: Places) -> Outcome:
    """Rows may be cut; the columns of codes and scales are not, so that blocks and outer scales stay whole."""
    if at.get("weight") != 0:
        return _whole(node, at)
    rows: dict[str, Where] = {
        name: at[name] for name in ("weight", "weight_scale", "alpha", "weight_alpha", "bias") if name in at
    }
    return Outcome({**dict.fromkeys(at), **rows}, _last(node, "x"))


def _along_heads(node: Node, at: Places) -> Outcome:
    """Per-head work on (1, T, heads, D), all heads alike."""
    sharded = at.get("x", at.get("q")) == WIDTH and _last(node, "x") > WIDTH
    return Outcome({**dict.fromkeys(at), "x": WIDTH if sharded else None}, WIDTH if sharded else None)


def _attention(node: Node, at: Places) -> Outcome:
    """Queries by heads, pages by heads of keys and values."""
    if at["k_cache"] != 1:
        return _whole(node, at)
    heads = {name: 1 for name in ("k_cache", "v_cache", "k_scales", "v_scales") if name in at}
    heads |= {name: 0 for name in ("sinks", "slopes") if name in at}
    return Outcome({**dict.fromkeys(at), **heads, "q": WIDTH}, WIDTH)


def _latent_attention(node: Node, at: Places) -> Outcome:
    """Queries by heads; the pages hold what all heads share."""
    where = WIDTH if at["q_latent"] == WIDTH else None
    return Outcome({**dict.fromkeys(at), "q_latent": where, "q_rope": where}, where)


def _head_linear(node: Node, at: Places) -> Outcome:
    """A product of each head's own, (heads, ...) of weights."""
    where = WIDTH if at["weight"] == 0 else None
    return Outcome({"x": where, "weight": at["weight"]}, where)


def _writes_pages(node: Node, at: Places) -> Outcome:
    if at["k_cache"] != 1:
        return _whole(node, at)
    heads = {name: 1 for name in ("k_cache", "v_cache", "k_scales", "v_scales") if name in at}
    heads |= {name: WIDTH for name in ("qkv", "k", "v") if name in at}
    return Outcome({**dict.fromkeys(at), **heads}, WIDTH)


def _elementwise(node: Node, at: Places) -> Outcome:
    """Channels stay where they are if all operands of full width agree."""
    full = max(_last(node, name) for name in at)
    wide = [at[n] for n in at if _last(node, n) == full and _shape(node, n)[-1] != 1]
    if set(wide) == {full}:
        narrow = {n: None for n in at if _shape(node, n)[-1] == 1}
        return Outcome({**dict.fromkeys(at, full), **narrow}, full)
    return _whole(node, at)


def _shape(node: Node, name: str) -> Any:
    return named_arguments(node)[name].meta["val"].shape


def _add(node: Node, at: Places) -> Outcome:
    """Sums of sums are sums; otherwise both are needed whole, or both in parts."""
    if set(at.values()) == {"partial"}:
        return Outcome(at, "partial")
    return _elementwise(node, at)


def _reshape(node: Node, at: Places) -> Outcome:
    """Channels into heads and back; the leading 1 may come and go."""
    where = next(iter(at.values()))
    if where == "partial":
        return Outcome(at, "partial")
    source, made = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    if isinstance(where, int) and where >= len(source) - 2:
        # dimensions behind the one of tokens
        return Outcome(at, _token_dim(made) + 1)
    return _whole(node, at)


def _token_dim(shape: Any) -> int:
    return next(i for i, size in enumerate(shape) if isinstance(size, torch.SymInt))


def _experts(node: Node, at: Places) -> Outcome:
    """Spread experts, or experts cut along their width: either leaves a sum over the ranks."""
    weights = {name: at[name] for name in EXPERT_WEIGHTS if name in at}
    if at["down"] == 0:  # spread: `experts` must be local numbers, which shard_experts sees to
        return Outcome({**dict.fromkeys(at), **dict.fromkeys(weights, 0)}, "partial")
    if at["down"] == WIDTH:
        cut: dict[str, Where] = {"gate_up": 1, "gate_up_bias": 1, "down": WIDTH, "down_bias": "partial"}
        needs: dict[str, Where] = {name: cut.get(name) for name in at}
        return Outcome(needs, "partial")
    return _whole(node, at)


RULES: dict[str, Callable[[Node, Places], Outcome]] = {
    "octavo::linear": _linear,
    "octavo::nvfp4_linear": _quantized_linear,
    "octavo::nvfp4_weight_linear": _quantized_linear,
    "octavo::fp8_linear": _quantized_linear,
    "octavo::rms_norm": _along_heads,
    "octavo::rope": _along_heads,
    "octavo::paged_attention": _attention,
    "octavo::paged_mla_attention": _latent_attention,
    "octavo::head_linear": _head_linear,
    "octavo::kv_write": _writes_pages,
    "octavo::rope_kv_write": _writes_pages,
    "octavo::pointwise": _elementwise,
    "octavo::add": _add,
    "octavo::act_mul": _elementwise,
    "aten::reshape": _reshape,
    **dict.fromkeys(EXPERT_OPS, _experts),
}
