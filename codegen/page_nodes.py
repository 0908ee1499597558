"""What both families read off the nodes of paged attention and of writes to pages."""

from torch import fx

from octavo.codegen.row import tensor
from octavo.compiler.dims import dtype_name
from octavo.compiler.legality import named_arguments
from octavo.compiler.ops.paging import page_width

# What pages are called by the dtype of their cache; "" those of floats.
FORMATS = {"fp32": "", "bf16": "", "fp8": "fp8", "u8": "nvfp4"}


def page_format(node: fx.Node) -> str:
    """ "fp8", "nvfp4", or "" for pages of floats."""
    return FORMATS[dtype_name(tensor(node, "k_cache"))]


def row_width(node: fx.Node, kind: str) -> int:
    """Elements of a head's row in the pages of keys ("k") or values ("v")."""
    scales = named_arguments(node)[f"{kind}_scales"]
    return page_width(tensor(node, f"{kind}_cache"), None if scales is None else scales.meta["val"])
