"""These tests run kernels in Triton's interpreter, and are collected only where TRITON_INTERPRET=1 is set.

Triton decides at import whether its own library functions are interpreted, so they cannot share a process
with code that compiles. tests/codegen/test_triton_templates.py starts one for each file of this folder.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.codegen.kernel import KernelSpec

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETING else ["test_*.py"]

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Call with a spec, its tensors by argument name and the sizes of the step."""
    import triton_interpreter  # not at the top: where nothing is interpreted, this file is read too

    triton_interpreter.install()
    return lambda spec, tensors, dims: triton_interpreter.launch(spec, tensors, dims, tmp_path)


@pytest.fixture
def assert_rounds_to() -> Callable[..., None]:
    """Call with a result, its fp64 reference and `sums`: what an element owes to larger terms that cancel.

    Without it the two may differ by one rounding to the result's dtype. Sums that are rounded on the way
    (softmax weights in bf16, fp32 accumulation) are off relative to their largest terms, at most `sums` times
    the largest result.
    """

    def check(got: Tensor, expected: Tensor, sums: float = 0.0) -> None:
        assert expected.dtype == torch.float64
        assert got.shape == expected.shape
        unit = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-19}[got.dtype]
        bound = unit * (1.001 * expected.abs() + sums * expected.abs().max())
        error = (got.double() - expected).abs()
        assert not error.isnan().any(), "nan in the result"
        worst = float((error / bound.clamp(min=1e-300)).max())
        assert worst <= 1.0, f"error is {worst:.3g} times the bound"

    return check
