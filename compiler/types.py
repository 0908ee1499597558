"""What the values of a graph are beyond shape and dtype: plain, FP8 or NVFP4; and which part of one a tensor holds.

A quantised value is several tensors: codes, block scales, outer scales. Shapes here are those of the value in elements,
whatever its tensors look like. Rules say what becomes of a type when the value is cut, joined or turned; each raises
IllegalGraphError where no quantised value of that kind exists.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS, E4M3_MAX, RECIPE, TILE_BLOCKS, TILE_ROWS

Shape = tuple[Any, ...]  # numbers or symbolic sizes
Role = Literal["codes", "scales", "outer", "alpha"]
TILE_ELEMENTS = TILE_BLOCKS * BLOCK_ELEMENTS


@dataclass(frozen=True)
class Plain:
    """Numbers as they are; dtype as dims.DTYPE_NAMES has it, or torch's name of a rarer one."""

    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype}{_sizes(self.shape)}"


@dataclass(frozen=True)
class FP8:
    """E4M3 codes. scaling: one outer scale for the tensor, for each token, for each row of a weight, or for a block."""

    shape: Shape
    scaling: Literal["tensor", "token", "row", "block"] = "tensor"

    def __str__(self) -> str:
        return f"fp8{_sizes(self.shape)} by {self.scaling}"


@dataclass(frozen=True)
class NVFP4:
    """E2M1 codes with an E4M3 scale for 16 elements along `axis`.

    axis      counted from the end, so that leading axes of size one change nothing
    outer     one outer scale for the tensor, for each row (axis -2), or, turned, for each column (axis -1)
    e4m3_max  largest block scale that the outer scale was made for: 448, or 256 under a search
    """

    shape: Shape
    recipe: str = RECIPE
    e4m3_max: float = E4M3_MAX
    layout: Literal["linear", "swizzled_128x4"] = "linear"
    axis: int = -1
    outer: Literal["tensor", "row", "column"] = "tensor"

    def __str__(self) -> str:
        facts = f"{self.recipe} max {self.e4m3_max:g} {self.layout} axis {self.axis} by {self.outer}"
        return f"nvfp4{_sizes(self.shape)} {facts}"


ValueType = Plain | FP8 | NVFP4


@dataclass(frozen=True)
class Part:
    """What a tensor holds of a quantised value.

    value  names the value: the same on all its parts, another on those of another value
    other  of "alpha" only: the weight that holds the outer scale of the input, which alpha has in it; "" if none
    """

    type: FP8 | NVFP4
    role: Role
    value: str
    other: str = ""

    def __str__(self) -> str:
        return f"{self.role} of {self.value}{f' x {self.other}' if self.other else ''}: {self.type}"


def reshape(kind: ValueType, shape: Shape) -> ValueType:
    """Blocks stay whole, rows with outer scales of their own stay rows, swizzled rows too."""
    if isinstance(kind, Plain):
        return replace(kind, shape=shape)
    width, new = kind.shape[-1], shape[-1]
    by_row = kind.scaling in ("token", "row", "block") if isinstance(kind, FP8) else kind.outer != "tensor"
    if by_row and new != width:
        raise IllegalGraphError(
            f"{kind} cannot become {_sizes(shape)}: its rows have outer scales of their own"
        )
    if isinstance(kind, NVFP4):
        if kind.axis != -1:
            raise IllegalGraphError(
                f"{kind} cannot become {_sizes(shape)}: turn its blocks to the last axis first"
            )
        if kind.layout != "linear" and new != width:
            raise IllegalGraphError(
                f"{kind} cannot become {_sizes(shape)}: swizzled scales cannot be reshaped; reshape before they are"
            )
        if new % BLOCK_ELEMENTS:
            raise IllegalGraphError(
                f"{kind} cannot become {_sizes(shape)}: a last axis of {new} cuts blocks of {BLOCK_ELEMENTS}"
            )
    return replace(kind, shape=shape)


def cut(kind: ValueType, axis: int, start: int, stop: int) -> ValueType:
    """Elements start..stop - 1 of an axis (from the end): of blocks on multiples of 16, of tiles on their edges."""
    length = kind.shape[axis]
    stop = min(stop, length)
    step = _edge(kind, axis)
    for end in (start, stop):
        if end % step and end != length:
            what = f"tiles of {step}" if step > BLOCK_ELEMENTS else f"blocks of {step}"
            raise IllegalGraphError(
                f"{kind} cannot be cut at {end} of axis {axis}: expected a multiple of {step} ({what})"
            )
    return replace(kind, shape=_with(kind.shape, axis, stop - start))


def _edge(kind: ValueType, axis: int) -> int:
    """Elements of an axis that stay together."""
    if not isinstance(kind, NVFP4):
        return 1
    swizzled = kind.layout != "linear"
    if axis == kind.axis:
        return TILE_ELEMENTS if swizzled else BLOCK_ELEMENTS
    return TILE_ROWS if swizzled else 1


