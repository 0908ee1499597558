import pytest
import torch
from models import llama
from torch.fx import GraphModule

from octavo.compiler.capture import capture
from octavo.compiler.fresh_inputs import empty_pages, whole_sequences
from octavo.compiler.legality import named_arguments
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import Settings, lower
from octavo.passes.mask_trees import ATTENTIONS, mask_trees
from octavo.passes.rule import run_pass

PATHS = ([5, 6, 7, 8], [5, 6, 9], [5, 10], [5, 10, 11])  # from the root; nodes: 5; 6, 7, 8; 9; 10, 11
NODES, PARENTS = [5, 6, 7, 8, 9, 10, 11], [-1, 0, 1, 2, 1, 0, 5]


@pytest.fixture(scope="module")
def graph() -> GraphModule:
    return lower(capture(llama()), CompileOptions(verify="off"), Settings(4, 48)).graph_module


def run(graph_module: GraphModule, ids: list[int], **changes: torch.Tensor) -> torch.Tensor:
    step = whole_sequences([ids], 4)
    given = {**step.tensors, **changes}
    inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    values = [given[n.name] if n.name in given else empty_pages(n, step.num_pages) for n in inputs]
    with torch.no_grad():
        logits: torch.Tensor = graph_module(*values)[0]
    return logits[0]


def test_a_tree_gives_what_each_of_its_paths_gives(graph: GraphModule) -> None:
    prompt = [1, 2, 3]
    alone = {tuple(path): run(graph, prompt + path)[-1] for path in PATHS}
    report = run_pass(mask_trees, graph)
    assert report.notes["attentions"] == 2 and report.nodes_after == report.nodes_before + 1
    attentions = [n for n in graph.graph.nodes if n.target in ATTENTIONS]
    assert all(named_arguments(n)["tree"].name == "tree" for n in attentions)
    masks = [1, 3, 7]
    for node, parent in enumerate(PARENTS):
        masks.append(masks[3 + parent] | 1 << 3 + node)
    depths = torch.tensor([[bin(mask).count("1") - 1 for mask in masks]])
    logits = run(graph, prompt + NODES, tree=torch.tensor(masks), positions=depths)
    for node, path in ((3, PATHS[0]), (4, PATHS[1]), (5, PATHS[2]), (6, PATHS[3])):
        torch.testing.assert_close(logits[3 + node], alone[tuple(path)], rtol=1e-5, atol=1e-5)
    flat = run(graph, prompt + NODES)
    assert not torch.allclose(flat[-1], logits[-1], atol=1e-3), "masks made no difference"


def test_it_is_added_once(graph: GraphModule) -> None:
    run_pass(mask_trees, graph)
    report = run_pass(mask_trees, graph)
    assert not report.changed
