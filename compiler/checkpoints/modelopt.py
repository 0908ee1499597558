"""The layout of NVIDIA's ModelOpt: outer scales in decode form, hf_quant_config.json.

NVFP4: weight u8 (N, K / 2), weight_scale E4M3 (N, K / 16), weight_scale_2 fp32 (); FP8: weight E4M3, weight_scale fp32
() or (N,); input_scale fp32 (); k_scale and v_scale below k_proj and v_proj.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.compiler.checkpoints.scheme import Group, Kind, Scheme
from octavo.compiler.checkpoints.stored import StoredWeight, place
from octavo.compiler.errors import CheckpointError
from octavo.compiler.options import PageFormat
from octavo.compiler.precision import Format
from octavo.compiler.version import VERSION

ALGORITHMS: dict[str, tuple[Format, bool, bool]] = {
    "NVFP4": ("nvfp4", True, False),
    "W4A16_NVFP4": ("nvfp4_weight_only", False, False),
    "FP8": ("fp8", True, False),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", False, True),
}
PAGES: dict[str | None, PageFormat] = {None: "bf16", "FP8": "fp8", "NVFP4": "nvfp4"}
EIGHT_BITS = {"dynamic": False, "num_bits": 8, "type": "float"}
FOUR_BITS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
# How config.json spells the algorithms.
SCHEMES: dict[str, dict[str, Any]] = {
    "NVFP4": {"input_activations": FOUR_BITS, "weights": FOUR_BITS},
    "W4A16_NVFP4": {"weights": FOUR_BITS},
    "FP8": {"input_activations": EIGHT_BITS, "weights": EIGHT_BITS},
    "FP8_PER_CHANNEL_PER_TOKEN": {
        "input_activations": EIGHT_BITS, "weights": {**EIGHT_BITS, "strategy": "channel"},
    },
}  # fmt: skip
PARTS = ("weight_scale", "weight_scale_2", "input_scale")
FOREIGN = {
    "pre_quant_scale": "AWQ's smoothing of inputs",
    "svdquant_lora_a": "SVDQuant's low-rank part",
    "weight_zero_point": "asymmetric codes",
}


def parse(config: Mapping[str, Any], where: str) -> Scheme:
    """config: `quantization` of hf_quant_config.json, or quantization_config of config.json."""
    algorithm = config.get("quant_algo")
    ignore = tuple(config.get("exclude_modules") or config.get("ignore") or ())
    if algorithm == "MIXED_PRECISION":
        layers = config.get("quantized_layers") or {}
        groups = tuple(
            _group((name,), layer.get("quant_algo"), layer, where) for name, layer in layers.items()
        )
    else:
        groups = (_group(("Linear",), algorithm, config, where),)
    return Scheme("modelopt", groups, ignore, _pages(config, where))


def _group(targets: tuple[str, ...], algorithm: Any, config: Mapping[str, Any], where: str) -> Group:
    if algorithm not in ALGORITHMS:
        why = ""
        if algorithm == "W4A8_NVFP4_FP8":
            why = "; its block scales are for an outer scale of amax / 448, and its inputs are FP8: no product has both"
        raise CheckpointError(
            f"{where}: expected quant_algo {', '.join(ALGORITHMS)} or MIXED_PRECISION, got {algorithm!r} for "
            f"{targets[0]}{why}"
        )
    size = config.get("group_size") or 16
    if "NVFP4" in algorithm and size != 16:
        raise CheckpointError(f"{where}: expected group_size 16 for {algorithm}, got {size}")
    return Group(targets, *ALGORITHMS[algorithm])


def _pages(config: Mapping[str, Any], where: str) -> PageFormat:
    algorithm = config.get("kv_cache_quant_algo", config.get("kv_cache_scheme"))
    if isinstance(algorithm, dict):  # as config.json has it
        algorithm = (
            "FP8" if (algorithm.get("num_bits"), algorithm.get("type")) == (8, "float") else str(algorithm)
        )
    if algorithm not in PAGES:
        raise CheckpointError(f"{where}: expected kv_cache_quant_algo FP8, NVFP4 or null, got {algorithm!r}")
    return PAGES[algorithm]


def kind_of(module: str, dtypes: Mapping[str, torch.dtype]) -> Kind:
    """By the dtypes of the module's tensors. Raises CheckpointError for parts that no product has."""
    for end, meaning in FOREIGN.items():
        if end in dtypes:
            raise CheckpointError(f"{place(module)}.{end}: {meaning} is not read; export it without")
    weight = dtypes.get("weight")
    if weight == torch.uint8:
        return "nvfp4"
    if weight == torch.float8_e4m3fn:
        return "fp8"
    if "weight_scale" in dtypes:
        raise CheckpointError(f"{place(module)}.weight: expected codes beside weight_scale, got {weight}")
    return "plain"


