"""Tensors for any kernel spec at given sizes: what device_check runs kernels on. Sizes of pointers are generous."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.codegen.kernel import Arg, KernelSpec
from octavo.compiler.errors import ArtifactError
from octavo.compiler.expression import evaluate, holds

DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn,
    "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
SLACK_BYTES = 32 * 2**20
CONTEXT, PREFIX = 2048, 512


@dataclass(frozen=True)
class Point:
    """Sizes of a step at which a spec is run."""

    label: str
    dims: Mapping[str, int]


def points(spec: KernelSpec) -> list[Point]:
    """A step of few tokens and one of many; attention has requests with pages of context behind them."""
    page = page_size(spec)
    decode = {"T": 8, "R": 8, "L": 8, "S": 8 * CONTEXT}
    prefill = {"T": 1024, "R": 2, "L": 1024, "S": 2 * (512 + PREFIX)}
    shapes = [("few", decode, CONTEXT), ("many", prefill, 512 + PREFIX)]
    found = []
    for label, dims, length in shapes:
        columns = -(-length // page)
        found.append(
            Point(label, {**dims, "P": columns, "N": dims["T"], "num_pages": dims["R"] * columns + 1})
        )
    return found


def page_size(spec: KernelSpec) -> int:
    sizes = [value for launch in spec.launches for name, value in launch.params if name == "PAGE_SIZE"]
    return int(sizes[0]) if sizes else 64


def launches_at(spec: KernelSpec, dims: Mapping[str, int]) -> list[KernelSpec]:
    """The launches that run in a step of these sizes."""
    return [launch for launch in spec.launches if holds(launch.when, dims)]


def tensors_of(
    spec: KernelSpec, dims: Mapping[str, int], device: torch.device, poison_outputs: bool
) -> dict[str, Tensor]:
    """A tensor for every pointer and descriptor of the launches that run, by argument name.

    Outputs and scratch hold nan (0xFF where there is none) with poison_outputs, zeros without, so that "finite" can
    be asked of all of them.
    """
    generator = torch.Generator(device).manual_seed(0)
    launches = launches_at(spec, dims)
    generous = pointer_bytes(launches, dims)
    scratch = {name: (dtype, shape) for launch in spec.launches for name, dtype, shape in launch.scratch}
    held: dict[str, Tensor] = {}
    for launch in launches:
        for arg in launch.args:
            if arg.kind == "scalar" or arg.name in held:
                continue
            dtype = DTYPES[arg.dtype]
            if arg.name in scratch:
                shape = [evaluate(size, dims) for size in scratch[arg.name][1]]
                held[arg.name] = _filled(math.prod(shape), dtype, device, poison_outputs)
            elif is_output(arg):
                count = _count(launch, arg, dims, generous)
                held[arg.name] = _filled(count, dtype, device, poison_outputs)
            else:
                count = _count(launch, arg, dims, generous)
                held[arg.name] = _input(launch, arg, count, dims, device, generator)
    return held


def pointer_bytes(launches: list[KernelSpec], dims: Mapping[str, int]) -> int:
    """More than any argument needs of which no shape is known: what the launch moves besides its descriptors."""
    most = 0
    for launch in launches:
        mapped = sum(
            _count(launch, arg, dims, 0) * DTYPES[arg.dtype].itemsize
            for arg in launch.args
            if arg.kind == "descriptor"
        )
        most = max(most, evaluate(launch.bytes, dims) - mapped)
    return most + SLACK_BYTES


def needed_bytes(spec: KernelSpec, dims: Mapping[str, int]) -> int:
    """Memory of the tensors that tensors_of makes, or a little more."""
    launches = launches_at(spec, dims)
    generous = pointer_bytes(launches, dims)
    args = {arg.name: (launch, arg) for launch in launches for arg in launch.args if arg.kind != "scalar"}
    return sum(
        _count(launch, arg, dims, generous) * DTYPES[arg.dtype].itemsize for launch, arg in args.values()
    )


def is_output(arg: Arg) -> bool:
    return arg.name.split("_")[0] in ("out", "partial", "lse", "parts")


def _count(launch: KernelSpec, arg: Arg, dims: Mapping[str, int], generous: int) -> int:
    """Elements of an argument: known of a descriptor and of experts' weights, else more than enough."""
    if arg.kind == "descriptor":
        return math.prod(evaluate(size, dims) for size in arg.shape)
    params = dict(launch.params)
    if "NUM_EXPERTS" in params and "ROWS" in params and arg.name.startswith(("gate_up", "down")):
        return int(params["NUM_EXPERTS"]) * int(params["ROWS"]) * int(params["K"])
    return generous // DTYPES[arg.dtype].itemsize


