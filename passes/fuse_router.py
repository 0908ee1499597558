"""How a token finds its experts, spelled out  ->  octavo.router (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

From each octavo.moe backwards: the weights' scaling, their division by their sum, the top-k, experts outside the best
groups, the bias of the selection, the scores. Not matched: other scores than a softmax or a sigmoid, a sum with an
epsilon or a floor that counts, and masks that leave excluded experts in the running.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import (
    Call,
    Match,
    Through,
    Trace,
    Var,
    add,
    aten,
    call,
    cast,
    describe,
    matches,
    mul,
    number,
)
from octavo.passes.rewrite import Builder, make_site
from octavo.passes.rewrite import replace as replace_nodes
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
# Sums of scores are larger than this wherever a weight means something; 1e-20 and 1e-12 stand in real models.
NEGLIGIBLE = 1e-12

TOPK = aten.topk.default
VALUES = call(operator.getitem, args=(call(TOPK, args=(Var("choice"), Var("k")), bind="topk"), 0))
INDICES = call(operator.getitem, args=(call(TOPK, args=(Var("choice"), Var("k")), bind="topk"), 1))
SHAPED = (aten.reshape.default, aten._to_copy.default)

WEIGHTS = cast(Var("weights"))
SCALED = mul(WEIGHTS, Var("scaling", number))
SUM = call(aten.sum.dim_IntList, args=(WEIGHTS, [-1], True))
SHARES = tuple(
    Call((aten.div.Tensor,), (WEIGHTS, total))
    for total in (
        SUM, add(SUM, Var("epsilon", number)), call(aten.clamp.default, args=(SUM, Var("epsilon", number))),
        call(aten.clamp_min.default, args=(SUM, Var("epsilon", number))),
    )
)  # fmt: skip
GATHERED = call(aten.gather.default, args=(Var("scores"), Var("axis"), Through(SHAPED[1:], INDICES)))
SELECTED = call(aten.softmax.int, args=(cast(VALUES), Var("axis")))
BIASED = add(Var("scores"), cast(Var("bias")))
SOFTMAX = call(aten.softmax.int, args=(cast(Var("logits")), Var("axis")))
SIGMOID = call(aten.sigmoid.default, args=(cast(Var("logits")),))

GROUPED = call(aten.reshape.default, args=(Var("choice"), Var("sizes")))
BEST_TWO = call(
    aten.sum.dim_IntList, args=(call(operator.getitem, args=(call(TOPK, args=(GROUPED, 2)), 0)), [-1])
)
BEST_ONE = (
    call(operator.getitem, args=(call(aten.max.dim, args=(GROUPED, -1)), 0)),
    call(aten.amax.default, args=(GROUPED, [-1])),
)
GROUP_SCORES = (("top2_sum", BEST_TWO), *(("max", pattern) for pattern in BEST_ONE))


def _masked(best: Any) -> Any:
    kept = call(operator.getitem, args=(call(TOPK, args=(best, Var("top_groups")), bind="group_topk"), 1))
    ones = call(aten.scatter.value, args=(call(aten.zeros_like.default), Var("scatter_axis"), kept, 1))
    wide = Through((aten.reshape.default, aten.expand.default), ones)
    dropped = call(aten.bitwise_not.default, aten.logical_not.default, args=(cast(wide),))
    return call(aten.masked_fill.Scalar, args=(Var("choice"), dropped, Var("fill")))


def _masked_in_groups(best: Any) -> Any:
    """As DeepSeek's own code has it: scores seen as groups, and a mask of those that are dropped."""
    kept = call(operator.getitem, args=(call(TOPK, args=(best, Var("top_groups")), bind="group_topk"), 1))
    ones = call(aten.new_ones.default, aten.ones.default, aten.ones_like.default)
    dropped = call(aten.scatter.value, args=(ones, Var("scatter_axis"), kept, False))
    wide = Through((aten.reshape.default, aten.expand.default), dropped)
    masked = call(aten.masked_fill.Scalar, args=(GROUPED, wide, Var("fill")))
    return call(aten.reshape.default, args=(masked,))


GROUPS = tuple((name, form(best)) for form in (_masked, _masked_in_groups) for name, best in GROUP_SCORES)


