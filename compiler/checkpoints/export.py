"""A quantised artifact -> a Hugging Face directory that other engines load: its codes and scales, to the bit.

Products that the compiler joined are taken apart into the model's own modules again. What it left as it was, and all
files beside the weights, are those of the directory of the model that was compiled.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.compiler.artifact import Artifact
from octavo.compiler.checkpoints.checkpoint import Checkpoint, is_quantized
from octavo.compiler.checkpoints.convert import Target, copy_others, parts_of, write_configs
from octavo.compiler.checkpoints.scheme import Group
from octavo.compiler.checkpoints.shards import Shards, ShardWriter, read_json
from octavo.compiler.checkpoints.sources import modules_of
from octavo.compiler.checkpoints.stored import StoredWeight
from octavo.compiler.errors import CheckpointError
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS, unswizzle
from octavo.compiler.options import PageFormat
from octavo.compiler.target import load_target

# How far values may be from those of the directory, as a share of their size. Nearest codes are off by 10 % and 3 %;
# of another model's weights, by 140 %.
ROOM = {"nvfp4": 0.3, "nvfp4_weight_only": 0.3, "fp8": 0.1}
# Ends of names of norms whose weights are scaled so that what products read is more alike.
BALANCED = "_balanced"
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "u8": torch.uint8}


@dataclass(frozen=True)
class Part:
    """Rows of a weight of the artifact that are a whole module of the files.

    outer   of each row, fp32
    turned  of experts: rows of gates and ups are in turn, as GPU kernels read them
    """

    weight: str
    format: Any
    rows: Tensor
    outer: Tensor
    input_scale: float | None
    turned: bool


def export_checkpoint(artifact: Artifact, source: Path, destination: Path, layout: Target) -> Path:
    """Write `destination`, which must not be there; it appears when it is complete, or not at all.

    source  the directory that the model was loaded from, quantised or not
    Raises CheckpointError, which names the tensor, for what the layout has no words for.
    """
    if os.path.lexists(destination):
        raise CheckpointError(
            f"{destination}: expected no file there, got one; choose another path or remove it"
        )
    told = artifact.manifest["provenance"].get("quantization") or {}
    if not told.get("sources", {}).get("weights"):
        why = "it was compiled from a dumped graph" if told else "nothing of it is quantised"
        raise CheckpointError(f"{artifact.path}: expected quantised products of a model, got none: {why}")
    files = _Files(source)
    parts = dict(_parts(artifact, told, files))
    pages, scales = _pages(told, layout)
    folder = destination.with_name(f".{destination.name}-{os.getpid()}.partial")
    folder.mkdir()
    try:
        groups = _write(artifact, files, parts, scales, layout, folder)
        copy_others(source, folder)
        plain = sorted({*files.modules, "lm_head"} - set(parts))
        write_configs(folder, files.config, layout, groups, plain, pages)
        os.rename(folder, destination)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return destination


class _Files:
    """modules: with matrices, quantised or not. plain: names of tensors that are not of quantised modules."""

    def __init__(self, directory: Path) -> None:
        self.config = read_json(directory / "config.json")
        self.checkpoint = Checkpoint(directory) if is_quantized(directory) else None
        self.shards = Shards(directory) if self.checkpoint is None else self.checkpoint.shards
        self.plain = list(self.shards if self.checkpoint is None else self.checkpoint.plain())
        self.modules = {
            name.rpartition(".")[0] for name in self.plain if len(self.shards.shape(name)) >= 2
        } | set(self.checkpoint or ())

    def value(self, module: str) -> Tensor:
        if self.checkpoint is not None and module in self.checkpoint.groups:
            return self.checkpoint.read(module).dequantize(torch.float32)
        return self.shards[f"{module}.weight"].float()

    def rows(self, module: str) -> int:
        for end in ("weight_packed", "weight"):
            if f"{module}.{end}" in self.shards:
                return self.shards.shape(f"{module}.{end}")[0]
        raise CheckpointError(f"{module}: expected a matrix of a module of its own, got another form")


def _parts(artifact: Artifact, told: Mapping[str, Any], files: _Files) -> Iterator[tuple[str, Part]]:
    """Every quantised module of the files. Raises CheckpointError for a weight that is not all of one product's."""
    places: dict[str, list[tuple[str, Tensor, Tensor]]] = {}
    for weight, made in told["sources"]["weights"].items():
        runs = made["rows"]
        if not runs:
            raise CheckpointError(
                f"{weight}: it consists of the model's weights in another way than row by row"
            )
        start, outer = 0, _outer(artifact, weight, told)
        for leaf, first, count, step in runs:
            rows = torch.arange(first, first + count * step, step)
            places.setdefault(leaf, []).append((weight, rows, torch.arange(start, start + count)))
            start += count
        if start != len(outer):
            raise CheckpointError(f"{weight}: expected {start} outer scales of rows, got {len(outer)}")
    for leaf, found in places.items():
        if "embed" in leaf:
            raise CheckpointError(
                f"{leaf}: logits share it with the embeddings, which engines do not read as codes"
            )
        weight = found[0][0]
        rows = torch.cat([of for _, of, _ in found])
        order = torch.cat([own for _, _, own in found])[rows.argsort()]
        modules = modules_of(leaf, files.modules)
        counts = [files.rows(module) for module in modules]
        if {name for name, _, _ in found} != {weight} or rows.sort().values.tolist() != list(
            range(sum(counts))
        ):
            got = f"{len(rows)} rows of products, {sum(counts)} rows in {modules[:2] or 'no module'}"
            raise CheckpointError(
                f"{leaf}: expected every row once, in one product of the artifact, got {got}"
            )
        format, scale = _precision(told, weight)
        outer, turned = (
            _outer(artifact, weight, told),
            weight in told["plan"]["products"] and _is_swizzled(artifact),
        )
        for module, own in zip(modules, order.split(counts), strict=True):
            yield module, Part(weight, format, own, outer[own], scale, turned)


