"""Runs rendered Triton kernels on CPU tensors. Import it only in a process started with TRITON_INTERPRET=1.

The interpreter that Triton ships is no oracle: it computes on the raw bits of bf16, truncates casts to bf16,
and reads outside of tensors. What `install` replaces: values are kept in ml_dtypes arrays, so that numpy
rounds as the hardware does, and every lane of every access must lie within a tensor of the launch.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.codegen.build_triton import constexprs
from octavo.codegen.kernel import Arg, KernelSpec
from octavo.codegen.render import render
from octavo.compiler.expression import evaluate, holds

BF16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray[Any, Any]
SCRATCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}
_original_np_dtype = interpreter._get_np_dtype
_original_patch_tensor = interpreter._patch_lang_tensor
# (first byte, last byte + 1) of each tensor of the running launch
_allowed: list[tuple[int, int]] = []


def install() -> None:
    """Put the corrections in place, for the rest of the process."""
    interpreter._get_np_dtype = np_dtype
    interpreter._patch_lang_tensor = patch_tensor
    builder: Any = interpreter.InterpreterBuilder
    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store
    builder.cast_impl = cast
    builder.create_fp_to_fp = cast
    builder.create_dot = dot


def launch(
    spec: KernelSpec, tensors: Mapping[str, Tensor], dims: Mapping[str, int], folder: Path
) -> list[str]:
    """Run every launch of a node whose condition holds, in order; returns their templates.

    tensors  by argument name; scratch is added, as nan, or as numbers of nothing
    dims     the sizes of the step
    folder   where the rendered text may be put
    """
    held = dict(tensors)
    ran = []
    for kernel in spec.launches:
        if not holds(kernel.when, dims):
            continue
        for name, dtype, shape in kernel.scratch:
            fill = float("nan") if dtype in ("fp32", "bf16") else -(2**30)
            held[name] = torch.full([evaluate(size, dims) for size in shape], fill, dtype=SCRATCH[dtype])
        _run(kernel, held, dims, folder)
        ran.append(kernel.template)
    return ran


def _run(spec: KernelSpec, tensors: Mapping[str, Tensor], dims: Mapping[str, int], folder: Path) -> None:
    path = folder / f"{spec.name}.py"
    path.write_text(render(spec))
    specification = importlib.util.spec_from_file_location(spec.name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    used = [tensors[arg.name] for arg in spec.args if arg.kind != "scalar"]
    values = [_value(arg, tensors, dims) for arg in spec.args]
    grid = tuple(evaluate(size, dims) for size in spec.grid)
    _allowed[:] = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in used]
    try:
        getattr(module, spec.name)[grid](*values, **constexprs(spec))
    finally:
        _allowed.clear()


def _value(arg: Arg, tensors: Mapping[str, Tensor], dims: Mapping[str, int]) -> Any:
    if arg.kind == "scalar":
        assert isinstance(arg.value, int | str)
        return evaluate(arg.value, dims)
    assert tensors[arg.name].is_contiguous()
    if arg.kind == "pointer":
        return tensors[arg.name]
    shape = [evaluate(size, dims) for size in arg.shape]
    return TensorDescriptor.from_tensor(tensors[arg.name].view(shape), list(arg.block))


def np_dtype(dtype: Any) -> Any:
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return BF16 if element == tl.bfloat16 else _original_np_dtype(dtype)


def patch_tensor(tensor: Any, scope: Any = None, *rest: Any) -> None:
    """Lets `range` take a tensor of one element, which numpy 2.4 refuses under Triton 3.6."""
    _original_patch_tensor(tensor, *([] if scope is None else [scope]), *rest)
    set_attribute = setattr if scope is None else lambda _, name, value: scope.set_attr(tensor, name, value)
    set_attribute(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))


def masked_load(builder: Any, pointers: Any, mask: Any, other: Any, *hints: Any, **named: Any) -> Any:
    element = pointers.get_element_ty()
    dtype = np_dtype(element)
    shape = pointers.data.shape
    lanes = _whole(mask.data, shape, bool)
    fill = _whole(0 if other is None else other.data, shape, dtype)
    _check_bounds(pointers.data, lanes, dtype.itemsize, "load")
    memory = _in_memory(dtype)
    addresses = np.ascontiguousarray(pointers.data)
    loaded = interpreter._interpreter.load(addresses, lanes, fill.view(memory), memory)
    return interpreter.TensorHandle(np.asarray(loaded).view(dtype), element)


def masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *hints: Any, **named: Any) -> Any:
    dtype = value.data.dtype
    shape = pointers.data.shape
    lanes = _whole(mask.data, shape, bool)
    _check_bounds(pointers.data, lanes, dtype.itemsize, "store")
    data = _whole(value.data, shape, dtype).view(_in_memory(dtype))
    return interpreter._interpreter.store(np.ascontiguousarray(pointers.data), data, lanes)


def cast(builder: Any, source: Any, dtype: Any, *rounding: Any) -> Any:
    return interpreter.TensorHandle(source.data.astype(np_dtype(dtype)), dtype.scalar)


def dot(builder: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
    """Products of exact operands, summed in the accumulator's dtype as the tensor core does."""
    wide = accumulator.data.dtype
    product = np.matmul(a.data.astype(wide), b.data.astype(wide))
    return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def _in_memory(dtype: Any) -> Any:
    """The type that the interpreter's memory routines know for the same bits."""
    return np.dtype(np.uint16) if dtype == BF16 else dtype


def _whole(array: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return np.ascontiguousarray(np.broadcast_to(np.asarray(array).astype(dtype), shape))


def _check_bounds(pointers: Array, mask: Array, item_bytes: int, access: str) -> None:
    used = pointers[mask]
    inside = np.zeros(used.shape, bool)
    for first, end in _allowed:
        inside |= (used >= first) & (used + item_bytes <= end)
    if not inside.all():
        raise IndexError(f"{access}: {int((~inside).sum())} of {used.size} lanes lie outside of every tensor")