@dataclass(frozen=True)
class Router:
    """Attributes of octavo.router, as far as they are read; the values that it stands for."""

    logits: Any = None
    bias: Any = None
    top_k: int = 0
    scoring: str = ""
    renormalize: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "top2_sum"
    scaling: float = 1.0

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What follows logits and bias in a call."""
        groups = (self.num_groups, self.top_groups, self.group_score)
        return (self.top_k, self.scoring, self.renormalize, *groups, self.scaling)


class _Refused(Exception):
    """Why a place is not a router that the op describes."""


def fuse_router(graph_module: GraphModule) -> PassReport:
    report = PassReport("fuse_router", "reassociates")
    for moe in [n for n in graph_module.graph.nodes if n.target is octavo.moe.default]:
        experts, weights = moe.args[1:3]
        if _source(experts).target is octavo.router.default:
            continue
        try:
            router, topk = _read(weights, experts)
        except _Refused as reason:
            report.reject(moe, f"its router: {reason}")
            continue
        if topk.args[4:5] == (False,) or topk.kwargs.get("sorted") is False:
            report.sites.append(_sort(graph_module, topk))
        site = replace_nodes(
            graph_module, [weights, experts], _build(router), [router.logits, *_nodes(router.bias)]
        )
        report.sites.append(site)
    return report


def _source(value: Node) -> Node:
    """The call below reshapes, conversions and the choice of one of its results."""
    while value.target in (*SHAPED, operator.getitem):
        value = value.all_input_nodes[0]
    return value


def _nodes(value: Any) -> list[Node]:
    return [value] if isinstance(value, Node) else []


def _read(weights: Node, experts: Node) -> tuple[Router, Node]:
    """The router that makes a moe's weights and experts, and its top-k."""
    router, found = Router(), _first(Through(SHAPED, Var("weights")), weights)
    scaled = _optional(SCALED, found["weights"])
    if scaled is not None:
        router, found = replace(router, scaling=float(scaled["scaling"])), scaled
    shares = next(filter(None, (_optional(pattern, found["weights"]) for pattern in SHARES)), None)
    if shares is not None:
        if abs(shares.values.get("epsilon", 0.0)) > NEGLIGIBLE:
            raise _Refused(
                f"the sum of its weights has an epsilon of {shares['epsilon']}, expected at most {NEGLIGIBLE}"
            )
        router, found = replace(router, renormalize=True), shares
    router, topk = _read_weights(router, found["weights"])
    if _first(Through(SHAPED, INDICES), experts)["topk"] is not topk:
        raise _Refused(f"its experts come from another top-k than {topk.name}, which its weights come from")
    _check(router, topk)
    return router, topk


def _read_weights(router: Router, weights: Node) -> tuple[Router, Node]:
    """Selected scores: what top-k returns, what it found looked up, or a softmax of the selected logits."""
    selected = _optional(SELECTED, weights)
    if selected is not None:
        _require_last(selected["axis"], weights)
        logits = _first(cast(Var("logits")), selected["choice"])["logits"]
        return replace(router, scoring="softmax_selected", logits=logits, top_k=selected["k"]), selected[
            "topk"
        ]
    values, gathered = _optional(VALUES, weights), _optional(GATHERED, weights)
    found = values or gathered
    if found is None:
        raise _Refused(f"its weights are {describe(weights)}, expected values of a top-k or a gather of them")
    if gathered is not None:
        _require_last(gathered["axis"], weights)
    router, choice, fill = _read_groups(replace(router, top_k=found["k"]), found["choice"])
    scores = choice
    biased = None if gathered is None or choice is gathered["scores"] else _optional(BIASED, choice)
    if gathered is not None and choice is not gathered["scores"]:
        if biased is None or biased["scores"] is not gathered["scores"]:
            raise _Refused(
                f"it selects by {describe(choice)}, which is not {gathered['scores'].name} and a bias"
            )
        router, scores = replace(router, bias=biased["bias"]), biased["scores"]
    # Scores are positive, so zero loses against them, but not against what a bias makes of them.
    if fill != -math.inf and not (fill == 0.0 and router.bias is None):
        raise _Refused(f"experts outside the best groups have the score {fill}, which may win; expected -inf")
    return _read_scores(router, scores), found["topk"]


