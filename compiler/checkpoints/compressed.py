"""The layout of compressed-tensors: outer scales of NVFP4 in encode form, quantization_config in config.json.

NVFP4 ("nvfp4-pack-quantized"): weight_packed u8 (N, K / 2), weight_scale E4M3 (N, K / 16), weight_global_scale and
input_global_scale fp32 (1,), both 1 / outer. FP8 ("float-quantized"): weight E4M3, weight_scale (1,) or (N, 1) and
input_scale (1,), as they multiply. k_scale and v_scale below the attention.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.compiler.checkpoints.modelopt import require
from octavo.compiler.checkpoints.scheme import Group, Kind, Scheme
from octavo.compiler.checkpoints.stored import StoredWeight, place
from octavo.compiler.errors import CheckpointError
from octavo.compiler.options import PageFormat

PACKED, EIGHT_BITS, MIXED = "nvfp4-pack-quantized", "float-quantized", "mixed-precision"
PARTS = {
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "fp8": ("weight", "weight_scale", "input_scale"),
}
FOREIGN = {
    "weight_zero_point": "asymmetric codes",
    "weight_g_idx": "columns in another order",
    "weight_shape": "codes of integers",
}


def parse(config: Mapping[str, Any], where: str) -> Scheme:
    """config: quantization_config of config.json."""
    for key in ("transform_config", "sparsity_config"):
        value = config.get(key) or {}
        if value.get("config_groups") or value.get("format", "dense") != "dense":
            raise CheckpointError(
                f"{where}: {key} is not read; export the model without rotations and sparsity"
            )
    default = config.get("format")
    groups = tuple(
        _group(group, group.get("format") or default, f"{where}, {name}")
        for name, group in (config.get("config_groups") or {}).items()
    )
    if not groups:
        raise CheckpointError(f"{where}: expected config_groups, got none")
    return Scheme("compressed-tensors", groups, tuple(config.get("ignore") or ()), _pages(config, where))


def _group(group: Mapping[str, Any], layout: Any, where: str) -> Group:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    targets = tuple(group.get("targets") or ())
    facts = {key: weights.get(key) for key in ("num_bits", "type", "strategy", "group_size")}
    if layout == PACKED and facts == dict(num_bits=4, type="float", strategy="tensor_group", group_size=16):
        if inputs is None:
            return Group(targets, "nvfp4_weight_only", False)
        # "local": block scales of the moment, below the one outer scale in the files.
        if (inputs.get("num_bits"), inputs.get("dynamic")) == (4, "local"):
            return Group(targets, "nvfp4", True)
    elif layout in (EIGHT_BITS, "naive-quantized") and facts["type"] == "float" and facts["num_bits"] == 8:
        if facts["strategy"] in ("tensor", "channel") and inputs is not None:
            by_row = facts["strategy"] == "channel"
            kind: Any = inputs.get("num_bits"), inputs.get("strategy"), bool(inputs.get("dynamic"))
            if kind in ((8, "token", True), (8, "tensor", False)):
                return Group(targets, "fp8", kind[1] == "tensor", by_row)
    raise CheckpointError(
        f"{where}: expected {PACKED} (blocks of 16; inputs of static outer scales, or plain) or {EIGHT_BITS} (weights "
        "by tensor or channel; inputs by token, or by tensor and static: a scale of all rows of the moment would make "
        f"a token depend on its batch), got format {layout!r}, weights {facts}, inputs {_facts(inputs)}"
    )


def _facts(inputs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if inputs is None else {key: inputs.get(key) for key in ("num_bits", "strategy", "dynamic")}


def _pages(config: Mapping[str, Any], where: str) -> PageFormat:
    scheme = config.get("kv_cache_scheme")
    if not scheme:
        return "bf16"
    found = (
        scheme.get("num_bits"),
        scheme.get("type"),
        scheme.get("strategy", "tensor"),
        scheme.get("dynamic"),
    )
    if found[1] == "float" and not found[3] and found[::2] == (8, "tensor"):
        return "fp8"
    if found[1] == "float" and found[::2] == (4, "tensor_group"):
        return "nvfp4"
    raise CheckpointError(
        f"{where}: expected kv_cache_scheme of float, 8 bits by tensor or 4 bits by tensor_group, static, got {scheme}"
    )


def kind_of(module: str, dtypes: Mapping[str, torch.dtype]) -> Kind:
    """By the dtypes of the module's tensors. Raises CheckpointError for parts that no product has."""
    for end, meaning in FOREIGN.items():
        if end in dtypes:
            raise CheckpointError(f"{place(module)}.{end}: {meaning} are not read")
    if "weight_packed" in dtypes:
        return "nvfp4"
    if dtypes.get("weight") == torch.float8_e4m3fn:
        return "fp8"
    if "weight_scale" in dtypes:
        raise CheckpointError(
            f"{place(module)}.weight: expected codes beside weight_scale, got {dtypes.get('weight')}"
        )
    return "plain"


