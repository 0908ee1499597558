"""Runs rendered Triton kernels on CPU tensors. Import it only in a process started with TRITON_INTERPRET=1.

The interpreter that Triton ships is no oracle: it computes on the raw bits of bf16 and fp8, truncates casts,
has no block-scaled product and reads outside of tensors. What `install` replaces: values are kept in ml_dtypes
arrays, so that numpy rounds as the hardware does, and every lane of every access must lie within a tensor of the
launch. Inline assembly runs a model that is written here for its instruction.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
import triton.language.extra.cuda as cuda
import triton.runtime.interpreter as interpreter
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.codegen.build_triton import constexprs
from octavo.codegen.kernel import Arg, KernelSpec, Param
from octavo.codegen.render import render
from octavo.compiler.expression import evaluate, holds

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
NATIVE = {tl.bfloat16: BF16, tl.float8e4nv: E4M3}
IN_MEMORY = {BF16: np.dtype(np.uint16), E4M3: np.dtype(np.uint8)}
E2M1 = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32
)
SCRATCH = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn,
    "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
_original_np_dtype = interpreter._get_np_dtype
_original_patch_tensor = interpreter._patch_lang_tensor
_original_patch_lang = interpreter._patch_lang
_original_dot_scaled = TritonSemantic.dot_scaled
# (first byte, last byte + 1) of each tensor of the running launch
_allowed: list[tuple[int, int]] = []
# Sets of Triton's modules, by id, that the running launch has patched.
_patched: set[frozenset[int]] = set()


def install() -> None:
    """Put the corrections in place, for the rest of the process."""
    interpreter._get_np_dtype = np_dtype
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_lang = patch_lang
    builder: Any = interpreter.InterpreterBuilder
    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store
    builder.cast_impl = cast
    builder.create_fp_to_fp = cast
    builder.create_bitcast = bitcast
    builder.create_fma = fma
    builder.create_dot = dot
    builder.create_dot_scaled = dot_scaled
    builder.create_inline_asm = inline_asm
    reductions: Any = interpreter.ReduceOps
    reductions.generic_reduce = generic_reduce
    semantic: Any = TritonSemantic
    if semantic.dot_scaled is _original_dot_scaled:
        semantic.dot_scaled = semantic_dot_scaled
    for name in ("gdc_wait", "gdc_launch_dependents"):
        if hasattr(cuda, name):
            setattr(cuda, name, lambda *a, **k: None)


def launch(
    spec: KernelSpec, tensors: Mapping[str, Tensor], dims: Mapping[str, int], folder: Path
) -> list[str]:
    """Run every launch of a node whose condition holds, in order; returns their templates.

    tensors  by argument name, and "behind x" what x holds addresses in; scratch is added, as nan, or as numbers of
             nothing
    dims     the sizes of the step
    folder   where the rendered text may be put
    """
    held = dict(tensors)
    for name, dtype, shape in spec.scratch:
        held[name] = poisoned([evaluate(size, dims) for size in shape], dtype)
    ran = []
    for kernel in spec.launches:
        if not holds(kernel.when, dims):
            continue
        _run(kernel, held, dims, folder)
        ran.append(kernel.template)
    return ran


def poisoned(shape: list[int], dtype: str) -> Tensor:
    """Nan, or a number of nothing: what memory may hold before a kernel writes it."""
    if dtype in ("fp8", "u8"):
        return torch.full(shape, 0xFF, dtype=torch.uint8).view(SCRATCH[dtype])
    fill = float("nan") if SCRATCH[dtype].is_floating_point else -(2**30)
    return torch.full(shape, fill, dtype=SCRATCH[dtype])


def _run(spec: KernelSpec, tensors: Mapping[str, Tensor], dims: Mapping[str, int], folder: Path) -> None:
    path = folder / f"{spec.name}.py"
    path.write_text(render(spec))
    specification = importlib.util.spec_from_file_location(spec.name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    used = [tensors[arg.name] for arg in spec.args if arg.kind != "scalar"]
    used += [tensors[name] for name in tensors if name.startswith("behind ")]
    values = [_value(arg, tensors, dims) for arg in spec.args]
    grid = tuple(evaluate(size, dims) for size in spec.grid)
    allowed = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in used]
    call(getattr(module, spec.name), grid, values, constexprs(spec), allowed)


def call(
    function: Any, grid: tuple[int, ...], values: list[Any], numbers: Mapping[str, Param],
    allowed: list[tuple[int, int]],
) -> None:  # fmt: skip
    """One launch of a kernel's function. allowed: the memory that it may touch, (first byte, last byte + 1)."""
    _patched.clear()
    _allowed[:] = allowed
    try:
        function[grid](*values, **numbers)
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
    # Scratch may be larger than what one of the launches that share it maps.
    mapped = tensors[arg.name].flatten()[: math.prod(shape)].view(shape)
    return TensorDescriptor.from_tensor(mapped, list(arg.block))


