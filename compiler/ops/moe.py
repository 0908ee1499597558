"""Mixture of experts: which experts a token goes to, and what they make of it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.compiler.ops.mlp import activate
from octavo.compiler.ops.op import Op, accumulator

SCORINGS = ("softmax", "sigmoid", "softmax_selected", "unit")
GROUP_SCORES = ("top2_sum", "max")


def router(
    logits: Tensor, bias: Tensor | None, top_k: int, scoring: str, renormalize: bool, num_groups: int,
    top_groups: int, group_score: str, scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each token's experts, best first; of equal ones the lower index first. Returns (weights, experts).

    logits      (1, T, E) fp32 or bf16; everything is computed in fp32 (fp64 for fp64), whatever they are
    bias        (E,) or None; added to the scores for the selection only, never part of a weight
    scoring     "softmax" over all experts, "sigmoid", "softmax_selected": the logits select, and the softmax is over
                the selected ones, or "unit": the logits select, and every weight is one
    renormalize divide by the sum over the selected
    num_groups  experts lie in groups of E / num_groups; only those of the best `top_groups` can be selected (1: no
                groups). A group scores the sum of its two best experts ("top2_sum") or its best ("max"), bias included
    scaling     multiplies the weights at the end

    weights (1, T, top_k) fp32; experts (1, T, top_k) int64 below E. DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")
    wide = logits.to(accumulator(logits))
    scores = {"softmax": wide.softmax(-1), "sigmoid": wide.sigmoid()}.get(scoring, wide)
    choice = scores if bias is None else scores + bias.to(wide.dtype)
    if num_groups > 1:
        choice = _within_groups(choice, num_groups, top_groups, group_score)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = scores.gather(-1, experts)
    if scoring == "softmax_selected":
        weights = weights.softmax(-1)
    if scoring == "unit":
        weights = torch.ones_like(weights)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scaling, experts.contiguous()


def _within_groups(choice: Tensor, num_groups: int, top_groups: int, group_score: str) -> Tensor:
    """-inf for experts outside the best groups: a biased score may be negative, so zero would win."""
    if group_score not in GROUP_SCORES:
        raise ValueError(f"group_score must be one of {', '.join(GROUP_SCORES)}, got {group_score!r}")
    grouped = choice.unflatten(-1, (num_groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1) if group_score == "top2_sum" else grouped.amax(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
    dropped = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
    masked: Tensor = grouped.masked_fill(dropped[..., None], float("-inf"))
    return masked.flatten(-2)


def _router_fake(
    logits: Tensor, bias: Tensor | None, top_k: int, scoring: str, renormalize: bool, num_groups: int,
    top_groups: int, group_score: str, scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=accumulator(logits)), logits.new_empty(shape, dtype=torch.int64)


def gate(gate_up: Tensor, activation: str, limit: float, alpha: float) -> Tensor:
    """gate_up (..., 2 * intermediate), gate first; returns (..., intermediate). Attributes as in `moe`."""
    left, up = gate_up.chunk(2, dim=-1)
    if limit > 0:
        left, up = left.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu_oai":
        return left * torch.sigmoid(alpha * left) * (up + 1)
    return activate(left, activation) * up


def moe(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, activation: str, limit: float, alpha: float,
) -> Tensor:  # fmt: skip
    """The weighted sum of what each token's experts make of it (1, T, hidden), in x's dtype.

    x (1, T, hidden); experts (1, T, K) int64, -1 for a slot that adds nothing; weights (1, T, K) fp32
    gate_up (E, 2 * intermediate, hidden), rows of the gate first; gate_up_bias (E, 2 * intermediate) or None
    down (E, hidden, intermediate); down_bias (E, hidden) or None
    activation  silu, gelu, gelu_tanh or relu of the gate, times up; or "swiglu_oai", which is
                gate * sigmoid(alpha * gate) * (up + 1)
    limit       clamps, before any activation, the gate from above and up on both sides; 0 for none
    alpha       read by "swiglu_oai" only

    Products accumulate in fp32 and only the activated rows are rounded to x's dtype in between. The sum over K is in
    fp32, in the order of the slots, so that a token's result does not depend on the tokens beside it.
    """
    wide = accumulator(x)
    flat = x.flatten(0, -2)

    def of_expert(e: int, rows: Tensor) -> Tensor:
        projected = flat[rows].to(wide) @ gate_up[e].to(wide).T
        if gate_up_bias is not None:
            projected = projected + gate_up_bias[e].to(wide)
        hidden = gate(projected, activation, limit, alpha).to(x.dtype)
        result = hidden.to(wide) @ down[e].to(wide).T
        return result if down_bias is None else result + down_bias[e].to(wide)

    return over_experts(x, experts, weights, down.shape[:2], wide, of_expert)


def over_experts(
    x: Tensor, experts: Tensor, weights: Tensor, sizes: Sequence[int], wide: torch.dtype,
    of_expert: Callable[[int, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The weighted sum over slots, in their order, of what of_expert(e, rows of x that go to e) returns.

    sizes: how many experts there are, and the width of what they make. of_expert returns (rows, width) of `wide`, in
    which the sum is; the result (1, T, width) is of x's dtype. A slot of expert -1 adds nothing, whatever its weight.
    Raises IndexError for any other expert that there is not.
    """
    count, width = sizes
    slots = experts.reshape(-1, experts.shape[-1])
    used = slots.unique().tolist()
    if used and not -1 <= used[0] <= used[-1] < count:
        raise IndexError(f"experts must be 0 to {count - 1}, or -1 for none, got {used[0]} to {used[-1]}")
    parts = x.new_zeros((*slots.shape, width), dtype=wide)
    for e in used:
        if e >= 0:
            rows, columns = torch.where(slots == e)
            parts[rows, columns] = of_expert(e, rows)
    shares = weights.reshape(slots.shape).masked_fill(slots < 0, 0.0).to(wide)
    total = torch.zeros_like(parts[:, 0])
    for slot in range(slots.shape[1]):
        total = total + parts[:, slot] * shares[:, slot, None]
    return total.to(x.dtype).reshape(*x.shape[:-1], width)


ROUTER = Op(
    "router(Tensor logits, Tensor? bias, int top_k, str scoring, bool renormalize, int num_groups, int top_groups, "
    "str group_score, float scaling) -> (Tensor, Tensor)",
    router,
    _router_fake,
    "experts = top_k(score(logits) + bias); weights = score(logits)[experts]",
)
MOE = Op(
    "moe(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
    "Tensor? down_bias, str activation, float limit, float alpha) -> Tensor",
    moe,
    lambda x, experts, weights, gate_up, gate_up_bias, down, down_bias, activation, limit, alpha: x.new_empty(
        (*x.shape[:-1], down.shape[1])
    ),
    "y = sum_k weights_k * (activation(x @ gate_k.T) * (x @ up_k.T)) @ down_k.T",
)
