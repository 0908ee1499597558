"""The launch program as JSON text and back. Reading checks every count, name, kind and expression."""

import json
import math
import re
from typing import Any, get_args

from octavo.compiler.errors import ArtifactError
from octavo.compiler.expression import validate, validate_condition
from octavo.compiler.mesh import AXES, Mesh
from octavo.compiler.program import (
    COLLECTIVES,
    DIMS,
    FEATURES,
    ITEM_BYTES,
    STEP_INPUTS,
    Buffer,
    BufferKind,
    Dim,
    ExpertLayer,
    Program,
    Shard,
    Step,
    input_and_group,
    step_input,
)  # fmt: skip

MAX_BUFFERS = 200_000
MAX_STEPS = 200_000
MAX_ARGS = 256
MAX_RANK = 8
MAX_PAGE_SIZE = 65_536
MAX_WINDOW = 2**31 - 1
MAX_RANKS = 4096
MAX_SIZE = 2**40
MAX_WIDTH = 2**24  # of hidden states, together
HIDDEN_DTYPES = ("fp32", "bf16")
OF_COLLECTIVES = ("axis", "options")
ALL_PAGES = (None,)  # one group, whose layers look back to the start: not written

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,254}")
_KINDS = get_args(BufferKind)
_DTYPES = tuple(ITEM_BYTES)