def _precision(told: Mapping[str, Any], weight: str) -> tuple[str, float | None]:
    """Format, and outer scale of the input; of experts' downs, that of the hidden state."""
    name = told["sources"]["weights"][weight]["product"]
    facts = told["plan"]["products"][name]
    return facts["format"], facts["input_scale" if weight == name else "hidden_scale"]


def _outer(artifact: Artifact, weight: str, told: Mapping[str, Any]) -> Tensor:
    """fp32 (rows,). FP8 with scales of inputs by row has no other factor in alpha."""
    runs = told["outer_scales"].get(weight)
    if runs is None:
        alpha = _tensor(artifact, f"{weight}_alpha")
        rows = _tensor(artifact, f"{weight}_codes")[..., 0].numel()
        return alpha.reshape(-1).repeat_interleave(rows // alpha.numel())
    return torch.cat([torch.full((int(count),), value, dtype=torch.float32) for count, value in runs])


def _tensor(artifact: Artifact, name: str) -> Tensor:
    held = artifact.weights[name]
    raw = torch.frombuffer(bytearray(held.array.tobytes()), dtype=torch.uint8)
    return raw.view(TORCH[held.dtype]).reshape(held.shape)


def _write(
    artifact: Artifact, files: _Files, parts: Mapping[str, Part], scales: Mapping[str, Tensor], layout: Target,
    folder: Path,
) -> dict[str, Group]:  # fmt: skip
    """All tensors, a product at a time. Returns the groups of the quantised modules."""
    writer, groups = ShardWriter(folder), {}
    balanced = {name.removesuffix(BALANCED): name for name in artifact.weights if name.endswith(BALANCED)}
    if lost := sorted(set(balanced) - set(files.plain)):
        raise CheckpointError(
            f"{lost[0]}: the artifact multiplies by a scaled copy, and the files hold no such tensor"
        )
    for name in files.plain:
        if name in balanced:
            writer.add(name, _tensor(artifact, balanced[name]))
        elif name.rpartition(".")[0] not in parts or not name.endswith(".weight"):
            writer.add(name, files.shards[name])
    held: tuple[str, _Rows] = ("", _Rows(torch.empty(0), None))
    for module, part in parts.items():
        if held[0] != part.weight:
            held = part.weight, _Rows.of(artifact, part)
        stored = held[1].stored(module, part)
        _check_value(stored, files.value(module), bool(balanced))
        groups[module] = Group(
            ("Linear",),
            part.format,
            stored.input_scale is not None,
            part.format == "fp8" and stored.outer.dim() > 0,
        )
        if part.format == "nvfp4" and stored.input_scale is None:
            raise CheckpointError(
                f"{module}: its inputs have outer scales by token, and no layout says so of NVFP4; compile with "
                'activations="static"'
            )
        for end, tensor in parts_of(stored, layout).items():
            writer.add(f"{module}.{end}", tensor)
    for name, tensor in scales.items():
        writer.add(name, tensor)
    writer.finish()
    return groups


@dataclass(frozen=True)
class _Rows:
    """codes (rows, ...) and linear scales (rows, K / 16) of a weight of the artifact, of all experts."""

    codes: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, artifact: Artifact, part: Part) -> "_Rows":
        codes = _tensor(artifact, f"{part.weight}_codes")
        if part.format == "fp8":
            return cls(_in_order(part, codes).flatten(0, -2), None)
        scales = _tensor(artifact, f"{part.weight}_scales")
        if _is_swizzled(artifact):
            blocks = codes.shape[-1] * 2 // BLOCK_ELEMENTS
            flat = scales.reshape(-1) if codes.dim() == 2 else scales.reshape(len(codes), -1)
            one = flat[None] if codes.dim() == 2 else flat
            linear = torch.stack([unswizzle(each, codes.shape[-2], blocks).view(torch.uint8) for each in one])
            scales = linear.view(torch.float8_e4m3fn).reshape(*codes.shape[:-1], blocks)
        scales = _in_order(part, scales)
        return cls(_in_order(part, codes).flatten(0, -2), scales.flatten(0, -2))

    def stored(self, module: str, part: Part) -> StoredWeight:
        codes = self.codes.view(torch.uint8)[part.rows].view(self.codes.dtype)
        scales = None
        if self.scales is not None:
            scales = self.scales.view(torch.uint8)[part.rows].view(torch.float8_e4m3fn)
        outer = part.outer
        if bool((outer == outer[0]).all()) and (scales is not None or part.input_scale is not None):
            outer = outer[0]
        elif scales is not None:
            raise CheckpointError(
                f"{module}: its rows have outer scales of their own, and no layout says so of NVFP4"
            )
        is_quantised = part.format != "nvfp4_weight_only" and part.input_scale is not None
        given = torch.tensor(part.input_scale, dtype=torch.float32) if is_quantised else None
        return StoredWeight(module, "octavo", part.format, codes, scales, outer, given)


