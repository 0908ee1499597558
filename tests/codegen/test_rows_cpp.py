"""The C++ kernels that work row by row, against the references in fp64; and what the table refuses."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, guarded, rounding
from lowered import LoweredGraph
from torch import Tensor

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.rows_cpp import ROWS
from octavo.compiler.errors import CodegenError
from octavo.compiler.pointwise import ACTIVATIONS

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = (FP32, BF16)
WIDTHS = (7, 16, 576, 1000)
TOKENS = (1, 3, 17, 129)
EPS = 1e-5


@cache
def norm_spec(op: str, hidden: int, dtype: torch.dtype, offset: float = 0.0) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    tokens = [graph.tokens(name, (hidden,), dtype) for name in ("x", "residual")]
    weight = graph.weight("w", torch.zeros(hidden))
    return cpp_spec(graph.call(op, *tokens[: 1 if op == "rms_norm" else 2], weight, EPS, offset))


@cache
def two_spec(op: str, width: int, dtype: torch.dtype, *options: str) -> KernelSpec:
    """add and act_mul."""
    graph = LoweredGraph()
    graph.input("input_ids")
    width = 2 * width if op == "act_mul" else width
    tokens = [graph.tokens(name, (width,), dtype) for name in ("x", "y")]
    return cpp_spec(graph.call(op, *tokens[: 1 if op == "act_mul" else 2], *options))


@cache
def pick_spec(op: str, width: int, dtype: torch.dtype) -> KernelSpec:
    """embedding of 11 rows, and gather_logits."""
    graph = LoweredGraph()
    ids, rows = graph.input("input_ids"), graph.input("logit_rows")
    if op == "embedding":
        return cpp_spec(graph.call(op, ids, graph.weight("w", torch.zeros(11, width, dtype=dtype))))
    return cpp_spec(graph.call(op, graph.tokens("x", (width,), dtype), rows))


# heads, kv_heads, head_dim, value_dim, rotary_dim, page_size, interleaved
ROPES = (
    (9, 3, 64, 64, 64, 16, False),
    (4, 4, 16, 16, 16, 64, True),
    (8, 1, 10, 7, 6, 16, False),
    (2, 1, 10, 7, 6, 16, True),
)


@cache
def rope_spec(shape: tuple[int, ...], dtype: torch.dtype, table_dtype: torch.dtype) -> KernelSpec:
    heads, _, head_dim, _, rotary_dim, _, interleaved = shape
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (heads, head_dim), dtype)
    angles = [graph.tokens(name, (rotary_dim,), table_dtype) for name in ("cos", "sin")]
    return cpp_spec(graph.call("rope", x, *angles, bool(interleaved)))


@cache
def write_spec(op: str, shape: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype) -> KernelSpec:
    """kv_write, and rope_kv_write with a table of 50 positions."""
    heads, kv_heads, head_dim, value_dim, rotary_dim, page_size, interleaved = shape
    graph = LoweredGraph()
    graph.input("input_ids")
    positions, slots = graph.input("positions"), graph.input("slot_mapping")
    k_cache = graph.cache("k_cache_0", kv_heads, page_size, head_dim, cache_dtype)
    v_cache = graph.cache("v_cache_0", kv_heads, page_size, value_dim, cache_dtype)
    if op == "kv_write":
        k, v = (graph.tokens(n, (kv_heads, d), dtype) for n, d in (("k", head_dim), ("v", value_dim)))
        return cpp_spec(graph.call(op, k, v, k_cache, v_cache, slots))
    qkv = graph.tokens("qkv", ((heads + kv_heads) * head_dim + kv_heads * value_dim,), dtype)
    tables = [graph.weight(name, torch.zeros(50, rotary_dim)) for name in ("cos", "sin")]
    return cpp_spec(
        graph.call(op, qkv, *tables, positions, slots, k_cache, v_cache, heads, bool(interleaved))
    )


@pytest.fixture(scope="module", params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    specs = [
        norm_spec(op, w, d, o)
        for op in ("rms_norm", "add_rms_norm")
        for w in WIDTHS
        for d in DTYPES
        for o in (0.0, 1.0)
    ]
    specs += [two_spec("add", w, d) for w in WIDTHS for d in DTYPES]
    specs += [two_spec("act_mul", w, d, a) for w in WIDTHS for d in DTYPES for a in ACTIVATIONS]
    specs += [pick_spec(op, w, d) for op in ("embedding", "gather_logits") for w in WIDTHS for d in DTYPES]
    specs += [rope_spec(shape, d, t) for shape in ROPES for d in DTYPES for t in DTYPES]
    specs += [
        write_spec(op, s, d, c)
        for op in ("kv_write", "rope_kv_write")
        for s in ROPES
        for d in DTYPES
        for c in DTYPES
    ]
    return KernelLibrary(specs, request.param)


def draw(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    torch.manual_seed(sum(shape))
    return guarded(torch.randn(shape).to(dtype))


def is_close(actual: Tensor, expected: Tensor, magnitude: Tensor | float, roundings: int = 1) -> bool:
    """Within `roundings` to actual's dtype, and 64 of fp32 relative to the magnitude of what was added up."""
    bound = expected.abs() * rounding(actual.dtype) * roundings + magnitude * 64 * rounding(FP32)
    return bool(((actual.double() - expected).abs() <= bound).all())


