"""A quantised checkpoint as a whole: which weights its files hold in which format, each checked when it is read."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from octavo.compiler.checkpoints import compressed, modelopt, mxfp4
from octavo.compiler.checkpoints.checks import check_scale, check_weight
from octavo.compiler.checkpoints.scheme import Group, Scheme
from octavo.compiler.checkpoints.shards import Shards, read_json
from octavo.compiler.checkpoints.stored import StoredWeight
from octavo.compiler.errors import CheckpointError
from octavo.compiler.options import PageFormat

MODELOPT_CONFIG = "hf_quant_config.json"
PAGE_SCALES = ("k_scale", "v_scale")
INPUT_SCALES = ("input_scale", "input_global_scale")
# Ends of names that belong to a quantised weight; a name is a module and its end.
ENDS = frozenset((*modelopt.PARTS, *modelopt.FOREIGN, *compressed.FOREIGN, "weight"))
ENDS |= frozenset(part for parts in compressed.PARTS.values() for part in parts)
# Weights of one input that engines run as one product.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


class Checkpoint:
    """groups: of every quantised module. notes: what the report should say. Raises CheckpointError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_json(directory / "config.json")
        self.scheme = scheme_of(directory, self.config)
        self.shards = Shards(directory)
        self.groups: dict[str, Group] = {}
        self.notes: list[str] = []
        self._ends: dict[str, list[str]] = {}
        for name in self.shards:
            module, _, end = name.rpartition(".")
            if end in ENDS:
                self._ends.setdefault(module, []).append(end)
        if self.scheme.layout == "mxfp4":
            self._find_blocks()
        else:
            self._find_groups()
        _check_siblings(self)

    @property
    def name(self) -> str:
        """Of its directory."""
        return self.directory.resolve().name

    @property
    def pages(self) -> PageFormat:
        return self.scheme.pages

    def __iter__(self) -> Iterator[str]:
        """Modules with quantised weights, in the order of the files."""
        return iter(self.groups)

    def plain(self) -> Iterator[str]:
        """Names of all other tensors but the scales of pages."""
        taken = {f"{module}.{end}" for module in self.groups for end in self._ends.get(module, ())}
        taken |= {module + end for module in self.groups for end in mxfp4.ENDS}
        for name in self.shards:
            if name not in taken and not name.endswith(PAGE_SCALES):
                yield name

    def plain_dtype(self) -> torch.dtype:
        """Of the values that are not quantised."""
        floats = (self.shards.dtype(name) for name in self.plain())
        return next((dtype for dtype in floats if dtype.is_floating_point), torch.bfloat16)

    def read(self, module: str) -> StoredWeight:
        """A module's weight, checked. What the checks noted is in `notes`."""
        if self.scheme.layout == "mxfp4":
            weight = mxfp4.read(module, {end: self.shards[module + end] for end in mxfp4.ENDS})
        else:
            library = modelopt if self.scheme.layout == "modelopt" else compressed
            tensors = {end: self.shards[f"{module}.{end}"] for end in self._ends[module]}
            weight = library.read(module, tensors, self.groups[module])
        self.notes += [note for note in check_weight(weight) if note not in self.notes]
        return weight

    def input_scale(self, module: str) -> float:
        """Outer scale of what a weight is multiplied with, in decode form."""
        library = modelopt if self.scheme.layout == "modelopt" else compressed
        tensors = {end: self.shards[f"{module}.{end}"] for end in self._ends[module]}
        scale = library.read(module, tensors, self.groups[module]).input_scale
        assert scale is not None, f"{module} has no static scale"
        check_scale(f"{module}.input_scale", scale)
        return float(scale)

    def multipliers(self, attention: str) -> tuple[float, float]:
        """Outer scales of the keys and values of an attention, as the files have them; 1 where they have none."""
        found = []
        for end, projection in zip(PAGE_SCALES, ("k_proj", "v_proj"), strict=True):
            names = [f"{attention}.{end}", f"{attention}.{projection}.{end}"]
            name = next((name for name in names if name in self.shards), None)
            if name is None:
                self.notes.append(f"{attention}.{end}: the checkpoint has none, 1 is taken")
                found.append(1.0)
                continue
            check_scale(name, self.shards[name])
            found.append(float(self.shards[name].float().reshape(-1)[0]))
        return found[0], found[1]

    def _find_groups(self) -> None:
        library = modelopt if self.scheme.layout == "modelopt" else compressed
        for module, ends in self._ends.items():
            dtypes = {end: self.shards.dtype(f"{module}.{end}") for end in ends}
            kind = library.kind_of(module, dtypes)
            if kind == "plain" and len(self.shards.shape(f"{module}.{ends[0]}")) < 2:
                continue  # norms, which patterns for products may name too
            group = self.scheme.group_of(module, kind)
            if group is not None:
                self.groups[module] = group
        self._without_input_scales()
        if not self.groups:
            raise CheckpointError(
                f"{self.directory}: its configuration says {self.scheme.layout}, its files hold no quantised weight"
            )

    def _without_input_scales(self) -> None:
        """Where no product has a scale of its inputs, each row has its own; if only some lack it, reading refuses."""
        static = {module: group for module, group in self.groups.items() if group.static_inputs}
        if static and not any({*INPUT_SCALES} & {*self._ends[module]} for module in static):
            self.groups.update(
                {module: replace(group, static_inputs=False) for module, group in static.items()}
            )

    def _find_blocks(self) -> None:
        for name in self.shards:
            if name.endswith(mxfp4.ENDS[0]):
                self.groups[name.removesuffix(mxfp4.ENDS[0])] = self.scheme.groups[0]


