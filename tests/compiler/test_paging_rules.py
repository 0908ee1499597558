"""Rules that hold of whole graphs over pages: who writes and reads each cache, and which rows become logits."""

from collections.abc import Callable

import pytest
import torch
from stages import before
from torch.fx import GraphModule, Node

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.paging_rules import check_paging

octavo = torch.ops.octavo
WHERE = r"\(node \w+, .*\.py:\d+\)"


def first(graph_module: GraphModule, target: object) -> Node:
    found: Node = next(n for n in graph_module.graph.nodes if n.target is target)
    return found


def write_twice(graph_module: GraphModule) -> None:
    write = first(graph_module, octavo.kv_write.default)
    with graph_module.graph.inserting_after(write):
        graph_module.graph.node_copy(write)


def never_write(graph_module: GraphModule) -> None:
    graph_module.graph.erase_node(first(graph_module, octavo.kv_write.default))


def write_late(graph_module: GraphModule) -> None:
    graph_module.graph.output_node().prepend(first(graph_module, octavo.kv_write.default))


def never_read(graph_module: GraphModule) -> None:
    attention = first(graph_module, octavo.paged_attention.default)
    other = [n for n in graph_module.graph.nodes if n.target is octavo.paged_attention.default][1]
    attention.args = (attention.args[0], *other.args[1:3], *attention.args[3:])


def flip_rows(graph_module: GraphModule) -> None:
    gather = first(graph_module, octavo.gather_logits.default)
    with graph_module.graph.inserting_before(gather):
        flipped = graph_module.graph.call_function(torch.ops.aten.flip.default, (gather.args[1], [0]))
    gather.args = (gather.args[0], flipped)


def never_gather(graph_module: GraphModule) -> None:
    gather = first(graph_module, octavo.gather_logits.default)
    gather.replace_all_uses_with(gather.all_input_nodes[0])
    graph_module.graph.erase_node(gather)


def test_a_paged_graph_keeps_the_rules() -> None:
    check_paging(before("merge_qkv"), "test")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (write_twice, "k_cache_0 is written by kv_write, kv_write_[0-9]+, expected one write"),
        (never_write, "k_cache_0 is written by nobody, expected one write"),
        (write_late, "k_cache_0 is read before kv_write writes it"),
        (never_read, "k_cache_0 is written by kv_write and never read"),
        (flip_rows, "the rows of which logits are wanted must be logit_rows, got flip_default"),
        (never_gather, "expected one gather of the wanted rows, got 0"),
    ],
)
def test_breaking_a_rule_names_the_pass_and_the_place(
    change: Callable[[GraphModule], None], said: str
) -> None:
    graph_module = before("merge_qkv")
    change(graph_module)
    with pytest.raises(IllegalGraphError, match=f"^test: {said} {WHERE}"):
        check_paging(graph_module, "test")
