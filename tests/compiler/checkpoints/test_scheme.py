"""Which group names a module: targets and ignore lists as both layouts spell them, and the tensors themselves."""

from typing import Any

import pytest

from octavo.compiler.checkpoints import compressed, modelopt
from octavo.compiler.checkpoints.scheme import BY_CLASS, BY_NAME, BY_PATTERN, NO_MATCH, Group, Scheme, match
from octavo.compiler.errors import CheckpointError

UP = "model.layers.3.mlp.up_proj"
FOUR, EIGHT = Group(("Linear",), "nvfp4", True), Group(("re:.*up_proj",), "fp8", False)
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
BY_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("target", "close"),
    [
        (UP, BY_NAME),
        ("re:.*mlp.*", BY_PATTERN),
        (r"re:model\.layers\.3", BY_PATTERN),  # from the beginning, not to the end
        ("re:layers", NO_MATCH),
        ("model.layers.3.*", BY_PATTERN),
        ("*up_proj", BY_PATTERN),
        ("model.layers.3", NO_MATCH),
        ("Linear", BY_CLASS),
        ("Embedding", NO_MATCH),
    ],
)
def test_match(target: str, close: int) -> None:
    assert match(UP, target) == close


def test_the_closest_group_is_taken_and_tensors_decide_between_equals() -> None:
    assert Scheme("compressed-tensors", (FOUR, EIGHT)).group_of(UP, "fp8") is EIGHT
    other = Group(("re:.*mlp.*",), "nvfp4_weight_only", False)
    both = Scheme("compressed-tensors", (other, EIGHT))
    assert (both.group_of(UP, "fp8"), both.group_of(UP, "nvfp4")) == (EIGHT, other)
    assert both.group_of("model.norm", "plain") is None
    assert Scheme("modelopt", (FOUR,)).group_of("lm_head", "plain") is None


@pytest.mark.parametrize(
    ("groups", "ignore", "kind", "said"),
    [
        ((FOUR, EIGHT), (), "nvfp4", r"the configuration says fp8, its tensors are nvfp4"),
        ((EIGHT,), (), "plain", r"the configuration says fp8, its tensors are plain values"),
        ((FOUR,), ("*.up_proj",), "nvfp4", r"quantised \(nvfp4\), and the configuration leaves it out"),
        ((Group(("lm_head",), "fp8", True),), (), "fp8", "leaves it out"),
        ((EIGHT, Group(("re:.*mlp.*",), "fp8", True)), (), "fp8", "which fits each of them"),
    ],
)
def test_contradictions_name_the_module(
    groups: tuple[Group, ...], ignore: tuple[str, ...], kind: Any, said: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"^{UP}: .*{said}"):
        Scheme("compressed-tensors", groups, ignore).group_of(UP, kind)


def test_an_expert_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"experts.7.w1 \(expert 7\): "):
        Scheme("modelopt", (), ()).group_of("model.layers.0.mlp.experts.7.w1", "nvfp4")


@pytest.mark.parametrize(
    ("algorithm", "group"),
    [
        ("NVFP4", ("nvfp4", True, False)),
        ("W4A16_NVFP4", ("nvfp4_weight_only", False, False)),
        ("FP8", ("fp8", True, False)),
        ("FP8_PER_CHANNEL_PER_TOKEN", ("fp8", False, True)),
    ],
)
def test_algorithms_of_modelopt(algorithm: str, group: Any) -> None:
    one = modelopt.parse({"quant_algo": algorithm, "exclude_modules": ["lm_head"]}, "x")
    layers = {UP: {"quant_algo": algorithm, "group_size": 16}}
    mixed = modelopt.parse({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, "x")
    assert one.groups == (Group(("Linear",), *group),) and one.ignore == ("lm_head",)
    assert mixed.groups == (Group((UP,), *group),)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, r"x: expected quant_algo NVFP4, .* got 'NVFP4_AWQ' for Linear"),
        ({"quant_algo": "W4A8_NVFP4_FP8"}, r"got 'W4A8_NVFP4_FP8' .*an outer scale of amax / 448"),
        ({}, "got None"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "expected group_size 16 for NVFP4, got 32"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo .* got 'INT8'"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {UP: {"quant_algo": "W8A16"}}},
            rf"got 'W8A16' for {UP}",
        ),
    ],
)
def test_what_modelopt_may_say_and_we_do_not_read(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        modelopt.parse(config, "x")


@pytest.mark.parametrize(
    ("weights", "inputs", "format", "expected"),
    [
        (NVFP4, None, "nvfp4-pack-quantized", ("nvfp4_weight_only", False, False)),
        (NVFP4, {"num_bits": 4, "dynamic": "local"}, "nvfp4-pack-quantized", ("nvfp4", True, False)),
        (FP8, BY_TOKEN, "float-quantized", ("fp8", False, True)),
        (
            {**FP8, "strategy": "tensor"},
            {"num_bits": 8, "strategy": "tensor"},
            "naive-quantized",
            ("fp8", True, False),
        ),
        (NVFP4, {"num_bits": 4, "dynamic": True}, "nvfp4-pack-quantized", None),
        ({**NVFP4, "group_size": 32}, None, "nvfp4-pack-quantized", None),
        (FP8, {"num_bits": 8, "strategy": "tensor", "dynamic": True}, "float-quantized", None),
        ({**FP8, "strategy": "block"}, BY_TOKEN, "float-quantized", None),
        (FP8, None, "float-quantized", None),
        (
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            None,
            "pack-quantized",
            None,
        ),
    ],
)
def test_groups_of_compressed_tensors(weights: Any, inputs: Any, format: str, expected: Any) -> None:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": format}
    config = {"format": "mixed-precision", "config_groups": {"g": group}, "ignore": ["lm_head"]}
    if expected is None:
        with pytest.raises(CheckpointError, match=rf"x, g: expected .* got format '{format}', weights"):
            compressed.parse(config, "x")
    else:
        found = compressed.parse(config, "x")
        assert found.groups == (Group(("Linear",), *expected),) and found.ignore == ("lm_head",)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"config_groups": {}}, "x: expected config_groups, got none"),
        ({"transform_config": {"config_groups": {"r": {}}}}, "transform_config is not read"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not read"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "expected kv_cache_scheme of float"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}, "kv_cache_scheme of float"),
    ],
)
def test_what_compressed_tensors_may_say_and_we_do_not_read(more: dict[str, Any], said: str) -> None:
    group = {"targets": ["Linear"], "weights": NVFP4, "format": "nvfp4-pack-quantized"}
    with pytest.raises(CheckpointError, match=said):
        compressed.parse({"config_groups": {"g": group}, **more}, "x")


@pytest.mark.parametrize("library", [modelopt, compressed])
def test_pages(library: Any) -> None:
    group = {"targets": ["Linear"], "weights": NVFP4, "format": "nvfp4-pack-quantized"}
    base = {"quant_algo": "NVFP4", "config_groups": {"g": group}}
    fp8 = {"num_bits": 8, "type": "float", "dynamic": False}
    assert library.parse(base, "x").pages == "bf16"
    assert library.parse({**base, "kv_cache_scheme": fp8}, "x").pages == "fp8"
    nvfp4: Any = "NVFP4" if library is modelopt else {**fp8, "num_bits": 4, "strategy": "tensor_group"}
    assert library.parse({**base, "kv_cache_scheme": nvfp4}, "x").pages == "nvfp4"
