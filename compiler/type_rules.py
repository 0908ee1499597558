"""The type of every value of a graph: declared for weights that passes made, inferred through ops.

A weight that was quantised has its part of a value in graph_module.meta["types"], by name; everything else there is
plain. A call that takes codes, scales or outer scales that do not belong together is refused, naming both.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler.dims import CACHE_NAME, DTYPE_NAMES
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.legality import named_arguments, op
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS
from octavo.compiler.origin import where
from octavo.compiler.types import FP8, NVFP4, Part, Plain, concat, cut, reshape, transpose

State = Part | Plain | None | tuple[Any, ...]  # None: nothing, or a size
# Elements that one element of a tensor stands for along its last axis.
ELEMENTS = {"codes": 2, "scales": BLOCK_ELEMENTS, "outer": 1, "alpha": 1}


def declared(graph_module: GraphModule) -> dict[str, Part]:
    """The parts of quantised values that weights hold, by the weights' names."""
    known: dict[str, Part] = graph_module.meta.setdefault("types", {})
    return known


def check_types(graph_module: GraphModule, after: str) -> dict[Node, State]:
    """The type of every node. Raises IllegalGraphError for a mismatch, with node, module, line and both types."""
    types: dict[Node, State] = {}
    parts = declared(graph_module)
    for node in graph_module.graph.nodes:
        call = _Call(node, types, after)
        if node.op == "get_attr":
            types[node] = parts.get(str(node.target)) or _plain(node.meta["val"])
        elif node.op == "placeholder":
            types[node] = _pages(node) or _plain(node.meta.get("val"))
        elif node.op == "call_function":
            try:
                types[node] = RULES.get(op(node), _takes_plain)(call)
            except IllegalGraphError as error:
                raise call.refuse(str(error)) from None
        else:
            _takes_plain(call)
    return types


@dataclass
class _Call:
    """One node while its type is inferred. types: of the nodes before it."""

    node: Node
    types: dict[Node, State]
    after: str

    def refuse(self, reason: str) -> IllegalGraphError:
        prefix = f"{self.after}: "
        if reason.startswith(prefix):
            return IllegalGraphError(reason)
        return IllegalGraphError(f"{prefix}{op(self.node)}: {reason} ({where(self.node)})")

    def given(self, name: str) -> Any:
        """An argument by the name that the schema has for it; its default where it is left out."""
        return named_arguments(self.node)[name]

    def state(self, name: str) -> State:
        value = self.given(name)
        return self.types[value] if isinstance(value, Node) else None

    def part(self, name: str, role: str, kind: type) -> Part:
        found = self.state(name)
        if not isinstance(found, Part) or found.role != role or not isinstance(found.type, kind):
            raise self.refuse(f"{name} must be {role} of {_format(kind)}, got {self.text(name)}")
        return found

    def belonging(self, name: str, role: str, codes: Part, codes_name: str) -> Part:
        """Another part of the value whose codes are known."""
        found = self.part(name, role, type(codes.type))
        if found.value != codes.value or not _is_alike(found, codes):
            raise self.refuse(
                f"{name} must belong to {codes_name}, which is {codes}; got {found} ({self.given(name)})"
            )
        return found

    def absent(self, name: str, because: str) -> None:
        if self.given(name) is not None:
            raise self.refuse(f"{name} must not be given, since {because}; got {self.text(name)}")

    def plain(self, *names: str) -> None:
        for name in names:
            if not isinstance(self.state(name), Plain | None):
                raise self.refuse(f"{name} must be plain numbers, got {self.text(name)}")

    def text(self, name: str) -> str:
        value, state = self.given(name), self.state(name)
        if not isinstance(value, Node):
            return repr(value)
        return f"{value.target if value.op == 'get_attr' else value.name}, {state}"


def _is_alike(first: Part, second: Part) -> bool:
    """One format, one layout, one length of rows. Sizes that are symbols are left out."""
    a, b = (replace(p.type, shape=p.type.shape[-1:]) for p in (first, second))
    return a == b


