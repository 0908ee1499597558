"""Rendering: strict about parameters, clean about control lines, and its first line says what the text is."""

import jinja2
import pytest

from octavo.codegen.kernel import Arg, KernelSpec
from octavo.codegen.render import render, render_template, template_names
from octavo.compiler.version import VERSION

ADD = KernelSpec(
    "add",
    "cpp/add.cpp.jinja",
    (("dtype", "fp32"), ("WIDTH", 576)),
    tuple(Arg(name, "pointer", "fp32") for name in ("x", "y", "out")),
    label="fp32_w576",
)

GOLDEN = """\
// octavo {version} | cpp/add.cpp.jinja | dtype=fp32 WIDTH=576 | {key}
// out = x + y, elementwise; out may be x or y
// x, y, out: (num_rows, 576) fp32; the sum in fp32, one rounding.
static int add__fp32_w576__{key}(const fp32* x, const fp32* y, fp32* out, i64 num_rows, int num_threads) {{
    constexpr i64 WIDTH = 576;
#pragma omp parallel for schedule(static) num_threads(team(num_rows * WIDTH, num_threads))
    for (i64 t = 0; t < num_rows; ++t) {{
#pragma GCC ivdep
        for (i64 i = t * WIDTH; i < (t + 1) * WIDTH; ++i) out[i] = narrow<fp32>(widen(x[i]) + widen(y[i]));
    }}
    return 0;
}}
"""


def test_renders_add() -> None:
    assert render(ADD) == GOLDEN.format(version=VERSION, key=ADD.key)


def test_missing_parameter_is_an_error() -> None:
    spec = KernelSpec(ADD.op, ADD.template, ADD.params[:1], ADD.args)
    with pytest.raises(jinja2.UndefinedError, match="'WIDTH' is undefined"):
        render(spec)


def test_control_lines_leave_nothing_behind() -> None:
    params = (("dtype", "fp32"), ("out_dtype", "fp32"), ("bias", True), ("N", 4), ("K", 64), ("CHUNK", 64))
    text = render(KernelSpec("linear", "cpp/linear.cpp.jinja", params, ()))
    assert "//%" not in text and "{%" not in text and "\n\n" not in text
    assert "const fp32* bias," in text
    plain = render(
        KernelSpec("linear", "cpp/linear.cpp.jinja", (*params[:2], ("bias", False), *params[3:]), ())
    )
    assert "bias" not in plain.split("\n", 1)[1]


def test_python_templates_use_their_own_comments() -> None:
    names = template_names("triton")
    assert names and all(name.endswith(".py.jinja") for name in names)
    assert all(name.endswith(".cpp.jinja") for name in template_names("cpp"))


def test_unknown_suffix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a template ends with one of .py.jinja, .cpp.jinja"):
        render_template("cpp/add.txt")