def read(module: str, tensors: Mapping[str, Tensor], group: Group) -> StoredWeight:
    """tensors: the module's, by the ends of their names. Shapes and scales are the caller's to check."""
    is_fp8 = group.format == "fp8"
    ends = PARTS["fp8" if is_fp8 else "nvfp4"]
    parts = {end: tensors[end] for end in ends if end in tensors}
    require(module, parts, ends if group.static_inputs else ends[:-1])
    given = parts[ends[-1]].float().reshape(-1)[0] if group.static_inputs else None
    if is_fp8:
        outer = parts["weight_scale"].float().reshape(-1)
        codes, scales = parts["weight"], None
    else:
        outer = 1.0 / parts["weight_global_scale"].float().reshape(-1)
        codes, scales = parts["weight_packed"], parts["weight_scale"]
        given = None if given is None else 1.0 / given
    outer = outer if outer.numel() > 1 else outer.reshape(())
    return StoredWeight(module, "compressed-tensors", group.format, codes, scales, outer, given, parts)


def parts_of(weight: StoredWeight) -> dict[str, Tensor]:
    """The tensors to write, by the ends of their names. What was read in this layout stays as it was."""
    if weight.layout == "compressed-tensors":
        return dict(weight.parts)
    if weight.format == "fp8":
        outer = weight.outer.reshape(1) if weight.outer.numel() == 1 else weight.outer.reshape(-1, 1)
        parts = {"weight": weight.codes, "weight_scale": outer}
        if weight.input_scale is not None:
            parts["input_scale"] = weight.input_scale.reshape(1)
        return parts
    assert weight.scales is not None
    parts = {
        "weight_packed": weight.codes, "weight_scale": weight.scales, "weight_global_scale": encode(weight.outer),
    }  # fmt: skip
    if weight.input_scale is not None:
        parts["input_global_scale"] = encode(weight.input_scale)
    return parts


def encode(outer: Tensor) -> Tensor:
    """fp32 (1,): what reads back as the outer scale, or as its neighbour where no fp32 number does."""
    nearest = 1.0 / outer.reshape(1)
    infinity = torch.full_like(nearest, float("inf"))
    for candidate in (nearest, nearest.nextafter(infinity), nearest.nextafter(-infinity)):
        if bool(1.0 / candidate == outer):
            return candidate
    return nearest


def invertible(outer: Tensor) -> Tensor:
    """The outer scale, or its neighbour, that a file in encode form gives back exactly."""
    return 1.0 / (1.0 / outer)


def config_of(groups: Mapping[str, Group], plain: Iterable[str], pages: PageFormat) -> dict[str, Any]:
    """quantization_config of modules with their groups, and of those that stay plain."""
    modules: dict[Group, list[str]] = {}
    for module, group in sorted(groups.items()):
        modules.setdefault(replace(group, targets=()), []).append(module)
    described = {
        f"group_{number}": {**_described(group), "targets": ["Linear"] if len(modules) == 1 else names}
        for number, (group, names) in enumerate(modules.items())
    }
    layouts = sorted({str(group["format"]) for group in described.values()})
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "format": layouts[0] if len(layouts) == 1 else MIXED,
        "config_groups": described, "ignore": sorted(plain),
        "kv_cache_scheme": None if pages == "bf16" else _page_scheme(pages),
    }  # fmt: skip


def _described(group: Group) -> dict[str, Any]:
    if group.format == "fp8":
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        by_token = {**weights, "strategy": "token", "dynamic": True}
        inputs: Any = {**weights, "strategy": "tensor"} if group.static_inputs else by_token
        weights["strategy"] = "channel" if group.by_row else "tensor"
        return {"format": EIGHT_BITS, "weights": weights, "input_activations": inputs}
    weights = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
        "dynamic": False, "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    inputs = {**weights, "dynamic": "local"} if group.format == "nvfp4" else None
    return {"format": PACKED, "weights": weights, "input_activations": inputs}


def _page_scheme(pages: PageFormat) -> dict[str, Any]:
    bits = {"fp8": (8, "tensor", None), "nvfp4": (4, "tensor_group", 16)}[pages]
    names = ("num_bits", "strategy", "group_size")
    return {**dict(zip(names, bits, strict=True)), "type": "float", "symmetric": True, "dynamic": False}