def _is_swizzled(artifact: Artifact) -> bool:
    return load_target(artifact.manifest["target"]).family != "cpp"


def _in_order(part: Part, rows: Tensor) -> Tensor:
    """Rows of gates and of ups after them."""
    if rows.dim() != 3 or not part.turned:
        return rows
    both = rows.view(torch.uint8).unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    result: Tensor = both.contiguous().view(rows.dtype)
    return result


def _check_value(stored: StoredWeight, wanted: Tensor, is_balanced: bool) -> None:
    """The artifact is of the model in the directory.

    is_balanced  rows and columns may be scaled by powers of two, which norms and other rows make up for
    """
    if tuple(wanted.shape) != stored.shape:
        raise CheckpointError(
            f"{stored.name}: expected {tuple(wanted.shape)} as in the files, got {stored.shape}"
        )
    values = stored.dequantize(torch.float32)
    if is_balanced:
        values = values * torch.exp2(-_shifts(values, wanted))
    error, size, room = float((values - wanted).norm()), float(wanted.norm()), ROOM[stored.format]
    if error > room * size:
        raise CheckpointError(
            f"{stored.name}: its values are {error / size if size else math.inf:.0%} off those of the files, "
            f"expected at most {room:.0%}; the artifact was compiled from another model"
        )


def _shifts(values: Tensor, wanted: Tensor) -> Tensor:
    """log2 of what rows and columns were scaled by."""
    logs = (values / wanted).abs().log2()
    logs = torch.where(logs.isfinite(), logs, torch.full_like(logs, math.nan))
    rows = logs.nanmedian(1, keepdim=True).values.nan_to_num(0.0)
    columns = (logs - rows).nanmedian(0, keepdim=True).values.nan_to_num(0.0)
    return (rows + columns).round()


def _pages(told: Mapping[str, Any], layout: Target) -> tuple[PageFormat, dict[str, Tensor]]:
    """The format of all pages, and the tensors that hold their multipliers."""
    plan, modules = told["plan"]["pages"], told["sources"]["pages"]
    formats = {number: facts["format"] for number, facts in plan.items()}
    if set(formats.values()) <= {"bf16"}:
        return "bf16", {}
    if len(set(formats.values())) > 1:
        plain = next(modules[number] for number, format in formats.items() if format == "bf16")
        raise CheckpointError(
            f"{plain}: its pages stay as they are, and {layout} has one format for all pages"
        )
    scales = {}
    for number, facts in plan.items():
        for letter in "kv":
            below = f".{letter}_proj" if layout == "modelopt" else ""
            value = torch.tensor(facts[f"{letter}_multiplier"], dtype=torch.float32)
            scales[f"{modules[number]}{below}.{letter}_scale"] = (
                value if layout == "modelopt" else value.reshape(1)
            )
    return next(iter(formats.values())), scales
