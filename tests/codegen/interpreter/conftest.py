"""Runs rendered Triton kernels on CPU tensors. Collected only in a process that was started with TRITON_INTERPRET=1.

Triton decides at import whether its own library functions are interpreted, so these tests cannot share a process with
code that compiles. tests/codegen/test_triton_templates.py starts one for each file of this folder.

The interpreter that Triton ships is no oracle: it computes on the raw bits of bf16, truncates casts to bf16, and reads
outside of tensors. What is replaced here: values are kept in ml_dtypes arrays, so that numpy rounds as the hardware
does, and every lane of every access must lie within a tensor of the launch.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETING else ["test_*.py"]

if IS_INTERPRETING:
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
    original_np_dtype = interpreter._get_np_dtype
    original_patch_tensor = interpreter._patch_lang_tensor
    # (first byte, last byte + 1) of the tensors of the running launch
    allowed: list[tuple[int, int]] = []

    def np_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return BF16 if element == tl.bfloat16 else original_np_dtype(dtype)

    def in_memory(dtype: Any) -> Any:
        """The type that the interpreter's memory routines know for the same bits."""
        return np.dtype(np.uint16) if dtype == BF16 else dtype

    def whole(array: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(array).astype(dtype), shape))

    def check_bounds(pointers: Array, mask: Array, item_bytes: int, access: str) -> None:
        used = pointers[mask]
        inside = np.zeros(used.shape, bool)
        for first, end in allowed:
            inside |= (used >= first) & (used + item_bytes <= end)
        if not inside.all():
            raise IndexError(
                f"{access}: {int((~inside).sum())} of {used.size} lanes lie outside of every tensor"
            )

    def masked_load(builder: Any, pointers: Any, mask: Any, other: Any, *hints: Any, **named: Any) -> Any:
        element = pointers.get_element_ty()
        dtype = np_dtype(element)
        shape = pointers.data.shape
        lanes = whole(mask.data, shape, bool)
        fill = whole(0 if other is None else other.data, shape, dtype)
        check_bounds(pointers.data, lanes, dtype.itemsize, "load")
        memory = in_memory(dtype)
        loaded = interpreter._interpreter.load(
            np.ascontiguousarray(pointers.data), lanes, fill.view(memory), memory
        )
        return interpreter.TensorHandle(np.asarray(loaded).view(dtype), element)

    def masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *hints: Any, **named: Any) -> Any:
        dtype = value.data.dtype
        shape = pointers.data.shape
        lanes = whole(mask.data, shape, bool)
        check_bounds(pointers.data, lanes, dtype.itemsize, "store")
        data = whole(value.data, shape, dtype).view(in_memory(dtype))
        return interpreter._interpreter.store(np.ascontiguousarray(pointers.data), data, lanes)

    def cast(builder: Any, source: Any, dtype: Any, *rounding: Any) -> Any:
        return interpreter.TensorHandle(source.data.astype(np_dtype(dtype)), dtype.scalar)

    def dot(builder: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        """Products of exact operands, summed in the accumulator's dtype as the tensor core does."""
        wide = accumulator.data.dtype
        product = np.matmul(a.data.astype(wide), b.data.astype(wide))
        return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    def patch_tensor(tensor: Any, scope: Any = None, *rest: Any) -> None:
        """Lets `range` take a tensor of one element, which numpy 2.4 refuses in Triton 3.6."""
        original_patch_tensor(tensor, *([] if scope is None else [scope]), *rest)
        set_attribute = setattr if scope is None else scope.set_attr
        set_attribute(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    interpreter._get_np_dtype = np_dtype
    interpreter._patch_lang_tensor = patch_tensor
    interpreter.InterpreterBuilder.create_masked_load = masked_load
    interpreter.InterpreterBuilder.create_masked_store = masked_store
    interpreter.InterpreterBuilder.cast_impl = cast
    interpreter.InterpreterBuilder.create_fp_to_fp = cast
    interpreter.InterpreterBuilder.create_dot = dot

    Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]

    @pytest.fixture
    def launch(tmp_path: Path) -> Iterator[Launch]:
        """Call with a spec, its tensors by argument name and the sizes of the step.

        Runs every launch of the node whose condition holds, in order, and returns their templates. Scratch starts
        as nan. Names that the spec's arguments have and the tensors lack are a KeyError.
        """

        def run(spec: KernelSpec, tensors: dict[str, Tensor], dims: dict[str, int]) -> list[str]:
            held = dict(tensors)
            ran = []
            for kernel in spec.launches:
                if not holds(kernel.when, dims):
                    continue
                for name, dtype, shape in kernel.scratch:
                    assert dtype == "fp32"
                    held[name] = torch.full([evaluate(size, dims) for size in shape], float("nan"))
                run_kernel(kernel, held, dims, tmp_path)
                ran.append(kernel.template)
            return ran

        yield run
        allowed.clear()

    def run_kernel(spec: KernelSpec, tensors: dict[str, Tensor], dims: dict[str, int], folder: Path) -> None:
        path = folder / f"{spec.name}.py"
        path.write_text(render(spec))
        specification = importlib.util.spec_from_file_location(spec.name, path)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        used = [tensors[arg.name] for arg in spec.args if arg.kind != "scalar"]
        allowed[:] = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in used]
        values = [run_time_value(arg, tensors, dims) for arg in spec.args]
        grid = tuple(evaluate(size, dims) for size in spec.grid)
        getattr(module, spec.name)[grid](*values, **constexprs(spec))

    def run_time_value(arg: Arg, tensors: dict[str, Tensor], dims: dict[str, int]) -> Any:
        if arg.kind == "scalar":
            return evaluate(arg.value, dims) if arg.value != "" else dims[arg.name]
        assert tensors[arg.name].is_contiguous()
        if arg.kind == "pointer":
            return tensors[arg.name]
        shape = [evaluate(size, dims) for size in arg.shape]
        return TensorDescriptor.from_tensor(tensors[arg.name].view(shape), list(arg.block))

    Check = Callable[[Tensor, Tensor], None]

    @pytest.fixture
    def assert_rounds_to() -> Check:
        """Call with a result and its fp64 reference: equal but for roundings to the result's dtype.

        Intermediate roundings (bf16 softmax weights, fp32 sums) are relative to the largest terms, hence the
        absolute part of the bound.
        """

        def check(got: Tensor, expected: Tensor) -> None:
            assert expected.dtype == torch.float64
            assert got.shape == expected.shape
            unit = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-19}[got.dtype]
            bound = unit * (expected.abs() + 0.5 * expected.abs().max())
            error = (got.double() - expected).abs()
            assert not error.isnan().any(), "nan in the result"
            worst = float((error / bound.clamp(min=1e-300)).max())
            assert worst <= 1.0, f"error is {worst:.3g} times the bound"

        return check