def _format(kind: type) -> str:
    return {NVFP4: "an NVFP4 value", FP8: "an FP8 value"}[kind]


def _plain(value: Any) -> State:
    if isinstance(value, tuple | list):
        return tuple(_plain(v) for v in value)
    if not isinstance(value, Tensor):
        return None
    return Plain(DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch.")), tuple(value.shape))


def _pages(node: Node) -> Part | None:
    """What pages hold that are not of the model's dtype, by their name and dtype."""
    value: Any = node.meta.get("val")
    if not CACHE_NAME.fullmatch(node.name) or value.dtype not in (torch.uint8, torch.float8_e4m3fn):
        return None
    kind, what, number = node.name.split("_")
    name = f"{kind} pages {number}"
    if what == "cache" and value.dtype is torch.float8_e4m3fn:
        return Part(FP8(tuple(value.shape)), "codes", name)
    width = int(value.shape[-1]) * (2 if what == "cache" else BLOCK_ELEMENTS)
    return Part(NVFP4((*value.shape[:-1], width)), "codes" if what == "cache" else "scales", name)


def _takes_plain(call: _Call) -> State:
    for argument in call.node.all_input_nodes:
        if not _holds_plain(call.types[argument]):
            name = argument.target if argument.op == "get_attr" else argument.name
            raise call.refuse(f"it takes plain numbers, got {name}, {call.types[argument]}")
    return _plain(call.node.meta.get("val"))


def _holds_plain(state: State) -> bool:
    return all(map(_holds_plain, state)) if isinstance(state, tuple) else not isinstance(state, Part)


def _quantize(call: _Call) -> State:
    """The parts of a new value, named after the node; what else the op returns is plain."""
    _takes_plain(call)
    results = call.node.meta["val"]
    codes = results[0]
    outer = call.given("outer")
    held_by = str(outer.target) if isinstance(outer, Node) and outer.op == "get_attr" else ""
    kind: FP8 | NVFP4
    if call.given("format") == "fp8":
        kind = FP8(tuple(codes.shape), "token" if outer is None else "tensor")
    else:
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        kind = NVFP4(shape, layout=call.given("layout"), outer="row" if outer is None else "tensor")
    parts: list[State] = [Part(kind, "codes", call.node.name, held_by)]
    if isinstance(kind, NVFP4):
        parts.append(Part(kind, "scales", call.node.name, held_by))
    if outer is None:
        parts.append(Part(kind, "outer", call.node.name))
    return (*parts, *(_plain(result) for result in results[len(parts) :]))


def _nvfp4_linear(call: _Call) -> State:
    x = _nvfp4_operand(call, "x", "x_scale")
    weight = _nvfp4_operand(call, "weight", "weight_scale")
    _same_length(call, x, weight)
    _alpha(call, "alpha", weight, x.other)
    _row_scale(call, x)
    call.plain("bias")
    return _plain(call.node.meta["val"])


def _nvfp4_weight_linear(call: _Call) -> State:
    call.plain("x", "bias")
    weight = _nvfp4_operand(call, "weight", "weight_scale")
    x = call.state("x")
    if isinstance(x, Plain) and x.shape[-1] != weight.type.shape[-1]:
        raise call.refuse(f"x {x} and {weight} have rows of other lengths")
    _alpha(call, "alpha", weight, "")
    return _plain(call.node.meta["val"])


def _fp8_linear(call: _Call) -> State:
    x, weight = call.part("x", "codes", FP8), call.part("weight", "codes", FP8)
    for part in (x, weight):
        if isinstance(part.type, FP8) and part.type.scaling == "block":
            raise call.refuse(f"no kernel multiplies FP8 with scales by block, got {part}")
    _same_length(call, x, weight)
    _alpha(call, "alpha", weight, x.other)
    _row_scale(call, x)
    call.plain("bias")
    return _plain(call.node.meta["val"])


def _nvfp4_operand(call: _Call, codes_name: str, scales_name: str) -> Part:
    """Codes and scales of one value, in the layout that the call states, blocks along the sum."""
    codes = call.part(codes_name, "codes", NVFP4)
    call.belonging(scales_name, "scales", codes, codes_name)
    kind = codes.type
    assert isinstance(kind, NVFP4)
    if kind.layout != call.given("layout"):
        raise call.refuse(
            f"it reads {call.given('layout')} scales, got {scales_name} {kind.layout}: {call.text(scales_name)}"
        )
    if kind.axis != -1:
        raise call.refuse(f"{codes_name} must have its blocks along the last axis, got {codes}")
    return codes


def _same_length(call: _Call, x: Part, weight: Part) -> None:
    if x.type.shape[-1] != weight.type.shape[-1]:
        raise call.refuse(f"rows of x and weight must be of one length, got {x} and {weight}")


def _alpha(call: _Call, name: str, weight: Part, input_scale: str) -> None:
    """alpha is of this weight, and has the outer scale of this input in it."""
    alpha = call.belonging(name, "alpha", weight, "weight")
    if alpha.other != input_scale:
        has, wants = (text or "no outer scale of an input" for text in (alpha.other, input_scale))
        raise call.refuse(f"{name} must hold {wants}, since x was quantised with it; got {alpha}, with {has}")


def _row_scale(call: _Call, x: Part) -> None:
    if x.other:
        return call.absent("row_scale", f"x has the outer scale {x.other}, which alpha holds")
    if call.given("row_scale") is None:
        raise call.refuse(f"row_scale is missing: each row of x has its own outer scale ({x})")
    call.belonging("row_scale", "outer", x, "x")
    return None


def _moe(call: _Call) -> State:
    """Experts quantise their inputs themselves."""
    name = op(call.node)
    call.plain("x", "experts", "weights", "gate_up_bias", "down_bias")
    weight_only = name.endswith("nvfp4_weight_moe")
    for product, outer in (("gate_up", "x_outer"), ("down", "hidden_outer")):
        if name.endswith("fp8_moe"):
            weight = call.part(product, "codes", FP8)
        else:
            weight = _nvfp4_operand(call, product, f"{product}_scale")
        scale = None if weight_only else call.given(outer)
        _alpha(call, f"{product}_alpha", weight, str(scale.target) if isinstance(scale, Node) else "")
    return _plain(call.node.meta["val"])


def _attend(call: _Call) -> State:
    """Reads and writes of pages: codes, scales and multipliers of one attention."""
    schema = call.node.target._schema  # type: ignore[union-attr]
    names = [parameter.name for parameter in schema.arguments]
    caches = [n for n in names if n in ("k_cache", "v_cache", "cache")]
    scales = {n: n.replace("cache", "scales") for n in caches if n.replace("cache", "scales") in names}
    (multiplier,) = [n for n in names if n in ("multiplier", "multipliers")]
    for name in caches:
        codes = call.state(name)
        if not isinstance(codes, Part):
            for extra in (multiplier, *scales.values()):
                call.absent(extra, f"{name} holds plain numbers")
            continue
        if isinstance(codes.type, NVFP4):
            call.belonging(scales[name], "scales", codes, name)
        elif name in scales:
            call.absent(scales[name], f"{name} is {codes}")
        found = call.state(multiplier)
        wanted = codes.value.partition(" ")[2]
        if not isinstance(found, Part) or found.role != "outer" or found.value != wanted:
            raise call.refuse(f"{multiplier} must be those of {wanted}, got {call.text(multiplier)}")
    special = {*caches, *scales.values(), multiplier}
    call.plain(*(n for n in names if n not in special and isinstance(call.given(n), Node)))
    return _plain(call.node.meta.get("val"))


def _item(call: _Call) -> State:
    source, index = call.node.args[0], call.node.args[1]
    assert isinstance(source, Node)
    state = call.types[source]
    return state[index] if isinstance(state, tuple) else _plain(call.node.meta["val"])  # type: ignore[index]


def _view(call: _Call) -> State:
    """Reshapes, cuts, joins and turns of what may be a part of a value."""
    given = call.node.args[0]
    nodes = list(given) if isinstance(given, tuple | list) else [given]
    states = [call.types[n] for n in nodes if isinstance(n, Node)]
    if not any(isinstance(state, Part) for state in states):
        return _plain(call.node.meta["val"])
    parts = [state for state in states if isinstance(state, Part)]
    if len(parts) != len(states):
        raise call.refuse(
            f"it joins a part of a quantised value and plain numbers, {', '.join(map(str, states))}"
        )
    part = parts[0]
    if part.role == "scales" and isinstance(part.type, NVFP4) and part.type.layout != "linear":
        raise call.refuse(f"swizzled scales cannot be reshaped, cut, joined or turned, got {part}")
    return VIEWS[op(call.node)](call, parts)


def _of(part: Part, kind: Any, value: str = "") -> Part:
    """Another part of the same value, or of one that was made of it."""
    return replace(part, type=kind, value=value or part.value)


def _reshaped(call: _Call, parts: list[Part]) -> Part:
    shape = tuple(call.node.meta["val"].shape)
    width = ELEMENTS[parts[0].role] if isinstance(parts[0].type, NVFP4) else 1
    if parts[0].role in ("outer", "alpha"):
        raise call.refuse(f"outer scales stay as they are, got {parts[0]}")
    return _of(parts[0], reshape(parts[0].type, (*shape[:-1], shape[-1] * width)))


def _cut(call: _Call, parts: list[Part]) -> Part:
    part, axis = parts[0], _axis(call, "dim")
    width = ELEMENTS[part.role] if isinstance(part.type, NVFP4) and part.type.axis == axis else 1
    start, stop = call.given("start") or 0, call.given("end")
    length = part.type.shape[axis]
    stop = length if stop is None else min(stop * width, length)
    name = f"{part.value}[axis {axis}, {start * width}:{stop}]"
    return _of(part, cut(part.type, axis, start * width, stop), name)


def _joined(call: _Call, parts: list[Part]) -> Part:
    axis = _axis(call, "dim")
    kind = concat([part.type for part in parts], axis, same_outer=False)
    return _of(parts[0], kind, f"cat({', '.join(p.value for p in parts)}; axis {axis})")


def _turned(call: _Call, parts: list[Part]) -> Part:
    return _of(parts[0], transpose(parts[0].type, _axis(call, "dim0"), _axis(call, "dim1")))


def _axis(call: _Call, name: str) -> int:
    """From the end."""
    axis, rank = call.given(name), len(call.node.meta["val"].shape)
    return int(axis) if axis < 0 else int(axis) - rank


VIEWS: dict[str, Callable[[_Call, list[Part]], Part]] = {
    "aten::reshape": _reshaped, "aten::view": _reshaped, "aten::slice": _cut, "aten::cat": _joined,
    "aten::transpose": _turned,
}  # fmt: skip
RULES: dict[str, Callable[[_Call], State]] = {
    "getitem": _item,
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(
        ("octavo::quantize", "octavo::rms_norm_quantize", "octavo::add_rms_norm_quantize", "octavo::act_mul_quantize"),
        _quantize,
    ),
    "octavo::nvfp4_linear": _nvfp4_linear,
    "octavo::nvfp4_weight_linear": _nvfp4_weight_linear,
    "octavo::fp8_linear": _fp8_linear,
    **dict.fromkeys(("octavo::nvfp4_moe", "octavo::nvfp4_weight_moe", "octavo::fp8_moe"), _moe),
    **dict.fromkeys(
        ("octavo::kv_write", "octavo::rope_kv_write", "octavo::paged_attention", "octavo::latent_write",
         "octavo::paged_mla_attention"),
        _attend,
    ),
}  # fmt: skip