def scheme_of(directory: Path, config: Mapping[str, Any]) -> Scheme:
    """Read from hf_quant_config.json and config.json. Raises CheckpointError for what is none we know."""
    where, given = f"{directory / 'config.json'}: quantization_config", quantization_config(config)
    if (directory / MODELOPT_CONFIG).is_file():
        path = directory / MODELOPT_CONFIG
        stated = read_json(path).get("quantization")
        if not isinstance(stated, dict):
            raise CheckpointError(f"{path}: expected `quantization`, got {str(stated)[:80]}")
        if given and given.get("quant_algo") not in (None, stated.get("quant_algo")):
            raise CheckpointError(
                f"{path}: quant_algo is {stated.get('quant_algo')!r} here and {given['quant_algo']!r} in config.json"
            )
        return modelopt.parse(stated, str(path))
    method = given.get("quant_method")
    if method == "modelopt":
        return modelopt.parse(given.get("quantization") or given, where)
    if method == "compressed-tensors":
        return compressed.parse(given, where)
    if method == "mxfp4":
        group = Group(("Linear",), "nvfp4_weight_only", False)
        return Scheme("mxfp4", (group,), tuple(given.get("modules_to_not_convert") or ()))
    raise CheckpointError(f"{where}: expected modelopt, compressed-tensors or mxfp4, got {method!r}")


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the whole model, or of its text part; empty if there is none."""
    own = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return own if isinstance(own, dict) else {}


def is_quantized(directory: Path) -> bool:
    """Whether a directory's configuration says that weights are quantised."""
    if (directory / MODELOPT_CONFIG).is_file():
        return True
    return bool(quantization_config(read_json(directory / "config.json")))


def siblings(modules: Mapping[str, Any]) -> Iterator[list[str]]:
    """Modules that read one input and are run as one product, by their names."""
    for first in modules:
        parent, _, name = first.rpartition(".")
        for names in SIBLINGS:
            family = [f"{parent}.{other}" for other in names]
            if name == names[0] and all(other in modules for other in family):
                yield family


def _check_siblings(checkpoint: Checkpoint) -> None:
    """One length; outer scales may differ, each column then has its own alpha."""
    unequal = 0
    for family in siblings(checkpoint.groups):
        first = next(end for end in ("weight_packed", "weight") if end in checkpoint._ends[family[0]])
        lengths = {module: checkpoint.shards.shape(f"{module}.{first}")[-1] for module in family}
        if len(set(lengths.values())) > 1:
            raise CheckpointError(f"{family[0]}: expected rows of one length in its siblings, got {lengths}")
        scales = {_outer(checkpoint, module) for module in family}
        unequal += len(scales) > 1
    if unequal:
        checkpoint.notes.append(
            f"{unequal} families of products (q, k, v; gate, up) have outer scales of their own: alpha by column"
        )


def _outer(checkpoint: Checkpoint, module: str) -> tuple[float, ...]:
    ends = ("weight_scale_2", "weight_global_scale")
    name = next((f"{module}.{end}" for end in ends if f"{module}.{end}" in checkpoint.shards), None)
    return () if name is None else tuple(torch.atleast_1d(checkpoint.shards[name]).tolist())