def np_dtype(dtype: Any) -> Any:
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    if isinstance(element, tl.pointer_type):
        return _original_np_dtype(dtype)
    return NATIVE.get(element) or _original_np_dtype(dtype)


def patch_lang(function: Any) -> Any:
    """Once a launch for the modules that a function sees: the interpreter does it at every call in a kernel."""
    seen = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
    if seen in _patched:
        return None
    _patched.add(seen)
    return _original_patch_lang(function)


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
    """To nearest, ties to even; fp8 saturates, as cvt.satfinite does."""
    wanted, data = np_dtype(dtype), source.data
    if wanted == E4M3 and data.dtype != E4M3:
        wide = data.astype(np.float32)
        data = np.where(np.isnan(wide), wide, np.clip(wide, -E4M3_MAX, E4M3_MAX))
    elif data.dtype in IN_MEMORY and wanted not in (BF16, np.dtype(np.float32), np.dtype(np.float64)):
        data = data.astype(np.float32)
    return interpreter.TensorHandle(data.astype(wanted), dtype.scalar)


def bitcast(builder: Any, source: Any, dtype: Any) -> Any:
    return interpreter.TensorHandle(np.ascontiguousarray(source.data).view(np_dtype(dtype)), dtype.scalar)


def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """One rounding, not two: the product of two fp32 numbers is exact in fp64."""
    with np.errstate(all="ignore"):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)


def dot(builder: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
    """Products of exact operands, summed in the accumulator's dtype as the tensor core does."""
    wide = accumulator.data.dtype
    product = np.matmul(a.data.astype(wide), b.data.astype(wide))
    return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def semantic_dot_scaled(
    self: Any, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any,
    *rest: Any, **named: Any,
) -> Any:  # fmt: skip
    """Formats are compile-time strings when compiled and plain ones here."""
    formats = [_Format(name) if isinstance(name, str) else name for name in (lhs_format, rhs_format)]
    return _original_dot_scaled(self, lhs, lhs_scale, formats[0], rhs, rhs_scale, formats[1], *rest, **named)


class _Format(str):
    @property
    def value(self) -> str:
        return str(self)


def dot_scaled(
    builder: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, fast_math: Any,
    a_packed: Any, b_packed: Any, accumulator: Any,
) -> Any:  # fmt: skip
    """Exact products of E2M1 codes and E4M3 scales, summed in fp32."""
    kinds = interpreter._ir.ScaleDotElemTypeTY
    assert a_format == b_format == kinds.E2M1 and a_packed and b_packed, "only NVFP4 is modelled"
    left = _decoded(a.data) * np.repeat(_scales(a_scale), 16, axis=-1)
    right = _decoded(b.data.T) * np.repeat(_scales(b_scale), 16, axis=-1)
    return interpreter.TensorHandle((left @ right.T + accumulator.data).astype(np.float32), tl.float32)


def _scales(scale: Any) -> Array:
    data = scale.data
    values: Array = (data if data.dtype == E4M3 else data.view(E4M3)).astype(np.float32)
    return values


def _decoded(packed: Array) -> Array:
    """(rows, K / 2) bytes -> (rows, K) values."""
    raw = packed.astype(np.uint8)
    values: Array = E2M1[np.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], -1)]
    return values