def call(kernels: KernelLibrary, spec: KernelSpec, tensors: Sequence[Tensor], *sizes: int) -> None:
    assert kernels(spec, tensors, sizes) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(kernels: KernelLibrary, hidden: int, dtype: torch.dtype, offset: float) -> None:
    weight = draw(hidden)
    for tokens in TOKENS:
        x, out = draw(tokens, hidden, dtype=dtype), torch.empty(tokens, hidden, dtype=dtype)
        call(kernels, norm_spec("rms_norm", hidden, dtype, offset), [x, weight, out], tokens)
        expected = torch.ops.octavo.rms_norm(x.double(), weight.double(), EPS, offset)
        assert is_close(out, expected, expected.abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("in_place", ["", "x", "residual"])
def test_add_rms_norm(kernels: KernelLibrary, hidden: int, dtype: torch.dtype, in_place: str) -> None:
    weight = draw(hidden)
    for tokens in TOKENS:
        x, residual = draw(tokens, hidden, dtype=dtype), draw(tokens, hidden, 1, dtype=dtype).squeeze(-1)
        total = x + residual
        expected = torch.ops.octavo.rms_norm(total.double(), weight.double(), EPS, 1.0)
        out = torch.empty(tokens, hidden, dtype=dtype)
        written = {"": torch.empty_like(out), "x": x, "residual": residual}[in_place]
        spec = norm_spec("add_rms_norm", hidden, dtype, 1.0)
        call(kernels, spec, [x, residual, weight, out, written], tokens)
        assert torch.equal(written, total)
        assert is_close(out, expected, expected.abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_add(kernels: KernelLibrary, width: int, dtype: torch.dtype) -> None:
    for tokens in TOKENS:
        x, y = draw(tokens, width, dtype=dtype), draw(tokens, width, 1, dtype=dtype).squeeze(-1)
        expected = x + y
        out = torch.empty_like(expected)
        call(kernels, two_spec("add", width, dtype), [x, y, out], tokens)
        call(kernels, two_spec("add", width, dtype), [x, y, x], tokens)
        assert torch.equal(out, expected) and torch.equal(x, expected)


@pytest.mark.parametrize("op", ["rms_norm", "add", "linear"])
def test_heads_count_as_rows(op: str) -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (9, 64), FP32)
    others = {"rms_norm": (graph.weight("w", torch.zeros(64)), EPS), "add": (x,)}
    others["linear"] = (graph.weight("m", torch.zeros(8, 64)),)
    spec = cpp_spec(graph.call(op, x, *others[op]))
    assert spec.args[-1].value == "9*T"
    assert 64 in dict(spec.params).values()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_mul(kernels: KernelLibrary, width: int, dtype: torch.dtype, activation: str) -> None:
    for tokens in TOKENS:
        gate_up = draw(tokens, 2 * width, dtype=dtype)
        gate_up[:, :width] *= 4
        gate_up[0, :5] = torch.tensor([0.0, -0.0, 200.0, -200.0, -88.5])
        out = torch.empty(tokens, width, dtype=dtype)
        call(kernels, two_spec("act_mul", width, dtype, activation), [gate_up, out], tokens)
        expected = torch.ops.octavo.act_mul(gate_up.double(), activation)
        # 1 + erf and 1 + tanh cancel in the reference, by 1e-16 of the product; the kernel's forms do not.
        product = (gate_up[:, :width] * gate_up[:, width:]).double().abs()
        assert is_close(out, expected, expected.abs() + product * 1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_picked(kernels: KernelLibrary, width: int, dtype: torch.dtype) -> None:
    table = draw(11, width, dtype=dtype)
    for count in TOKENS:
        rows = torch.arange(count) * 3 % 11
        out = torch.empty(count, width, dtype=dtype)
        call(kernels, pick_spec("embedding", width, dtype), [rows, table, out], count)
        assert torch.equal(out, table[rows])
        out.zero_()
        call(kernels, pick_spec("gather_logits", width, dtype), [table, rows, out], 11, count)
        assert torch.equal(out, table[rows])


@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROPES, ids=str)
def test_rope(
    kernels: KernelLibrary, shape: tuple[int, ...], dtype: torch.dtype, table_dtype: torch.dtype
) -> None:
    heads, _, head_dim, _, rotary_dim, _, interleaved = shape
    for tokens in TOKENS:
        x = draw(tokens, heads, head_dim, dtype=dtype)
        cos, sin = (
            draw(tokens, rotary_dim, dtype=table_dtype),
            draw(1, tokens, rotary_dim, dtype=table_dtype)[0],
        )
        out = torch.empty_like(x)
        call(kernels, rope_spec(shape, dtype, table_dtype), [x, cos, sin, out], tokens)
        wide = [t[None].double() for t in (x, cos, sin)]
        expected = torch.ops.octavo.rope(*wide, bool(interleaved))[0]
        assert is_close(out, expected, 30.0)


def pages(shape: tuple[int, ...], cache_dtype: torch.dtype) -> list[Tensor]:
    _, kv_heads, head_dim, value_dim, _, page_size, _ = shape
    return [
        torch.full((13, kv_heads, page_size, dim), 77.0, dtype=cache_dtype) for dim in (head_dim, value_dim)
    ]


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROPES, ids=str)
def test_kv_write(
    kernels: KernelLibrary, shape: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    _, kv_heads, head_dim, value_dim, _, page_size, _ = shape
    for tokens in TOKENS:
        k, v = draw(tokens, kv_heads, head_dim, dtype=dtype), draw(tokens, kv_heads, value_dim, dtype=dtype)
        slots = torch.randperm(13 * page_size)[:tokens]
        slots[tokens // 2] = -1
        actual, expected = pages(shape, cache_dtype), pages(shape, cache_dtype)
        call(kernels, write_spec("kv_write", shape, dtype, cache_dtype), [k, v, *actual, slots], tokens, 13)
        torch.ops.octavo.kv_write(k[None], v[None], *expected, slots)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROPES, ids=str)
def test_rope_kv_write(
    kernels: KernelLibrary, shape: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    heads, kv_heads, head_dim, value_dim, rotary_dim, page_size, interleaved = shape
    cos, sin = draw(50, rotary_dim), draw(1, 50, rotary_dim)[0]
    for tokens in TOKENS:
        qkv = draw(tokens, (heads + kv_heads) * head_dim + kv_heads * value_dim, dtype=dtype)
        positions, slots = torch.arange(tokens) * 7 % 50, torch.randperm(13 * page_size)[:tokens]
        slots[tokens // 2] = -1
        actual, expected = pages(shape, cache_dtype), [page.double() for page in pages(shape, cache_dtype)]
        out = torch.empty(tokens, heads, head_dim, dtype=dtype)
        spec = write_spec("rope_kv_write", shape, dtype, cache_dtype)
        call(kernels, spec, [qkv, cos, sin, positions, slots, *actual, out], tokens, 13)
        q = torch.ops.octavo.rope_kv_write(
            qkv[None].double(),
            cos.double(),
            sin.double(),
            positions[None],
            slots,
            *expected,
            heads,
            bool(interleaved),
        )[0]
        assert is_close(out, q, 30.0)
        # Keys are rounded to the activations' dtype, then to the pages'.
        coarser = max((dtype, cache_dtype), key=rounding)
        assert all(
            is_close(a.to(coarser), e, 30.0, roundings=2) for a, e in zip(actual, expected, strict=True)
        )


def test_refuses_to_leave_its_buffers(kernels: KernelLibrary) -> None:
    shape, out = ROPES[0], torch.empty(1, 16)
    table = draw(11, 16)
    for row in (-1, 11, 2**40):
        rows = torch.tensor([row])
        assert kernels(pick_spec("embedding", 16, FP32), [rows, table, out], [1]) == 1
        assert kernels(pick_spec("gather_logits", 16, FP32), [table, rows, out], [11, 1]) == 1
    k, v = draw(1, 3, 64), draw(1, 3, 64)
    full = torch.tensor([13 * 16])
    assert kernels(write_spec("kv_write", shape, FP32, FP32), [k, v, *pages(shape, FP32), full], [1, 13]) == 2
    qkv, angles, q = draw(1, 15 * 64), draw(50, 64), torch.empty(1, 9, 64)
    spec = write_spec("rope_kv_write", shape, FP32, FP32)
    for position, slot, error in ((0, 13 * 16, 2), (50, 0, 3), (-1, 0, 3)):
        where = [torch.tensor([position]), torch.tensor([slot])]
        assert kernels(spec, [qkv, angles, angles, *where, *pages(shape, FP32), q], [1, 13]) == error


def test_every_row_has_its_reasons() -> None:
    with pytest.raises(
        CodegenError, match="activation must be one of silu, gelu, gelu_tanh, relu, got 'swish'"
    ):
        two_spec("act_mul", 16, FP32, "swish")
    with pytest.raises(CodegenError, match="expected fp32 or bf16, one for all, got x float16"):
        norm_spec("rms_norm", 16, torch.float16)
    assert len({row.op for row in ROWS}) == len(ROWS)


def test_a_step_without_tokens_is_no_work(kernels: KernelLibrary) -> None:
    kernels.assert_idle_without_tokens()
