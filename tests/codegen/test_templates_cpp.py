"""The shared text of the C++ templates: bf16 rounding, exp, and that every level compiles."""

import ctypes
from importlib import resources

import numpy as np
import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary

from octavo.codegen.render import render_template, template_names
from octavo.compiler.host import LEVELS, build_shared_library
from octavo.compiler.program import DIMS

TEXT = """
extern "C" void test_exp(const float* x, float* y, int64_t count) {
    for (i64 i = 0; i < count; ++i) y[i] = exp_fp32(x[i]);
}
extern "C" void test_narrow(const float* x, uint16_t* y, int64_t count) {
    for (i64 i = 0; i < count; ++i) y[i] = narrow<bf16>(x[i]).bits;
}
"""


@pytest.fixture(scope="module", params=RUNNABLE)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return KernelLibrary([], request.param, TEXT).library


def apply(library: ctypes.CDLL, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    library[name](ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel()))
    return y


def test_exp_is_within_two_ulp(library: ctypes.CDLL) -> None:
    x = torch.cat((torch.linspace(-87, 88.7, 1_000_003), torch.linspace(-1, 1, 100_003)))
    y = apply(library, "test_exp", x, torch.empty_like(x))
    exact = np.exp(x.double().numpy())
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(y.double().numpy() - exact) / ulp).max() <= 2.0


def test_exp_at_the_edges(library: ctypes.CDLL) -> None:
    x = torch.tensor(
        [float("-inf"), -1e30, -104.0, -100.0, -88.0, 0.0, -0.0, 88.8, float("inf"), float("nan")]
    )
    y = apply(library, "test_exp", x, torch.empty_like(x))
    assert torch.allclose(y, torch.exp(x.double()).float(), rtol=1e-6, atol=3e-45, equal_nan=True)
    assert y[0] == 0.0 and y[5] == 1.0 and y[8] == float("inf")


def test_bf16_rounds_as_torch_does(library: ctypes.CDLL) -> None:
    upper = torch.arange(0, 2**16, dtype=torch.int64)[:, None] * 2**16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper + lower).flatten()
    x = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)
    y = apply(library, "test_narrow", x, torch.empty(x.numel(), dtype=torch.int16)).view(torch.bfloat16)
    expected = x.to(torch.bfloat16)
    assert torch.equal(y.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(y[kept].view(torch.int16), expected[kept].view(torch.int16))


@pytest.mark.parametrize("features", LEVELS)
def test_every_level_compiles_and_says_its_name(features: str) -> None:
    source = render_template(
        "cpp/program.cpp.jinja",
        version="test",
        dims=DIMS,
        kernels=(),
        buffers=(),
        segments=((),),
        workspace="0",
    )
    library = ctypes.CDLL(str(build_shared_library(source, features))) if features in RUNNABLE else None
    build_shared_library(source, features)
    if library:
        library.octavo_features.restype = ctypes.c_char_p
        assert library.octavo_features().decode() == features


def test_templates_stay_small_and_say_what_they_compute() -> None:
    folder = resources.files("octavo.codegen") / "templates"
    for name in template_names("cpp"):
        lines = (folder / name).read_text().splitlines()
        assert lines[0].startswith("// ") and len(lines) <= 120 and max(map(len, lines)) <= 130, name