def e2m1_codes(x: Array) -> Array:
    """cvt.rn.satfinite.e2m1x2.f32 of one operand: nan is 6, the sign of zero stays."""
    clipped = np.clip(np.where(np.isnan(x), np.float32(6), x), np.float32(-6), np.float32(6))
    return clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def fp16_pairs(codes: Array) -> Array:
    """cvt.rn.f16x2.e2m1x2: the low nibble's value in the low half."""
    halves = E2M1.astype(np.float16).view(np.uint16).astype(np.uint32)
    pairs: Array = halves[codes & 15] | (halves[codes >> 4] << 16)
    return pairs


def saturated_fp16(x: Array) -> Array:
    """cvt.rn.satfinite.f16x2.f32 of each operand by itself: nan stays."""
    clipped: Array = np.clip(x.astype(np.float32), -65504.0, 65504.0).astype(np.float16)
    return clipped


ASSEMBLY: dict[str, Callable[..., Array]] = {
    r"cvt\.rn\.satfinite\.e2m1x2\.f32": lambda low, high: e2m1_codes(low) | (e2m1_codes(high) << 4),
    r"cvt\.rn\.f16x2\.e2m1x2": fp16_pairs,
    r"cvt\.rn\.bf16x2\.f32": lambda values: values.astype(BF16),
    r"cvt\.rn\.satfinite\.f16x2\.f32": saturated_fp16,
}


def inline_asm(
    builder: Any, text: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int
) -> Any:
    for pattern, model in ASSEMBLY.items():
        if re.search(pattern, text):
            result = model(*[value.data for value in values])
            return _Results([interpreter.TensorHandle(result.astype(np_dtype(types[0])), types[0].scalar)])
    raise NotImplementedError(f"no model of the assembly {' '.join(text.split())[:80]}")


class _Results:
    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def get_result(self, index: int) -> Any:
        return self.handles[index]


def generic_reduce(self: Any, operands: Any) -> Any:
    """A reduction with its own combine function, all other axes at once."""
    given = self.axis
    operands, axis = self.unravel(operands, given)
    columns = [np.moveaxis(x.handle.data, axis, 0) for x in operands]

    while columns[0].shape[0] > 1:  # neighbours at a time, which keeps their order; lengths are powers of two
        sides = (
            self.to_tensor(np.ascontiguousarray(column[start::2]), x.dtype)
            for start in (0, 1)
            for column, x in zip(columns, operands, strict=True)
        )
        combined = self.combine_fn.fn(*sides)
        combined = combined if isinstance(combined, tuple) else (combined,)
        columns = [part.handle.data for part in combined]
    results = []
    for column, x in zip(columns, operands, strict=True):
        data = column[0]
        if self.keep_dims:
            data = data.reshape((1,) * len(x.shape)) if given is None else np.expand_dims(data, axis)
        results.append(self.to_tensor(data if data.ndim else data.item(), x.dtype))
    return results


def _in_memory(dtype: Any) -> Any:
    """The type that the interpreter's memory routines know for the same bits."""
    return IN_MEMORY.get(dtype, dtype)


def _whole(array: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return np.ascontiguousarray(np.broadcast_to(np.asarray(array).astype(dtype), shape))


def _check_bounds(pointers: Array, mask: Array, item_bytes: int, access: str) -> None:
    used = pointers[mask]
    inside = np.zeros(used.shape, bool)
    for first, end in _allowed:
        inside |= (used >= first) & (used + item_bytes <= end)
    if not inside.all():
        raise IndexError(f"{access}: {int((~inside).sum())} of {used.size} lanes lie outside of every tensor")