def program_to_json(program: Program) -> str:
    """Deterministic text; one buffer or step a line, so that a person can read and compare it."""
    lines = {
        "buffers": [_compact(vars(buffer)) for buffer in program.buffers],
        "steps": [_compact(_step_fields(step)) for step in program.steps],
    }
    parts = [f'"{name}": [\n' + ",\n".join(rows) + "\n]" for name, rows in lines.items()]
    parts += [f'"workspace": {json.dumps(program.workspace)}', f'"page_size": {program.page_size}']
    if program.page_windows != ALL_PAGES:
        parts.append(f'"page_windows": {json.dumps(program.page_windows)}')
    if program.mesh.world > 1:
        shards = [f"{json.dumps(name)}: {_compact(vars(shard))}" for name, shard in program.shards.items()]
        parts.append(f'"mesh": {_compact(vars(program.mesh))}')
        parts.append('"shards": {\n' + ",\n".join(shards) + "\n}")
        layers = [_compact(vars(layer)) for layer in program.experts]
        parts.append('"experts": [\n' + ",\n".join(layers) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _step_fields(step: Step) -> dict[str, Any]:
    """axis and options of collectives only."""
    return {name: value for name, value in vars(step).items() if step.axis or name not in OF_COLLECTIVES}


def _compact(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(", ", ":"), allow_nan=False)


def program_from_json(text: str, where: str = "program.json") -> Program:
    """Parse and check; raises ArtifactError naming what was expected, what came and where."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _bad(where, "JSON", error) from None
    optional = {"page_windows", "mesh", "shards", "experts"} & set(data) if isinstance(data, dict) else set()
    _expect_keys(data, {"buffers", "steps", "workspace", "page_size", *optional}, where)
    rows = _list(data["buffers"], MAX_BUFFERS, f"{where} buffers")
    buffers = tuple(_buffer(row, f"{where} buffer {i}") for i, row in enumerate(rows))
    names = {buffer.name for buffer in buffers}
    if len(names) != len(buffers):
        raise _bad(where, "distinct buffer names", f"{len(buffers) - len(names)} repeated")
    rows = _list(data["steps"], MAX_STEPS, f"{where} steps")
    mesh = _mesh(data.get("mesh", vars(Mesh())), f"{where} mesh")
    steps = tuple(_step(row, names, f"{where} step {i}") for i, row in enumerate(rows))
    page_size = data["page_size"]
    if type(page_size) is not int or not 1 <= page_size <= MAX_PAGE_SIZE:
        raise _bad(where, f"page_size of 1 to {MAX_PAGE_SIZE}", page_size)
    windows = _windows(data.get("page_windows", list(ALL_PAGES)), f"{where} page_windows")
    shards = _shards(data.get("shards", {}), mesh, buffers, f"{where} shards")
    workspace = _dim(data["workspace"], DIMS, f"{where} workspace")
    rows = _list(data.get("experts", []), MAX_BUFFERS, f"{where} experts")
    experts = tuple(_expert_layer(row, shards, f"{where} experts {i}") for i, row in enumerate(rows))
    program = Program(buffers, steps, workspace, page_size, windows, mesh, shards, experts)
    _check_interface(program, where)
    return program


def _windows(values: Any, where: str) -> tuple[int | None, ...]:
    windows = _list(values, MAX_BUFFERS, where)
    if not windows or any(
        w is not None and (type(w) is not int or not 1 <= w <= MAX_WINDOW) for w in windows
    ):
        raise _bad(where, f"a window of 1 to {MAX_WINDOW} or null for each page group", values)
    return tuple(windows)


def _mesh(row: Any, where: str) -> Mesh:
    _expect_keys(row, set(AXES), where)
    if any(type(size) is not int or size < 1 for size in row.values()) or math.prod(row.values()) > MAX_RANKS:
        raise _bad(where, f"sizes of 1 or more, at most {MAX_RANKS} ranks", row)
    return Mesh(**row)


def _shards(rows: Any, mesh: Mesh, buffers: tuple[Buffer, ...], where: str) -> dict[str, Shard]:
    if not isinstance(rows, dict) or len(rows) > MAX_BUFFERS:
        raise _bad(where, "an object of weights", str(rows)[:100])
    weights = {buffer.name: buffer for buffer in buffers if buffer.kind == "weight"}
    return {name: _shard(row, weights.get(name), mesh, f"{where} '{name}'") for name, row in rows.items()}


def _shard(row: Any, buffer: Buffer | None, mesh: Mesh, where: str) -> Shard:
    """Pieces for every rank, each as long as the buffer's axis."""
    _expect_keys(row, {"dim", "pieces"}, where)
    dim = row["dim"]
    if buffer is None or type(dim) is not int or not 0 <= dim < len(buffer.shape):
        raise _bad(where, "an axis of a weight", dim)
    pieces = tuple(
        tuple(_range(piece, where) for piece in _list(own, MAX_BUFFERS, where))
        for own in _list(row["pieces"], MAX_RANKS, where)
    )
    shard = Shard(dim, pieces)
    lengths = {shard.length(rank) for rank in range(len(pieces))}
    if len(pieces) != mesh.world or lengths != {buffer.shape[dim]}:
        raise _bad(
            where,
            f"{buffer.shape[dim]} elements of axis {dim} for each of {mesh.world} ranks",
            f"{sorted(lengths)} for {len(pieces)}",
        )
    return shard


def _expert_layer(row: Any, shards: dict[str, Shard], where: str) -> ExpertLayer:
    _expect_keys(row, {"table", "weights"}, where)
    names = (row["table"], *_list(row["weights"], MAX_ARGS, where))
    if any(type(name) is not str or name not in shards or shards[name].dim for name in names):
        raise _bad(where, "weights of which ranks hold pieces of their first axis", names)
    return ExpertLayer(names[0], names[1:])


def _range(piece: Any, where: str) -> tuple[int, int]:
    start, stop = [*_list(piece, 2, where), None, None][:2]
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= MAX_SIZE:
        raise _bad(where, "a range [start, stop]", piece)
    return start, stop


def _buffer(row: Any, where: str) -> Buffer:
    _expect_keys(row, {"name", "kind", "dtype", "shape", "offset"}, where)
    name, kind, dtype = row["name"], row["kind"], row["dtype"]
    if not _is_name(name):
        raise _bad(where, "a name", name)
    where = f"{where} '{name}'"
    if kind not in _KINDS or dtype not in _DTYPES:
        raise _bad(
            where, f"a kind of {', '.join(_KINDS)} and a dtype of {', '.join(_DTYPES)}", f"{kind}, {dtype}"
        )
    allowed = () if kind == "weight" else DIMS
    shape = tuple(
        _dim(size, allowed, f"{where} shape") for size in _list(row["shape"], MAX_RANK, f"{where} shape")
    )
    offset = row["offset"]
    if (offset is not None) != (kind == "workspace"):
        raise _bad(where, "an offset for workspace buffers only", f"offset {offset} for {kind}")
    return Buffer(name, kind, dtype, shape, None if offset is None else _dim(offset, DIMS, f"{where} offset"))


def _step(row: Any, buffers: set[str], where: str) -> Step:
    collective = isinstance(row, dict) and "axis" in row
    _expect_keys(row, {"kernel", "args", "grid", "when", *(OF_COLLECTIVES if collective else ())}, where)
    if not _is_name(row["kernel"]):
        raise _bad(where, "a kernel name", row["kernel"])
    where = f"{where} '{row['kernel']}'"
    if collective:
        return _collective(row, buffers, where)
    args = tuple(_arg(arg, buffers, where) for arg in _list(row["args"], MAX_ARGS, f"{where} args"))
    grid = tuple(_dim(size, DIMS, f"{where} grid") for size in _list(row["grid"], 3, f"{where} grid"))
    if len(grid) != 3:
        raise _bad(where, "3 grid sizes", len(grid))
    when = row["when"]
    try:
        validate_condition(when, DIMS)
    except ArtifactError as error:
        raise ArtifactError(f"{where} when: {error}") from None
    return Step(row["kernel"], args, (grid[0], grid[1], grid[2]), when)


def _collective(row: Any, buffers: set[str], where: str) -> Step:
    if row["kernel"] not in COLLECTIVES or row["axis"] not in AXES or row["when"] or row["grid"] != [1, 1, 1]:
        raise _bad(where, f"one of {', '.join(COLLECTIVES)} on one of {', '.join(AXES)}", str(row)[:100])
    args = tuple(_list(row["args"], MAX_ARGS, f"{where} args"))
    count, kinds = COLLECTIVES[row["kernel"]]
    if len(args) != count or any(type(arg) is not str or arg not in {*buffers, ""} for arg in args):
        raise _bad(where, f"{count} buffers as arguments", args)
    options = tuple(_list(row["options"], MAX_ARGS, f"{where} options"))
    if tuple(map(type, options)) != kinds:
        raise _bad(where, f"options of {[kind.__name__ for kind in kinds]}", options)
    return Step(row["kernel"], args, axis=row["axis"], options=options)


def _arg(arg: Any, buffers: set[str], where: str) -> str | int | float:
    if type(arg) is float and math.isfinite(arg):
        return arg
    if type(arg) is str and arg in buffers:
        return arg
    return _dim(arg, DIMS, f"{where} arguments")


def _dim(value: Any, names: tuple[str, ...], where: str) -> Dim:
    if type(value) not in (int, str) or (type(value) is int and value < 0):
        raise _bad(where, "a size of 0 or more, or an expression", value)
    try:
        validate(value, names)
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}") from None
    return value  # type: ignore[no-any-return]