def concat(kinds: Sequence[ValueType], axis: int, same_outer: bool) -> ValueType:
    """Of equal formats. same_outer: whether all have one outer scale; where not, each row gets its own."""
    first = kinds[0]
    for kind in kinds[1:]:
        alike = replace(kind, shape=first.shape)
        if isinstance(first, NVFP4) and isinstance(alike, NVFP4):
            alike = replace(alike, outer=first.outer)
        if alike != replace(first, shape=first.shape):
            raise IllegalGraphError(f"{first} and {kind} cannot be joined: expected one format on all")
    for kind in kinds[:-1]:
        if kind.shape[axis] % _edge(kind, axis):
            raise IllegalGraphError(
                f"{kind} cannot be followed by another: expected a multiple of {_edge(kind, axis)} on axis {axis}"
            )
    joined = replace(first, shape=_with(first.shape, axis, sum(kind.shape[axis] for kind in kinds)))
    if same_outer or isinstance(joined, Plain):
        return joined
    if axis == -1:
        raise IllegalGraphError(
            f"{first} cannot be joined along axis -1 with another outer scale: a sum over it has one alpha a row; "
            "quantise the joined tensor"
        )
    return replace(joined, scaling="row") if isinstance(joined, FP8) else replace(joined, outer="row")


def shard(kind: ValueType, axis: int, ranks: int) -> ValueType:
    """What each of `ranks` devices holds. Raises with what would fit where a share cuts blocks or tiles."""
    length, step = kind.shape[axis], _edge(kind, axis)
    if length % (ranks * step):
        share = length / ranks
        fitting = [n for n in range(1, ranks) if length % (n * step) == 0]
        ways = f"shard over {fitting[-1]}" if fitting else "leave this value whole"
        raise IllegalGraphError(
            f"{kind} cannot be sharded {ranks} ways along axis {axis}: {length} / {ranks} = {share:g}, expected a "
            f"multiple of {step}; {ways}, or pad the axis to {math.ceil(length / (ranks * step)) * ranks * step}"
        )
    return cut(kind, axis, 0, length // ranks)


def transpose(kind: ValueType, first: int, second: int) -> ValueType:
    """Axes from the end. Blocks and outer scales turn with the value; a product needs blocks along the last axis."""
    shape = list(kind.shape)
    shape[first], shape[second] = shape[second], shape[first]
    turned = replace(kind, shape=tuple(shape))
    if isinstance(turned, Plain) or {first, second} != {-1, -2}:
        if isinstance(turned, NVFP4) and turned.axis in (first, second):
            raise IllegalGraphError(f"{kind}: its blocks can turn between the last two axes only")
        return turned
    if isinstance(turned, FP8):
        if turned.scaling != "tensor":
            raise IllegalGraphError(f"{kind} cannot be turned: its outer scales belong to rows")
        return turned
    if turned.layout != "linear":
        raise IllegalGraphError(f"{kind} cannot be turned: its scales are swizzled; turn them while linear")
    outer: Any = {"tensor": "tensor", "row": "column", "column": "row"}[turned.outer]
    return replace(turned, axis={-1: -2, -2: -1}[turned.axis], outer=outer)


_PART = re.compile(
    r"(?P<role>codes|scales|outer|alpha) of (?P<value>.*?)(?: x (?P<other>\S+))?: (?:"
    r"nvfp4\[(?P<shape>[\d, ]*)\] (?P<recipe>\S+) max (?P<max>[\d.]+) (?P<layout>linear|swizzled_128x4) "
    r"axis (?P<axis>-\d) by (?P<outer>tensor|row|column)"
    r"|fp8\[(?P<fp8>[\d, ]*)\] by (?P<scaling>tensor|token|row|block))"
)


def part_from_text(text: str) -> Part:
    """What `str` of a part of a weight wrote. Raises IllegalGraphError for any other text."""
    found = _PART.fullmatch(text)
    if found is None:
        raise IllegalGraphError(
            f"{text!r} is no part of a quantised value such as 'codes of a.weight: fp8[4, 16] by row'"
        )
    role: Any = found["role"]
    scaling: Any = found["scaling"]
    if scaling:
        return Part(FP8(_numbers(found["fp8"]), scaling), role, found["value"], found["other"] or "")
    layout: Any = found["layout"]
    outer: Any = found["outer"]
    kind = NVFP4(
        _numbers(found["shape"]), found["recipe"], float(found["max"]), layout, int(found["axis"]), outer
    )
    return Part(kind, role, found["value"], found["other"] or "")


def _numbers(text: str) -> Shape:
    return tuple(int(size) for size in text.split(",") if size.strip())


def _with(shape: Shape, axis: int, size: int) -> Shape:
    sizes = list(shape)
    sizes[axis] = size
    return tuple(sizes)


def _sizes(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"
