"""A Hugging Face directory -> one with weights of NVFP4, tensor by tensor, in memory of a layer and a shard.

By names alone, without the model: what multiplies hidden states is quantised; what makes logits, selects experts,
embeds or drafts stays. Inputs stay as they are, as no calibration runs here.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from octavo.compiler import nvfp4, nvfp4_weights
from octavo.compiler.checkpoints import compressed, modelopt
from octavo.compiler.checkpoints.checkpoint import MODELOPT_CONFIG, is_quantized, siblings
from octavo.compiler.checkpoints.scheme import Group
from octavo.compiler.checkpoints.shards import INDEX, MAX_SHARD_BYTES, Shards, ShardWriter, read_json
from octavo.compiler.checkpoints.stored import CHUNK_ELEMENTS, StoredWeight, place
from octavo.compiler.errors import CheckpointError
from octavo.compiler.options import PageFormat

Target = Literal["modelopt", "compressed-tensors"]
Method = Literal["nearest", "search"]
Progress = Callable[[str, int, int], None]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GROUP = Group(("Linear",), "nvfp4_weight_only", False)
# Globs of modules, and why they stay.
HIGH = {
    "*lm_head": "makes the logits",
    "*embed*": "a table of embeddings",
    "*norm*": "a norm",
    "*router*": "selects experts",
    "*.gate": "selects experts",
    "*shared_expert_gate": "a gate",
    "*kv_a_proj*": "makes the latent that attention keeps",
    "*kv_b_proj": "absorbed by latent attention",
    "*conv*": "a convolution",
    "*mtp*": "belongs to a head that drafts tokens",
    "*eh_proj": "belongs to a head that drafts tokens",
    "*vision*": "sees images",
    "*visual*": "sees images",
}
# Endings of files that hold weights, which are not copied.
WEIGHT_FILES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"))


@dataclass
class Converted:
    """What was done. errors: of every quantised module, |difference| / |weight|; kept: of every other, why."""

    directory: Path
    bytes_before: int
    bytes_after: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def convert(
    source: Path, destination: Path, target: Target, method: Method = "search", keep: Sequence[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES, progress: Progress | None = None,
) -> Converted:  # fmt: skip
    """Write `destination`, which must not be there; it appears when it is complete, or not at all.

    keep: globs of modules that stay, beside HIGH. Raises CheckpointError, which names the tensor or the file.
    """
    if os.path.lexists(destination):
        raise CheckpointError(
            f"{destination}: expected no file there, got one; choose another path or remove it"
        )
    config = read_json(source / "config.json")
    if is_quantized(source):
        raise CheckpointError(f"{source}: its weights are quantised already; expected bf16, fp16 or fp32")
    shards = Shards(source)
    result = Converted(destination, sum(map(shards.num_bytes, shards)))
    chosen = _choose(shards, keep, result.kept)
    folder = destination.with_name(f".{destination.name}-{os.getpid()}.partial")
    try:
        os.mkdir(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: expected a place to write into, got {error.strerror}") from None
    try:
        writer = ShardWriter(folder, max_shard_bytes)
        _write_tensors(shards, chosen, target, method, writer, result, progress)
        result.bytes_after = writer.num_bytes
        copy_others(source, folder)
        write_configs(folder, config, target, dict.fromkeys(chosen, GROUP), _plain(shards, chosen), "bf16")
        os.rename(folder, destination)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return result


def _choose(shards: Shards, keep: Sequence[str], kept: dict[str, str]) -> dict[str, None]:
    """Modules whose weights are quantised, in the order of the files; `kept` gets the others with reasons."""
    used: set[str] = set()
    chosen: dict[str, None] = {}
    for name in shards:
        module, _, end = name.rpartition(".")
        globs = [glob for glob in keep if fnmatchcase(module, glob)]
        used.update(globs)
        if len(shards.shape(name)) < 2:
            continue
        reason = f"named by {globs[0]!r}" if globs else _why_kept(name, module, end, shards)
        if reason:
            kept[module if end == "weight" else name] = reason
        else:
            chosen[module] = None
    if unused := [glob for glob in keep if glob not in used]:
        raise CheckpointError(
            f"keep: {unused[0]!r} names no module, such as {next(iter(shards)).rpartition('.')[0]}"
        )
    if not chosen:
        raise CheckpointError(f"{shards.directory}: holds no weight that is quantised; kept: {kept}")
    return chosen


def _why_kept(name: str, module: str, end: str, shards: Shards) -> str:
    high = next((reason for glob, reason in HIGH.items() if fnmatchcase(module, glob)), "")
    shape, dtype = shards.shape(name), shards.dtype(name)
    if high or dtype not in FLOATS:
        return high or f"of {dtype}"
    if end != "weight" or len(shape) != 2:
        return f"no matrix of a module, but {tuple(shape)}"
    if shape[1] % nvfp4.BLOCK_ELEMENTS:
        return f"rows of {shape[1]} elements are not whole blocks of {nvfp4.BLOCK_ELEMENTS}"
    return "" if shape[0] >= nvfp4.BLOCK_ELEMENTS else f"has {shape[0]} outputs: a gate"


def _plain(shards: Shards, chosen: Mapping[str, None]) -> list[str]:
    """Modules with matrices that stay; the logits' even where they share the embeddings' weight."""
    matrices = {name.rpartition(".")[0] for name in shards if len(shards.shape(name)) >= 2}
    return sorted({*matrices, "lm_head"} - set(chosen))


def _write_tensors(
    shards: Shards, chosen: Mapping[str, None], target: Target, method: Method, writer: ShardWriter,
    result: Converted, progress: Progress | None,
) -> None:  # fmt: skip
    family_of = {module: family for family in siblings(chosen) for module in family}
    outers: dict[str, Tensor] = {}
    for number, name in enumerate(shards):
        if progress is not None:
            progress(name, number, len(shards))
        module, _, end = name.rpartition(".")
        if module not in chosen or end != "weight":
            writer.add(name, shards[name])
            continue
        if module not in outers:
            family = family_of.get(module, [module])
            outer = _outer(shards, family, target, method)
            outers.update(dict.fromkeys(family, outer))
        weight, result.errors[module] = _quantize(module, shards[name], outers[module], method)
        for part, tensor in parts_of(weight, target).items():
            writer.add(f"{module}.{part}", tensor)
    writer.finish()


def parts_of(weight: StoredWeight, target: Target) -> dict[str, Tensor]:
    """The tensors of a weight in a layout, by the ends of their names."""
    return modelopt.parts_of(weight) if target == "modelopt" else compressed.parts_of(weight)


def _outer(shards: Shards, family: Sequence[str], target: Target, method: Method) -> Tensor:
    """One outer scale for all of a family, which the layout gives back to the bit."""
    largest = torch.zeros(())
    for module in family:
        name = f"{module}.weight"
        for part in _chunks(shards[name]):
            amax = part.abs().amax()
            if not bool(amax.isfinite()):
                raise CheckpointError(
                    f"{place(name)}: holds elements that are not finite; mend the checkpoint or keep this module"
                )
            largest = torch.maximum(largest, amax)
    bound = nvfp4.E4M3_MAX if method == "nearest" else nvfp4.E4M3_MAX_SEARCHED
    outer = nvfp4.outer_scale(largest, bound)
    return outer if target == "modelopt" else compressed.invertible(outer)


def _quantize(module: str, weight: Tensor, outer: Tensor, method: Method) -> tuple[StoredWeight, float]:
    """The weight's parts, and how far its values are from it."""
    rows, length = weight.shape
    codes = torch.empty(rows, length // 2, dtype=torch.uint8)
    scales = torch.empty(rows, length // nvfp4.BLOCK_ELEMENTS, dtype=torch.float8_e4m3fn)
    start, error, size = 0, 0.0, 0.0
    for part in _chunks(weight):
        found = (
            nvfp4.quantize(part, outer) if method == "nearest" else nvfp4_weights.quantize_weight(part, outer)
        )
        place_of = slice(start, start + len(part))
        codes[place_of], scales[place_of] = found
        error += float((nvfp4.dequantize(*found, outer) - part).square().sum(dtype=torch.float64))
        size += float(part.square().sum(dtype=torch.float64))
        start += len(part)
    stored = StoredWeight(module, "octavo", "nvfp4_weight_only", codes, scales, outer)
    return stored, (error / size) ** 0.5 if size else 0.0


def _chunks(weight: Tensor) -> Iterator[Tensor]:
    """Some rows at a time, as fp32."""
    for part in weight.split(max(1, CHUNK_ELEMENTS // weight.shape[1])):
        yield part.float()


def copy_others(source: Path, destination: Path) -> None:
    """The files beside the weights: tokenizer, generation settings, the model's own code."""
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in WEIGHT_FILES or path.name.endswith(".index.json") or path.name == INDEX
        if path.is_file() and not is_weights and path.name not in ("config.json", MODELOPT_CONFIG):
            shutil.copyfile(path, destination / path.name)


def write_configs(
    folder: Path, config: Mapping[str, object], target: Target, groups: Mapping[str, Group],
    plain: Sequence[str], pages: PageFormat,
) -> None:  # fmt: skip
    """config.json with what the layout says of its weights, and the file that ModelOpt has beside it."""
    if target == "modelopt":
        own = modelopt.config_of(groups, plain, pages)
        (folder / MODELOPT_CONFIG).write_text(json.dumps(own, indent=4) + "\n")
        embedded = modelopt.embedded(own)
    else:
        embedded = compressed.config_of(groups, plain, pages)
    whole = {**config, "quantization_config": embedded}
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
