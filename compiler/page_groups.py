"""What a lowered graph says of its page groups: which attentions read which table, and how far they look back."""

import torch
from torch import fx

from octavo.compiler.legality import named_arguments
from octavo.compiler.program import input_and_group

octavo = torch.ops.octavo


def page_windows(graph: fx.Graph) -> tuple[int | None, ...]:
    """Of each page group, the window of its attentions; None where one of them looks back further, or to the start.

    Pages of latents are kept whole.
    """
    windows: dict[int, set[int]] = {}
    for node in graph.nodes:
        if node.target in (octavo.paged_attention.default, octavo.paged_mla_attention.default):
            given = named_arguments(node)
            window = given["window"] if node.target is octavo.paged_attention.default else 0
            windows.setdefault(input_and_group(given["page_table"].name)[1], set()).add(window)
    groups = (windows.get(group, {0}) for group in range(max(windows, default=0) + 1))
    return tuple(None if 0 in group else max(group) for group in groups)
