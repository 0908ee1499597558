"""Shards: what is written is read, by the official reader too; files that lie are refused."""

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.compiler.checkpoints.shards import INDEX, SINGLE, Shards, ShardWriter
from octavo.compiler.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int64)


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {f"t.{n}": (torch.rand(5, 7, generator=generator) * 9).to(t) for n, t in enumerate(DTYPES)}
    return {**found, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "column": found["t.1"].T}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


@pytest.mark.parametrize("max_bytes", [1, 150, 10_000])
def test_round_trip_and_the_official_reader_agree(tmp_path: Path, max_bytes: int) -> None:
    tensors, writer = some_tensors(), ShardWriter(tmp_path, max_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    shards = Shards(tmp_path)
    assert set(shards) == set(tensors) and all(same(shards[n], t) for n, t in tensors.items())
    files = sorted(tmp_path.glob("*.safetensors"))
    official = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(same(official[n], t) for n, t in tensors.items()) and len(official) == len(tensors)
    if max_bytes > 1000:
        assert [f.name for f in files] == [SINGLE]
        return
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(raw(t)) for t in tensors.values())
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        names = load_file(file)
        assert len(names) == 1 or sum(len(raw(t)) for t in names.values()) <= max_bytes
        assert all(index["weight_map"][name] == file.name for name in names)


def test_reads_what_others_wrote_at_odd_offsets(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.arange(6, dtype=torch.float32)}
    header = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
              "b": {"dtype": "F32", "shape": [6], "data_offsets": [3, 27]}}  # fmt: skip
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(
        len(text).to_bytes(8, "little") + text + raw(tensors["a"]) + raw(tensors["b"])
    )
    shards = Shards(tmp_path)
    assert all(same(shards[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_is_mapped_alone_and_only_while_it_is_used(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2**20), "b": torch.ones(2**20)}, tmp_path / SINGLE)

    def mapped_bytes() -> int:
        lines = [
            line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
        ]
        return sum(int(end, 16) - int(start, 16) for start, end in (line[0].split("-") for line in lines))

    shards = Shards(tmp_path)
    assert mapped_bytes() == 0
    view = shards["b"][5:10]
    assert 2**22 <= mapped_bytes() < 2**22 + 2**16
    view += 1  # of memory, not of the file
    assert float(shards["b"].sum()) == 2**20
    del view
    gc.collect()
    assert mapped_bytes() == 0


def test_files_that_lie_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected .*index.json or .*, got neither"):
        Shards(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")

    def index(**weight_map: str) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    index(a="one.safetensors", b="one.safetensors")
    with pytest.raises(CheckpointError, match=r"expected b in one.safetensors, which does not hold it"):
        Shards(tmp_path)
    index(a="../one.safetensors")
    with pytest.raises(CheckpointError, match=r"names of files beside it, got '../one.safetensors'"):
        Shards(tmp_path)
    index(a="two.safetensors")
    with pytest.raises(CheckpointError, match=r"two.safetensors: expected a safetensors file, got none"):
        Shards(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    index(a="one.safetensors", c="two.safetensors")
    with pytest.raises(CheckpointError, match=r"a is in one.safetensors too"):
        Shards(tmp_path)
    (tmp_path / INDEX).write_text("[1]")
    with pytest.raises(CheckpointError, match="expected a JSON object, got a list"):
        Shards(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / SINGLE).write_bytes((tmp_path / "one.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="'a' ends within the file's"):
        Shards(tmp_path)
