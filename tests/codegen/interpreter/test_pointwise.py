"""layer_norm and pointwise in the interpreter, against the dialect's references in fp64."""

from collections.abc import Callable

import pytest
import torch

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.specs_triton import layer_norm_spec, pointwise_spec
from octavo.compiler.ops.norm import layer_norm
from octavo.compiler.ops.pointwise import evaluate
from octavo.compiler.pointwise import FUNCTIONS

Launch = Callable[[KernelSpec, dict[str, torch.Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EPS = 1e-5


@pytest.mark.parametrize(("dtype", "weights"), [("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32")])
@pytest.mark.parametrize(
    ("tokens", "hidden", "present"),
    [
        (1, 64, ("weight", "bias")),
        (3, 7, ("weight",)),
        (17, 1000, ("weight", "bias")),
        (3, 1, ("bias",)),
        (2, 64, ()),
    ],
)
def test_layer_norm(
    launch: Launch,
    assert_rounds_to: Check,
    dtype: str,
    weights: str,
    tokens: int,
    hidden: int,
    present: tuple[str, ...],
) -> None:
    x = (torch.randn(tokens, hidden) * 3 + 2).to(DTYPES[dtype])
    given = {name: torch.randn(hidden).to(DTYPES[weights]) for name in present}
    out = torch.full_like(x, float("nan"))
    spec = layer_norm_spec("T", hidden, dtype, EPS, dict.fromkeys(present, weights))
    launch(spec, {"x": x, **given, "out": out}, {"T": tokens})
    weight, bias = (given[name].double() if name in given else None for name in ("weight", "bias"))
    assert_rounds_to(out, layer_norm(x.double(), weight, bias, EPS), sums=0.5)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 7), (17, 1), (2, 1100)])
@pytest.mark.parametrize(
    ("expression", "operands"),
    [
        ("a", {"a": ("bf16", "rows")}),
        ("(a - c) * b", {"a": ("fp32", "rows"), "b": ("bf16", "rows"), "c": ("fp32", "vector")}),
        (
            "silu(a) * 0.5 - d / (1.0 + exp(b))",
            {"a": ("bf16", "rows"), "b": ("fp32", "vector"), "d": ("bf16", "rows")},
        ),
        ("a + sigmoid(b) * c", {"a": ("bf16", "rows"), "b": ("fp32", "column"), "c": ("bf16", "rows")}),
    ],
)
def test_pointwise(
    launch: Launch, assert_rounds_to: Check, expression: str, operands: dict[str, tuple[str, str]],
    tokens: int, width: int, out_dtype: str,
) -> None:  # fmt: skip
    shapes = {"rows": (tokens, width), "vector": (width,), "column": (tokens, 1)}
    tensors = {name: torch.randn(shapes[kind]).to(DTYPES[dtype]) for name, (dtype, kind) in operands.items()}
    out = torch.full((tokens, width), float("nan"), dtype=DTYPES[out_dtype])
    launch(
        pointwise_spec("T", width, operands, expression, out_dtype), {**tensors, "out": out}, {"T": tokens}
    )
    wide = {name: t.double() for name, t in tensors.items()}
    assert_rounds_to(out, evaluate(expression, wide), sums=0.5)


EXTREMES = (0.0, 1e-6, -1e-6, 0.5, -0.5, 9.0, -9.0, 30.0, -30.0, 88.0, -88.0, 1e4, -1e4, 1e30, -1e30, float("inf"),
            float("-inf"), float("nan"))  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_at_extreme_inputs(launch: Launch, function: str) -> None:
    """Within 2^-21 of the value or, for what 1 + erf, 1 + tanh and exp leave, of x; nan only where torch has one."""
    x = torch.tensor(EXTREMES)[None]
    out = torch.empty_like(x)
    spec = pointwise_spec("T", len(EXTREMES), {"a": ("fp32", "rows")}, f"{function}(a)", "fp32")
    launch(spec, {"a": x, "out": out}, {"T": 1})
    expected = evaluate(f"{function}(a)", {"a": x.double()})
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.to(torch.float32).isinf())
    finite = expected.to(torch.float32).isfinite()
    owed = x.double().abs().clamp(max=10) if function in ("tanh", "gelu", "gelu_tanh") else torch.zeros(1)
    bound = (expected.abs() + owed) * 2.0**-21 + (2.0**-22 if function == "tanh" else 2.0**-126)
    assert bool(((out.double() - expected).abs() <= bound)[finite].all())
