"""The grammar of elementwise expressions: what it takes, what it refuses, its values and its text elsewhere."""

import pytest
import torch

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.ops.pointwise import evaluate, pointwise
from octavo.compiler.pointwise import FUNCTIONS, MAX_DEPTH, MAX_LENGTH, operations, parse, write

A, B, C, D = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", A),
        ("a - b * c / d", A - B * C / D),
        ("(a - b) * -c", (A - B) * -C),
        ("a / 2 - 1.5e-2", A / 2 - 1.5e-2),
        ("20.0 * tanh(a / 20.0)", 20 * torch.tanh(A / 20)),
        ("silu(a + b) * c", torch.nn.functional.silu(A + B) * C),
    ],
)
def test_values_are_those_of_torch(text: str, expected: torch.Tensor) -> None:
    assert torch.equal(evaluate(text, {"a": A, "b": B, "c": C, "d": D}), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_torch(name: str) -> None:
    owner = torch.nn.functional if name in ("silu", "gelu", "gelu_tanh") else torch
    options = {"approximate": "tanh"} if name == "gelu_tanh" else {}
    expected = getattr(owner, name.removesuffix("_tanh"))(A.abs(), **options)
    assert torch.equal(evaluate(f"{name}(a)", {"a": A.abs()}), expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "invalid syntax"),
        ("a +", "invalid syntax"),
        ("a, b", "a character is not in the grammar"),
        ("a\n+ b", "a character is not in the grammar"),
        ("a # b", "a character is not in the grammar"),
        ("a \\", "a character is not in the grammar"),
        ("exp(x=a)", "a character is not in the grammar"),
        ("x + a", "'x' is not in the grammar"),
        ("__class__", "'__class__' is not in the grammar"),
        ("exp", "'exp' is not in the grammar"),
        ("sin(a)", "'sin(a)' is not in the grammar"),
        ("a(b)", "'a(b)' is not in the grammar"),
        ("exp()", "'exp()' is not in the grammar"),
        ("exp(*a)", "'*a' is not in the grammar"),
        ("exp(exp)(a)", "'exp(exp)(a)' is not in the grammar"),
        ("exp(2.0) * a", "'exp(2.0)' is not in the grammar"),
        ("a.T", "'a.T' is not in the grammar"),
        ("(lambda *a)", "invalid syntax"),
        ("a if a else b", "'a if a else b' is not in the grammar"),
        ("a ** 2", "'a ** 2' is not in the grammar"),
        ("a // b", "'a // b' is not in the grammar"),
        ("+a", "'+a' is not in the grammar"),
        ("not a", "'not a' is not in the grammar"),
        ("a * True", "'True' is not in the grammar"),
        ("a * 1j", "'1j' is not in the grammar"),
        ("a * 1e999", "is not in the grammar"),
        ("a * inf", "'inf' is not in the grammar"),
        ("a + " + "9" * 400, "int too large to convert to float"),
        ("2.0 * 3.0", "it reads no tensor"),
    ],
)
def test_refuses(text: str, said: str) -> None:
    with pytest.raises(IllegalGraphError) as error:
        parse(text)
    assert str(error.value).startswith("pointwise: ") and said in str(error.value)


@pytest.mark.parametrize(
    "text", ["lambda: a", "[a for a in b]", "{a}", "a[0]", "a if b else 'c'", "(a := b)", "a == b", "a; b"]
)
def test_refuses_other_syntax_by_its_characters(text: str) -> None:
    with pytest.raises(IllegalGraphError, match=r"is not an elementwise expression: "):
        parse(text)


def nested(levels: int, form: str) -> str:
    text = "a"
    for _ in range(levels - 1):
        text = form.replace("a", text)
    return text


@pytest.mark.parametrize("form", ["-a", "(a + 1.0)", "(1.0 - a)"])
def test_deep_nesting_is_refused_before_it_overflows_a_stack(form: str) -> None:
    text = nested(MAX_DEPTH, form)
    assert evaluate(text, {"a": A}).shape == A.shape
    for levels, said in ((MAX_DEPTH + 1, f"at most {MAX_DEPTH} levels"), (400, "")):
        with pytest.raises(IllegalGraphError, match=said):
            parse(nested(levels, form))


def test_long_text_is_refused_and_not_repeated_in_the_message() -> None:
    terms = "a" + " + a" * ((MAX_LENGTH - 1) // 4)
    with pytest.raises(IllegalGraphError, match=f"at most {MAX_LENGTH} characters, got {len(terms) + 4}"):
        parse(terms + " + a")
    with pytest.raises(IllegalGraphError) as error:
        parse("(" * MAX_LENGTH)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "text", ["a - b * c / d", "-(a + 2) * gelu_tanh(-b)", "a - (b - c) - 1e-05", "exp(a) / 3"]
)
def test_written_text_means_the_same(text: str) -> None:
    values = {"a": A, "b": B, "c": C, "d": D}
    again = write(text, repr, lambda function, argument: f"{function}({argument})")
    assert torch.equal(evaluate(again, values), evaluate(text, values))
    assert write(again, repr, lambda function, argument: f"{function}({argument})") == again


def test_writes_another_language() -> None:
    text = write("silu(a) * 2 - b", lambda value: f"{value}f", lambda function, x: f"my_{function}<{x}>")
    assert text == "((my_silu<a> * 2.0f) - b)"


@pytest.mark.parametrize(("text", "expected"), [("a", 0), ("-a * b", 2), ("silu(a + b) / 2", 10)])
def test_operations(text: str, expected: int) -> None:
    assert operations(text) == expected


def test_op_computes_wide_and_rounds_once() -> None:
    a, b = (t.to(torch.bfloat16) for t in (A, B))
    result = pointwise(a, b, None, None, "a * b - a", "bf16")
    assert torch.equal(result, (a.float() * b.float() - a.float()).to(torch.bfloat16))
    assert pointwise(a, b, None, None, "a * b", "fp32").dtype == torch.float32


def test_op_keeps_fp64_and_its_fake_agrees() -> None:
    vector = D[0]
    for dtype in (torch.float64, torch.float32):
        given = (A.to(dtype), None, vector.to(dtype), None, "exp(a) * c", "bf16")
        result = torch.ops.octavo.pointwise(*given)
        meta = torch.ops.octavo.pointwise(
            *(t.to("meta") if isinstance(t, torch.Tensor) else t for t in given)
        )
        assert (result.dtype, result.shape) == (meta.dtype, meta.shape)
        assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    assert torch.equal(torch.ops.octavo.pointwise(A, None, None, None, "exp(a)", "bf16"), A.exp())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("weighted", "biased"), [(True, True), (True, False), (False, True), (False, False)])
def test_layer_norm_is_torchs_and_keeps_fp64(dtype: torch.dtype, weighted: bool, biased: bool) -> None:
    x, weight, bias = (t.to(dtype) for t in (A * 3 + 5, B[0], C[0]))
    given = (weight if weighted else None, bias if biased else None)
    result = torch.ops.octavo.layer_norm(x, *given, 1e-3)
    wide = [None if t is None else t.double() for t in given]
    expected = torch.nn.functional.layer_norm(x.double(), (8,), wide[0], wide[1], 1e-3)
    assert result.dtype == dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