def _read_groups(router: Router, choice: Node) -> tuple[Router, Node, float]:
    """The router with its groups, what it selects by before their mask, and what the mask fills in."""
    masked = _first(Through(SHAPED[:1], Var("masked")), choice)["masked"]
    if masked.target is not aten.masked_fill.Scalar:
        return router, choice, -math.inf
    traces = []
    for name, pattern in GROUPS:
        trace = Trace()
        found = next(matches(pattern, choice, trace), None)
        traces.append(trace)
        if found is not None:
            num_groups, group = found["sizes"][-2:]
            kept = int(found["top_groups"])
            if kept * group < router.top_k:
                raise _Refused(
                    f"{kept} groups of {group} experts are fewer than the {router.top_k} to be selected"
                )
            _check_topk(found["group_topk"])
            groups = replace(router, num_groups=int(num_groups), top_groups=kept, group_score=name)
            return groups, found["choice"], float(found["fill"])
    raise _Refused(f"the mask of its groups: {max(traces, key=lambda t: t.depth).reason}")


def _read_scores(router: Router, scores: Node) -> Router:
    for name, pattern in (("softmax", SOFTMAX), ("sigmoid", SIGMOID)):
        found = _optional(pattern, _first(cast(Var("scores")), scores)["scores"])
        if found is not None:
            if name == "softmax":
                _require_last(found["axis"], scores)
            return replace(router, scoring=name, logits=found["logits"])
    raise _Refused(f"its scores are {describe(scores)}, expected a softmax or a sigmoid")


def _check(router: Router, topk: Node) -> None:
    _check_topk(topk)
    shape = tuple(router.logits.meta["val"].shape)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != 1) or not isinstance(shape[-1], int):
        raise _Refused(
            f"its logits {router.logits.name} have shape {shape}, expected (T, experts) or (1, T, experts)"
        )
    if router.bias is not None and tuple(router.bias.meta["val"].shape) not in (shape[-1:], (1, shape[-1])):
        raise _Refused(f"its bias {router.bias.name} has shape {tuple(router.bias.meta['val'].shape)}")


def _check_topk(topk: Node) -> None:
    given: dict[str, Any] = {
        **dict(zip(("dim", "largest", "sorted"), topk.args[2:], strict=False)),
        **topk.kwargs,
    }
    _require_last(given.get("dim", -1), topk.all_input_nodes[0])
    if given.get("largest", True) is not True:
        raise _Refused(f"{topk.name} takes the smallest, expected the largest")


def _require_last(axis: Any, tensor: Node) -> None:
    rank = len(tensor.meta["val"].shape)
    if axis % rank != rank - 1:
        raise _Refused(f"{tensor.name} is worked along axis {axis} of {rank}, expected the last")


def _optional(pattern: Any, node: Node) -> Match | None:
    return next(matches(pattern, node), None)


def _first(pattern: Any, node: Node) -> Match:
    trace = Trace()
    found = next(matches(pattern, node, trace), None)
    if found is None:
        raise _Refused(trace.reason)
    return found


def _build(router: Router) -> Callable[[Builder], list[Node]]:
    def build(b: Builder) -> list[Node]:
        logits, bias = router.logits, router.bias
        width = logits.meta["val"].shape[-1]
        if len(logits.meta["val"].shape) == 2:
            logits = b.call(aten.reshape.default, logits, [1, -1, width])
        if bias is not None and len(bias.meta["val"].shape) == 2:
            bias = b.call(aten.reshape.default, bias, [width])
        both = b.call(octavo.router.default, logits, bias, *router.arguments)
        return [b.call(operator.getitem, both, i) for i in (0, 1)]

    return build


def _sort(graph_module: GraphModule, topk: Node) -> Any:
    """A top-k that may come in any order is taken in falling order; proven to be the same set."""
    with graph_module.graph.inserting_after(topk):
        marker = graph_module.graph.call_function(aten.alias.default, (topk,))
    with graph_module.graph.inserting_before(marker):
        b = Builder(graph_module, topk)
        ordered = b.call(TOPK, *topk.args[:2], -1)
        sets = [
            [
                b.call(operator.getitem, b.call(aten.sort.default, b.call(operator.getitem, top, i)), 0)
                for i in (0, 1)
            ]
            for top in (topk, ordered)
        ]  # fmt: skip
    graph_module.graph.erase_node(marker)
    site = make_site(graph_module, sets[0], sets[1], topk.all_input_nodes)
    topk.replace_all_uses_with(ordered)
    return site
