"""Where a node comes from: the module in the user's model and the line of the user's source."""

import itertools
import os

from torch.fx import Node

# Frames of torch's modules and of this package lie between the user's line and the op.
OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
NOT_THE_USERS = ("/torch/", OWN)


def module_path(node: Node) -> str:
    """`model.layers.3.self_attn`, or "" where it is not known."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def source_line(node: Node) -> str:
    """`modeling.py:212` of the innermost frame that is the user's, or ""."""
    return _frame(node)[0]


def source_code(node: Node) -> str:
    """The text of that line, or ""."""
    return _frame(node)[1]


def _frame(node: Node) -> tuple[str, str]:
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    found = ("", "")
    for place, code in itertools.pairwise([*trace, ""]):
        if place.startswith("File ") and not any(part in place for part in NOT_THE_USERS):
            file, line = place.split(",")[:2]
            name = file.split("/")[-1].removeprefix("File").strip('" ')
            found = (
                f"{name}:{line.strip().removeprefix('line ')}",
                "" if code.startswith("File ") else code,
            )
    return found


def where(node: Node) -> str:
    """`node mul_12, model.layers.3.self_attn, modeling.py:212`, as far as it is known, for messages."""
    return ", ".join(part for part in (f"node {node.name}", module_path(node), source_line(node)) if part)