def _check_interface(program: Program, where: str) -> None:
    """What the runtime relies on: step inputs as it fills them, pages it can size, logits it can read."""
    for buffer in program.of_kind("input"):
        if buffer.name == FEATURES:
            _check_hidden_states(buffer, where)
            continue
        if input_and_group(buffer.name)[1] >= len(program.page_windows):
            raise _bad(where, f"inputs of {len(program.page_windows)} page groups", buffer.name)
        if step_input(buffer.name) != (buffer.dtype, buffer.shape):
            known = ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in STEP_INPUTS.items())
            raise _bad(
                where, f"step inputs among {known}", f"{buffer.name} {buffer.dtype} {list(buffer.shape)}"
            )
    for buffer in program.of_kind("cache"):
        if len(buffer.shape) < 3 or buffer.shape[0] != "num_pages" or buffer.shape[2] != program.page_size:
            expected = f"(num_pages, kv_heads, {program.page_size}, ...) for cache '{buffer.name}'"
            raise _bad(where, expected, list(buffer.shape))
    outputs = program.of_kind("output")
    if not outputs or outputs[0].dtype != "fp32":
        raise _bad(where, "fp32 logits as the first output buffer", [f"{b.name} {b.dtype}" for b in outputs])
    for number, buffer in enumerate(outputs[1:]):
        if buffer.name != f"{FEATURES}_{number}":
            raise _bad(where, f"an output buffer {FEATURES}_{number}", buffer.name)
        _check_hidden_states(buffer, where)


def _check_hidden_states(buffer: Buffer, where: str) -> None:
    width = buffer.shape[-1] if buffer.shape else 0
    is_bounded = isinstance(width, int) and 1 <= width <= MAX_WIDTH
    if buffer.dtype not in HIDDEN_DTYPES or buffer.shape != ("T", width) or not is_bounded:
        raise _bad(
            where,
            f"(T, width up to {MAX_WIDTH}) of {', '.join(HIDDEN_DTYPES)} for {buffer.kind} '{buffer.name}'",
            f"{buffer.dtype} {list(buffer.shape)}",
        )


def _expect_keys(row: Any, keys: set[str], where: str) -> None:
    if not isinstance(row, dict) or set(row) != keys:
        raise _bad(where, f"an object of {', '.join(sorted(keys))}", str(row)[:100])


def _list(value: Any, limit: int, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise _bad(where, f"a list of at most {limit}", str(value)[:100])
    return value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _bad(where: str, expected: str, got: object) -> ArtifactError:
    return ArtifactError(
        f"{where}: expected {expected}, got {got}; the artifact is damaged, compile it again"
    )
