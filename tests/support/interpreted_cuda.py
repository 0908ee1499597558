"""A CUDA driver without a GPU that runs an artifact's kernels, from their sources, in Triton's interpreter.

Import it only in a process started with TRITON_INTERPRET=1. Arguments are read back from the bytes and the tensor
maps that a GPU would get, so what is wrong in them is wrong here too.
"""

import importlib.util
import json
import struct
from typing import Any

import torch
import triton_interpreter
from fake_cuda import B200, Launched, RecordingDriver
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.compiler.artifact import Artifact
from octavo.runtime.cuda import Device, TensorMap

POINTERS = {
    "*fp32": torch.float32, "*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp8e4nv": torch.float8_e4m3fn,
    "*u8": torch.uint8, "*i32": torch.int32, "*i64": torch.int64,
}  # fmt: skip
# CUtensorMapDataType of the elements, of which it has none for E4M3
MAPPED = {"u8": 0, "fp8e4nv": 0, "fp16": 6, "fp32": 7, "bf16": 9}
SCALARS = {"i32": "i", "i64": "q", "fp32": "f"}


class InterpretingDriver(RecordingDriver):
    """Runs the kernels of one artifact, whatever is launched of them."""

    def __init__(self, artifact: Artifact, device: Device = B200) -> None:
        super().__init__(device)
        self.artifact = artifact
        self._loaded: dict[str, tuple[Any, dict[str, Any]]] = {}
        triton_interpreter.install()

    def execute(self, launched: Launched) -> None:
        function, record = self._load(launched.function)
        assert launched.launch.threads == 32 * record["num_warps"]
        arguments, used = self._arguments(record["parameters"], list(launched.parameters))
        triton_interpreter.call(function, launched.launch.grid, arguments, record["constexprs"], used)

    def _load(self, name: str) -> tuple[Any, dict[str, Any]]:
        """The kernel's function from its source, and its launch record."""
        if name not in self._loaded:
            path = self.artifact.path / "kernels" / f"{name}.py"
            specification = importlib.util.spec_from_file_location(name, path)
            assert specification is not None and specification.loader is not None
            module = importlib.util.module_from_spec(specification)
            specification.loader.exec_module(module)
            record = json.loads(path.with_suffix(".json").read_text())["launch"]
            self._loaded[name] = getattr(module, name), record
        return self._loaded[name]

    def _arguments(
        self, parameters: list[dict[str, Any]], packed: list[bytes]
    ) -> tuple[list[Any], list[tuple[int, int]]]:
        """What the kernel is called with, and the memory that it may touch: (first byte, last byte + 1)."""
        arguments: list[Any] = []
        used = []
        for parameter in parameters:
            first = packed.pop(0)
            if parameter["kind"] == "scalar":
                arguments.append(struct.unpack(SCALARS[parameter["type"]], first)[0])
            elif parameter["kind"] == "pointer":
                tensor = self._tensor(struct.unpack("Q", first)[0], POINTERS[parameter["type"]])
                arguments.append(tensor)
                used.append(span(tensor))
            else:
                mapped = self.tensor_map(first)
                rank = len(mapped.shape)
                shape = [struct.unpack("i", packed.pop(0))[0] for _ in range(rank)]
                strides = [struct.unpack("q", packed.pop(0))[0] for _ in range(rank)]
                tensor = self._mapped(mapped, parameter["type"])
                assert (shape, strides) == (list(tensor.shape), list(tensor.stride()))
                arguments.append(TensorDescriptor.from_tensor(tensor, parameter["block"]))
                used.append(span(tensor))
        assert packed == [bytes(8), bytes(8)], "scratch follows the parameters"
        return arguments, used

    def _tensor(self, address: int, dtype: torch.dtype) -> torch.Tensor:
        """All that lies behind an address in its allocation."""
        memory = self.at(address)
        whole = memory[: memory.nbytes // dtype.itemsize * dtype.itemsize]
        return torch.from_numpy(whole).view(dtype)

    def _mapped(self, mapped: TensorMap, kind: str) -> torch.Tensor:
        element = kind.removeprefix("tensordesc<").partition("[")[0]
        assert mapped.dtype == MAPPED[element]
        dtype = POINTERS[f"*{element}"]
        strides = [stride // dtype.itemsize for stride in (*mapped.strides[::-1], dtype.itemsize)]
        shape = mapped.shape[::-1]
        size = shape[0] * strides[0] * dtype.itemsize
        memory = torch.from_numpy(self.at(mapped.address, size)).view(dtype)
        return memory.as_strided(shape, strides)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()