def read(module: str, tensors: Mapping[str, Tensor], group: Group) -> StoredWeight:
    """tensors: the module's, by the ends of their names. Shapes and scales are the caller's to check."""
    parts = {end: tensors[end] for end in ("weight", *PARTS) if end in tensors}
    needed = (
        ["weight_scale"]
        + ["weight_scale_2"] * (group.format != "fp8")
        + ["input_scale"] * group.static_inputs
    )
    require(module, parts, needed)
    is_fp8 = group.format == "fp8"
    outer = parts["weight_scale" if is_fp8 else "weight_scale_2"].float()
    given = parts["input_scale"].float().reshape(-1)[0] if group.static_inputs else None
    return StoredWeight(
        module, "modelopt", group.format, parts["weight"], None if is_fp8 else parts["weight_scale"],
        outer.reshape(-1) if outer.numel() > 1 else outer.reshape(()), given, parts,
    )  # fmt: skip


def require(module: str, parts: Mapping[str, Tensor], needed: Iterable[str]) -> None:
    """Raise CheckpointError for the first part that is not there."""
    for end in needed:
        if end not in parts:
            why = "the checkpoint is not complete"
            if end.startswith("input"):
                why = (
                    "an expert that calibration never routed to has none: calibrate with more text, or export without "
                    "quantised inputs"
                )
            raise CheckpointError(
                f"{place(f'{module}.{end}')}: expected one beside the weight, got none; {why}"
            )


def parts_of(weight: StoredWeight) -> dict[str, Tensor]:
    """The tensors to write, by the ends of their names. What was read in this layout stays as it was."""
    if weight.layout == "modelopt":
        return dict(weight.parts)
    if weight.format == "fp8":
        parts = {"weight": weight.codes, "weight_scale": weight.outer}
    else:
        assert weight.scales is not None
        parts = {"weight": weight.codes, "weight_scale": weight.scales, "weight_scale_2": weight.outer}
    if weight.input_scale is not None:
        parts["input_scale"] = weight.input_scale
    return parts


def config_of(groups: Mapping[str, Group], plain: Iterable[str], pages: PageFormat) -> dict[str, Any]:
    """hf_quant_config.json of modules with their groups, and of those that stay plain.

    Engines know the layout by the producer's name; who wrote it stands as its version.
    """
    algorithms = {module: _algorithm(module, group) for module, group in groups.items()}
    found = sorted(set(algorithms.values()))
    quantization: dict[str, Any] = {
        "quant_algo": found[0] if len(found) == 1 else "MIXED_PRECISION",
        "kv_cache_quant_algo": {format: name for name, format in PAGES.items()}[pages],
    }
    if len(found) == 1:
        quantization |= _of_layer(found[0])
        quantization["exclude_modules"] = sorted(plain)
    else:
        quantization["quantized_layers"] = {m: _of_layer(name) for m, name in sorted(algorithms.items())}
    return {
        "producer": {"name": "modelopt", "version": f"octavo-{VERSION}"},
        "quantization": quantization,
    }


def _algorithm(module: str, group: Group) -> str:
    facts = group.format, group.static_inputs, group.by_row
    for name, known in ALGORITHMS.items():
        if known == facts:
            return name
    raise CheckpointError(
        f"{module}: ModelOpt's layout has no name for {group.format} with "
        f"{'static scales' if group.static_inputs else 'scales by token'} of inputs and weights by "
        f"{'row' if group.by_row else 'tensor'}; write compressed-tensors"
    )


def _of_layer(algorithm: str) -> dict[str, Any]:
    return {"quant_algo": algorithm, **({"group_size": 16} if "NVFP4" in algorithm else {})}


def embedded(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of it as quantization_config, from hf_quant_config.json."""
    given = config["quantization"]
    layers = given.get("quantized_layers") or {"Linear": given}
    targets: dict[str, list[str]] = {}
    for name, layer in layers.items():
        targets.setdefault(layer["quant_algo"], []).append(name)
    result: dict[str, Any] = {
        "quant_method": "modelopt", "quant_algo": given["quant_algo"], "producer": config["producer"],
        "ignore": given.get("exclude_modules", []),
        "config_groups": {
            f"group_{number}": {**SCHEMES[algorithm], "targets": sorted(names)}
            for number, (algorithm, names) in enumerate(targets.items())
        },
    }  # fmt: skip
    if "quantized_layers" in given:
        result["quantized_layers"] = given["quantized_layers"]
    if (pages := given["kv_cache_quant_algo"]) is not None:
        result["kv_cache_scheme"] = EIGHT_BITS if pages == "FP8" else pages
    return result