def _filled(count: int, dtype: torch.dtype, device: torch.device, poison: bool) -> Tensor:
    raw = torch.full((count * dtype.itemsize,), 0xFF if poison else 0, dtype=torch.uint8, device=device)
    return raw.view(dtype)


def _input(
    launch: KernelSpec, arg: Arg, count: int, dims: Mapping[str, int], device: torch.device,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    dtype = DTYPES[arg.dtype]
    if not dtype.is_floating_point and arg.dtype != "u8":
        found = _indices(launch, arg.name, dims, device, generator)
        zeros = torch.zeros(count if found is None else 0, device=device)
        return (zeros if found is None else found).to(dtype).contiguous()
    if arg.dtype in ("u8", "fp8"):
        raw = torch.empty(count, dtype=torch.uint8, device=device)
        raw.random_(0, 256, generator=generator)
        if arg.dtype == "fp8":  # finite: at most 1.875, and scales are above zero
            raw &= 0x37 if "scale" in arg.name else 0xB7
        return raw.view(dtype)
    values = torch.empty(count, dtype=dtype, device=device)
    if any(word in arg.name for word in ("outer", "alpha", "multiplier")) or arg.name.endswith("scale"):
        return values.uniform_(0.01, 0.02, generator=generator)
    if arg.name in ("weights",):
        return values.uniform_(0.1, 0.3, generator=generator)
    return values.normal_(0.0, 0.5, generator=generator)


def _indices(
    launch: KernelSpec, name: str, dims: Mapping[str, int], device: torch.device, generator: torch.Generator
) -> Tensor | None:
    """Whole numbers that name places which exist; None for a name that is not known, of which zeros exist."""
    tokens, requests, columns = dims["T"], dims["R"], dims["P"]
    each = tokens // requests
    match name:
        case "cu_seqlens_q":
            return torch.arange(requests + 1, device=device) * each
        case "seq_lens":
            return torch.full((requests,), dims["S"] // requests, device=device)
        case "page_table":
            order = torch.randperm(requests * columns, generator=generator, device=device)
            return order.reshape(requests, columns) + 1
        case "slot_mapping":
            return torch.arange(tokens, device=device) + page_size(launch)
        case "positions":
            return torch.arange(tokens, device=device) % each
        case "logit_rows":
            return torch.arange(dims["L"], device=device)
        case "experts":
            return _experts(launch, dims, device, generator)
        case "tile_expert" | "num_tiles" if any(arg.kind == "descriptor" for arg in launch.args):
            experts, count = _tiles(launch, dims)
            shown = torch.arange(count, device=device) % experts
            return shown if name == "tile_expert" else torch.tensor([count], device=device)
    return None


def _experts(
    launch: KernelSpec, dims: Mapping[str, int], device: torch.device, generator: torch.Generator
) -> Tensor:
    """Distinct experts for each token, so many as the launch says, or as it counts pairs."""
    params = dict(launch.params)
    pairs = [evaluate(str(arg.value), dims) for arg in launch.args if arg.name == "num_pairs"]
    top_k = pairs[0] // dims["T"] if pairs else int(params.get("TOP_K", 1))
    experts = int(params.get("NUM_EXPERTS", top_k))
    return torch.rand(dims["T"], experts, generator=generator, device=device).topk(top_k, dim=-1).indices


def _tiles(launch: KernelSpec, dims: Mapping[str, int]) -> tuple[int, int]:
    """(experts, tiles of rows) of a product whose rows are sorted already: the weight's rows, and those of x."""
    params = dict(launch.params)
    mapped = {arg.name: evaluate(arg.shape[0], dims) for arg in launch.args if arg.kind == "descriptor"}
    weight = next(rows for name, rows in mapped.items() if name in ("gate_up", "down"))
    rows = next(iter(mapped.values()))
    return weight // int(params["N"]), rows // int(params["BLOCK_M"])


def arguments_of(launch: KernelSpec, held: Mapping[str, Tensor], dims: Mapping[str, int]) -> list[Any]:
    """Addresses and numbers in the order of a launch's arguments."""
    values: list[Any] = []
    for arg in launch.args:
        if arg.kind != "scalar":
            values.append(held[arg.name].data_ptr())
        elif isinstance(arg.value, str):
            values.append(evaluate(arg.value, dims))
        else:
            values.append(arg.value)
    return values


def unknown_sizes(spec: KernelSpec, dims: Mapping[str, int]) -> str:
    """Why the spec cannot be run at these sizes; empty if it can."""
    try:
        for launch in launches_at(spec, dims):
            for size in (launch.bytes, *launch.grid, *(s for arg in launch.args for s in arg.shape)):
                evaluate(size, dims)
    except ArtifactError as error:
        return str(error)
    return "" if launches_at(spec, dims) else "no launch runs at these sizes"
