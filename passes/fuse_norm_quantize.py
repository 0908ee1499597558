"""quantize(rms_norm(x))  ->  octavo.rms_norm_quantize;  the same of add_rms_norm, whose sum goes on as its last result.

The normalised rows then never reach memory. Not matched: rows that something else reads too, or that are quantised in
several forms.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.rewrite import Builder, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
OFFSET = 0.0  # of norms that give none
FUSED = {
    octavo.rms_norm.default: octavo.rms_norm_quantize.default,
    octavo.add_rms_norm.default: octavo.add_rms_norm_quantize.default,
}


def fuse_norm_quantize(graph_module: GraphModule) -> PassReport:
    report = PassReport("fuse_norm_quantize", "bitwise")
    for node in list(graph_module.graph.nodes):
        if node.target not in FUSED:
            continue
        is_sum = node.target is octavo.add_rms_norm.default
        results = {user.args[1]: user for user in node.users} if is_sum else {0: node}
        num_tensors = 3 if is_sum else 2
        args = (*node.args, OFFSET)[: num_tensors + 2]
        totals = [results[1]] if 1 in results else []
        if 0 in results:
            fuse_quantize(graph_module, report, results[0], FUSED[node.target], args, num_tensors, totals)
    return report


def fuse_quantize(
    graph_module: GraphModule, report: PassReport, value: Node, fused: Callable[..., Any], args: Sequence[Any],
    num_tensors: int, others: Sequence[Node] = (),
) -> None:  # fmt: skip
    """Let `fused(*args, outer, format, layout)` make the parts of `value`, if all who read it quantise it in one form.

    num_tensors  of the args, which come first
    others       further results of what made the value, which are the last of `fused`
    """
    readers = [user for user in value.users if user.target is octavo.quantize.default]
    if not readers:
        return
    reason = refusal(value, readers)
    if reason is not None:
        report.reject(value, reason)
        return
    parts = [part for reader in readers for part in reader.users]
    form = readers[0].args[1:]
    inputs = [arg for arg in (*args[:num_tensors], form[0]) if isinstance(arg, Node)]

    def build(b: Builder) -> list[Node]:
        made = b.call(fused, *args, *form)
        first_other = len(made.meta["val"]) - 1
        indices = [*(part.args[1] for part in parts), *(first_other for _ in others)]
        known = {index: b.call(operator.getitem, made, index) for index in dict.fromkeys(indices)}
        return [known[index] for index in indices]

    report.sites.append(replace(graph_module, [*parts, *others], build, inputs))


def refusal(value: Node, readers: Sequence[Node]) -> str | None:
    strangers = [user.name for user in value.users if user not in readers]
    if strangers:
        return f"{', '.join(strangers)} reads it too, which is not quantised"
    forms = {str(reader.args[1:]) for reader in readers}
    return f"it is quantised in {len(forms)} forms: {', '.join(sorted(forms))}" if len(forms) > 1 else None
