"""Remove nodes without users and without effects, and weights that nothing reads."""

from torch.fx import GraphModule

from octavo.passes.rule import PassReport


def eliminate_dead_code(graph_module: GraphModule) -> PassReport:
    """Placeholders stay: the signature is a contract."""
    report = PassReport("eliminate_dead_code")
    graph_module.graph.eliminate_dead_code()
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.delete_all_unused_submodules()
    return report
