"""Small programs that show a fault without the model it was found in."""

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch.fx import GraphModule

from octavo.compiler.dump import print_graph
from octavo.compiler.dump_load import load_graph
from octavo.passes.rewrite import Site
from octavo.passes.rule import PassReport

PROGRAM = '''\
"""{title}

Both forms of the rewrite at {where}, on fresh inputs, in fp64 and in the model's dtype. Prints the error and
exits 1 while they differ, 0 once they agree.
"""

import sys
from pathlib import Path

from octavo.compiler.errors import PassError
from octavo.compiler.reproducer import load_site
from octavo.compiler.verify import prove_report
from octavo.passes.rule import PassReport

BEFORE = {before}

AFTER = {after}

site = load_site(BEFORE, AFTER, {node!r}, {where!r}, {table!r}, {constants})
report = PassReport({name!r}, {exactness!r}, [site])
try:
    prove_report(report, {{}})
except PassError as error:
    print(error)
    sys.exit(1)
print(f"the two forms agree: error {{report.proof.worst:.2e}}, bound {{report.proof.bound:.2e}}")
'''


def write_reproducer(directory: Path, report: PassReport, title: str) -> Path:
    """A program for the one site of a report, and a file with the weights that the site relies on, if any."""
    (site,) = report.sites
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{report.name}__{site.node}"
    constants = "None"
    if site.constants:
        values = {name: tensor.detach().clone() for name, tensor in site.constants.items()}
        save_file(values, directory / f"{stem}.safetensors")
        constants = f'Path(__file__).with_name("{stem}.safetensors")'
    path = directory / f"{stem}.py"
    path.write_text(
        PROGRAM.format(
            title=title.replace("\\", "/").replace('"""', "'''"),
            where=site.where,
            before=_quoted(print_graph(site.before, f"before {report.name}")),
            after=_quoted(print_graph(site.after, f"after {report.name}")),
            node=site.node,
            table=site.table,
            constants=constants,
            name=report.name,
            exactness=report.exactness,
        )
    )
    return path


def _quoted(text: str) -> str:
    """A literal that shows the text line by line."""
    return repr(text) if "'''" in text else f"r'''{text}'''"


def load_site(
    before: str, after: str, node: str, where: str, table: str | None = None, constants: Path | None = None
) -> Site:
    """A site from the text of both forms."""
    forms = load_graph(before), load_graph(after)
    examples = tuple(n.meta["val"] for n in forms[1].graph.nodes if n.op == "placeholder")
    values = {} if constants is None else load_file(constants)
    return Site(node, where, *forms, examples, values, "reproducer", table)


def write_graphs(directory: Path, name: str, before: str, after: GraphModule) -> Path:
    """The whole graph before and after a pass, to be compared by eye. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"before_{name}.py").write_text(before)
    (directory / f"after_{name}.py").write_text(print_graph(after, f"after {name}"))
    return directory
