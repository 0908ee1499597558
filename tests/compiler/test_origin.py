"""One place says where a node comes from, with the user's line rather than torch's or ours."""

import os

import pytest
from torch.fx import Graph, Node

from octavo.compiler import origin
from octavo.compiler.origin import module_path, source_code, source_line, where

USER = '  File "/home/me/model.py", line 212, in forward\n    y = self.attention(x) * 2\n'
TORCH = '  File "/usr/lib/python3/site-packages/torch/nn/functional.py", line 9, in linear\n    return z\n'
OURS = (
    f'  File "{os.path.dirname(origin.__file__)}/huggingface.py", line 80, in _attention\n    out = op(q)\n'
)


def node(trace: str | None = None, path: str | None = None) -> Node:
    made = Graph().placeholder("x")
    if trace is not None:
        made.meta["stack_trace"] = trace
    if path is not None:
        made.meta["nn_module_stack"] = {"a": ("", object), "b": (path, object)}
    return made


@pytest.mark.parametrize("trace", [USER, USER + TORCH, USER + OURS, TORCH + USER + OURS + TORCH])
def test_the_line_is_the_users(trace: str) -> None:
    assert source_line(node(trace)) == "model.py:212"
    assert source_code(node(trace)) == "y = self.attention(x) * 2"


def test_the_innermost_of_several_lines_of_the_user() -> None:
    inner = '  File "blocks.py", line 3, in mix\n'
    assert source_line(node(USER + inner)) == "blocks.py:3"
    assert source_code(node(USER + inner)) == ""


def test_where_names_node_module_and_line_as_far_as_known() -> None:
    assert where(node(USER, "layers.3.mlp")) == "node x, layers.3.mlp, model.py:212"
    assert where(node(USER)) == "node x, model.py:212"
    assert where(node()) == "node x"
    assert module_path(node()) == "" and source_line(node(TORCH)) == ""
