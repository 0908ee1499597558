"""The streaming conversion: bytes by the rules, both layouts, memory of a layer and a shard, and nothing half done."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nvfp4 as by_the_book
import pytest
import torch
from foreign import quiet
from safetensors.torch import load_file, save_file
from tiny_llama import build, save_directory
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.checkpoints.convert import convert
from octavo.compiler.checkpoints.shards import INDEX, Shards, ShardWriter
from octavo.compiler.errors import CheckpointError

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
FAMILIES = (
    [f"{ATTENTION}.{name}_proj" for name in "qkv"],
    [f"{ATTENTION}.o_proj"],
    [f"{MLP}.gate_proj", f"{MLP}.up_proj"],
    [f"{MLP}.down_proj"],
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_directory(tmp_path_factory.mktemp("checkpoints") / "tiny")


def weights() -> dict[str, Tensor]:
    return {
        name: module.weight.data for name, module in build().named_modules() if isinstance(module, nn.Linear)
    }


def test_nearest_is_by_the_book_and_siblings_share_their_scale(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out", "modelopt", "nearest")
    files, originals = load_file(tmp_path / "out/model.safetensors"), weights()
    for family in FAMILIES:
        outer = torch.stack([originals[module].abs().max() for module in family]).max() / 2688
        for module in family:
            codes, scales = by_the_book.quantize(originals[module], float(outer))
            assert files[f"{module}.weight_scale_2"] == outer
            assert torch.equal(files[f"{module}.weight"], codes)
            assert torch.equal(files[f"{module}.weight_scale"].view(torch.uint8), scales.view(torch.uint8))
            assert f"{module}.input_scale" not in files
            error = by_the_book.dequantize(codes, scales, float(outer)) - originals[module]
            assert done.errors[module] == pytest.approx(
                float(error.norm() / originals[module].norm()), rel=1e-4
            )
    assert torch.equal(files["lm_head.weight"], originals["lm_head"])
    assert done.kept == {"lm_head": "makes the logits", "model.embed_tokens": "a table of embeddings"}
    before, after = (
        sum(t.numel() * t.element_size() for t in load_file(path / "model.safetensors").values())
        for path in (source, tmp_path / "out")
    )
    assert (done.bytes_before, done.bytes_after) == (before, after)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_search_loses_less_and_reads_back(source: Path, tmp_path: Path, layout: Any) -> None:
    nearest = convert(source, tmp_path / "nearest", layout, "nearest")
    search = convert(source, tmp_path / "search", layout, "search")
    checkpoint, originals = Checkpoint(tmp_path / "search"), weights()
    assert checkpoint.scheme.layout == layout and not checkpoint.notes
    assert {module: group.format for module, group in checkpoint.groups.items()} == dict.fromkeys(
        [module for family in FAMILIES for module in family], "nvfp4_weight_only"
    )
    for family in FAMILIES:
        assert len({float(checkpoint.read(module).outer) for module in family}) == 1
    for module in checkpoint:
        difference = checkpoint.read(module).dequantize(torch.float32) - originals[module]
        # What is read is what was written, to the rounding of the sum.
        error = float(difference.norm() / originals[module].norm())
        assert error == pytest.approx(search.errors[module], rel=1e-5)
        assert error < 0.97 * nearest.errors[module]


def test_transformers_loads_it(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "compressed-tensors")
    checkpoint, model = Checkpoint(tmp_path / "out"), build()
    for module in checkpoint:
        model.get_submodule(module).weight.data = checkpoint.read(module).dequantize(torch.float32)
    model.bfloat16()
    with quiet(), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        ids = torch.arange(12)[None] * 7
        expected, got = model(ids).logits, theirs(ids).logits
    # They divide by the outer scale in bf16.
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_other_files_go_along_and_the_configuration_keeps_its_entries(source: Path, tmp_path: Path) -> None:
    (source / "pytorch_model.bin").write_bytes(b"weights in another form")
    convert(source, tmp_path / "out", "modelopt")
    before = {path.name for path in source.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*before, "hf_quant_config.json"}
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["lm_head", "model.embed_tokens"]
    assert config == json.loads((source / "config.json").read_text())
    assert (tmp_path / "out").stat().st_mode & 0o777 == source.stat().st_mode & 0o777


def small(path: Path, **tensors: Tensor) -> Path:
    path.mkdir()
    save_file(
        {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("lm_head", torch.ones(32, 32), "makes the logits"),
        ("mlp.gate", torch.ones(32, 32), "selects experts"),
        ("mlp.experts", torch.ones(2, 32, 32), r"no matrix of a module, but (2, 32, 32)"),
        ("mlp.up_proj", torch.ones(32, 24), "rows of 24 elements are not whole blocks of 16"),
        ("mlp.up_proj", torch.ones(1, 32), "has 1 outputs: a gate"),
        ("mlp.up_proj", torch.ones(32, 32, dtype=torch.int8), "of torch.int8"),
        ("model.mtp.0.up_proj", torch.ones(32, 32), "belongs to a head that drafts tokens"),
        ("a.o_proj", torch.ones(32, 32), "named by 'a.*'"),
    ],
)
def test_what_stays_and_why(tmp_path: Path, name: str, tensor: Tensor, why: str) -> None:
    path = small(tmp_path / "in", **{f"{name}.weight": tensor, "x.weight": torch.ones(32, 32)})
    done = convert(path, tmp_path / "out", "modelopt", keep=["a.*"] if name.startswith("a.") else [])
    assert done.kept == {name: why} and set(done.errors) == {"x"}
    assert torch.equal(Shards(tmp_path / "out")[f"{name}.weight"], tensor)


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = torch.ones(32, 32)
    broken[3, 4] = float("inf")
    path = small(tmp_path / "in", a__weight=torch.ones(32, 32), b__weight=broken)
    with pytest.raises(CheckpointError, match=r"b\.weight: holds elements that are not finite"):
        convert(path, tmp_path / "out", "modelopt")
    with pytest.raises(CheckpointError, match="keep: 'c' names no module, such as a"):
        convert(path, tmp_path / "out", "modelopt", keep=["c"])
    with pytest.raises(CheckpointError, match=r"holds no weight that is quantised; kept: {'a': \"named by"):
        convert(path, tmp_path / "out", "modelopt", keep=["*"])
    with pytest.raises(CheckpointError, match=r"expected a place to write into, got No such file"):
        convert(path, tmp_path / "no/out", "modelopt")

    def interrupt(name: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "out", "modelopt", keep=["b"], progress=interrupt)
    assert [one.name for one in tmp_path.iterdir()] == ["in"]
    convert(path, tmp_path / "out", "modelopt", keep=["b"])
    content = (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"out: expected no file there, got one; choose another path"):
        convert(path, tmp_path / "out", "modelopt", keep=["b"])
    assert (tmp_path / "out/model.safetensors").read_bytes() == content
    with pytest.raises(CheckpointError, match="its weights are quantised already"):
        convert(tmp_path / "out", tmp_path / "again", "modelopt")


def test_the_bytes_do_not_depend_on_shards(source: Path, tmp_path: Path) -> None:
    whole = convert(source, tmp_path / "whole", "compressed-tensors")
    convert(source, tmp_path / "parts", "compressed-tensors", max_shard_bytes=1500)
    assert (
        len(list((tmp_path / "parts").glob("*.safetensors"))) > 5 and (tmp_path / "parts" / INDEX).is_file()
    )
    one, many = Shards(tmp_path / "whole"), Shards(tmp_path / "parts")
    assert set(one) == set(many) and whole.directory == tmp_path / "whole"
    for name in one:
        left, right = (shards[name].reshape(-1).view(torch.uint8) for shards in (one, many))
        assert torch.equal(left, right)


HIDDEN, WIDE, SHARD_BYTES = 512, 2048, 4 * 2**20
SIZES = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
         "self_attn.v_proj": (HIDDEN // 4, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
         "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE)}  # fmt: skip
MEASURE = """
import sys
from pathlib import Path
from octavo.compiler.checkpoints.convert import convert

def kilobytes(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

source, destination, small = map(Path, sys.argv[1:4])
convert(small, destination.with_name("warm"), "modelopt", sys.argv[4])
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
before = kilobytes("VmRSS")
convert(source, destination, "modelopt", sys.argv[4], max_shard_bytes=int(sys.argv[5]))
print(kilobytes("VmHWM") - before)
"""


# What the search holds of the blocks that it is at, of any checkpoint: a cache full, twice.
SEARCH_BYTES = 8 * 2**20


def layers(path: Path, count: int, scale: int = 1) -> int:
    """A checkpoint of many layers in several files; bytes of one layer."""
    path.mkdir()
    writer, generator, total = ShardWriter(path, 4 * SHARD_BYTES), torch.Generator().manual_seed(0), 0
    for layer in range(count):
        for name, (rows, length) in SIZES.items():
            values = torch.randn(rows // scale, length // scale, generator=generator).mul_(0.02).bfloat16()
            writer.add(f"model.layers.{layer}.{name}.weight", values)
            total += 2 * values.numel()
    writer.finish()
    (path / "config.json").write_text("{}")
    return total // count


@pytest.mark.parametrize(
    ("count", "method"), [(10, "nearest"), pytest.param(40, "search", marks=pytest.mark.slow)]
)
def test_memory_is_that_of_two_layers_and_a_shard(tmp_path: Path, count: int, method: str) -> None:
    layer_bytes = layers(tmp_path / "in", count)
    layers(tmp_path / "small", 1, scale=8)
    bound = 2 * layer_bytes + SHARD_BYTES + SEARCH_BYTES * (method == "search")
    assert count * layer_bytes > 3 * bound
    command = [
        sys.executable,
        "-c",
        MEASURE,
        tmp_path / "in",
        tmp_path / "out",
        tmp_path / "small",
        method,
        SHARD_BYTES,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment, check=True
    )
    assert int(result.stdout) * 1024 < bound, f"{result.stdout} KiB above, {bound // 1024} allowed"
    assert len(Shards(tmp_path / "out")) == 3 * 7 * count
