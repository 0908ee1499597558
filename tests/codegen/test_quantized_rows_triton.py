"""What the rows of quantised products read off nodes, what they refuse, and how their kernels are called."""

import itertools
import math
import operator
from dataclasses import replace

import pytest
import torch
from lowered import LoweredGraph
from torch import fx

from octavo.codegen.emit import emit
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.quantized_rows_triton import LAYOUT, ROWS
from octavo.codegen.row import op_name
from octavo.codegen.rows_triton import MAX_ROW
from octavo.codegen.select import Selection, select
from octavo.compiler.errors import CodegenError
from octavo.compiler.expression import evaluate, holds, validate, validate_condition
from octavo.compiler.program import DIMS, ITEM_BYTES
from octavo.compiler.program_json import program_from_json, program_to_json
from octavo.compiler.target import load_target
from octavo.passes.plan_memory import plan_memory

B200 = load_target("b200")
BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
FORMATS = [("nvfp4", True), ("nvfp4", False), ("fp8", True), ("fp8", False)]
every_format = pytest.mark.parametrize(("form", "is_static"), FORMATS)


class Quantized(LoweredGraph):
    """A graph of x (1, T, k), or of L rows, with what quantised ops take."""

    def __init__(self, k: int = 128, dtype: torch.dtype = BF16, rows: str = "T") -> None:
        super().__init__()
        ids, picked = self.input("input_ids"), self.input("logit_rows")
        self.k, self.dtype = k, dtype
        self.x = self.call("embedding", ids, self.weight("table", torch.zeros(3, k, dtype=dtype)))
        if rows == "L":
            self.x = self.call("gather_logits", self.x, picked)

    def outer(self, is_static: bool) -> fx.Node | None:
        return self.weight("outer", torch.ones(1)) if is_static else None

    def parts(self, node: fx.Node) -> list[fx.Node]:
        return [self.function(operator.getitem, node, i) for i in range(len(node.meta["val"]))]

    def quantize(self, form: str, is_static: bool, layout: str = LAYOUT) -> fx.Node:
        return self.call("quantize", self.x, self.outer(is_static), form, layout)

    def nvfp4_weight(self, n: int) -> list[fx.Node]:
        codes = torch.zeros(n, self.k // 2, dtype=torch.uint8)
        scales = torch.zeros(-(-n // 128) * -(-self.k // 64) * 512).to(E4M3)
        return [self.weight("codes", codes), self.weight("scales", scales)]

    def alpha(self, count: int) -> fx.Node:
        return self.weight("alpha", torch.ones(count))

    def bias(self, n: int) -> fx.Node:
        return self.weight("bias", torch.zeros(n, dtype=self.dtype))

    def product(
        self, form: str, is_static: bool = True, n: int = 256, by_column: bool = False, has_bias: bool = False
    ) -> fx.Node:
        alpha, bias = self.alpha(n if by_column else 1), self.bias(n) if has_bias else None
        dtype = "bf16" if self.dtype == BF16 else "fp32"
        if form == "weight_only":
            return self.call("nvfp4_weight_linear", self.x, *self.nvfp4_weight(n), alpha, bias, LAYOUT)
        parts = self.parts(self.quantize(form, is_static))
        row_scale = None if is_static else parts[-1]
        if form == "fp8":
            weight = self.weight("codes", torch.zeros(n, self.k).to(E4M3))
            return self.call("fp8_linear", parts[0], weight, alpha, row_scale, bias, dtype)
        pair = (*parts[:2], *self.nvfp4_weight(n))
        return self.call("nvfp4_linear", *pair, alpha, row_scale, bias, dtype, LAYOUT)


def chosen(node: fx.Node, target: str = "b200", arch: int | None = None) -> Selection:
    found = load_target(target)
    return select(node, found if arch is None else replace(found, arch=arch))


def names(spec: KernelSpec) -> list[tuple[str, str]]:
    return [(arg.name, arg.dtype) for arg in spec.args]


def parts_of(form: str, is_static: bool) -> list[tuple[str, str]]:
    dtypes = ["u8", "fp8"] if form == "nvfp4" else ["fp8"]
    dtypes += [] if is_static else ["fp32"]
    return [(f"out_{i}" if len(dtypes) > 1 else "out", dtype) for i, dtype in enumerate(dtypes)]


@every_format
def test_results_of_a_quantisation_are_those_of_the_op(form: str, is_static: bool) -> None:
    node = Quantized().quantize(form, is_static)
    spec = chosen(node).spec
    made = [entry for entry in names(spec) if entry[0].startswith("out")]
    assert [entry for entry in made if entry[0] != "outer"] == parts_of(form, is_static)
    assert (("outer", "fp32") in names(spec)) == is_static
    kinds = {"u8": torch.uint8, "fp8": E4M3, "fp32": FP32}
    assert [kinds[dtype] for _, dtype in parts_of(form, is_static)] == [v.dtype for v in node.meta["val"]]


@every_format
@pytest.mark.parametrize("weight_dtype", [BF16, FP32], ids=str)
def test_a_norm_that_quantises_makes_the_sum_last(
    form: str, is_static: bool, weight_dtype: torch.dtype
) -> None:
    g = Quantized()
    weight, outer = g.weight("norm", torch.zeros(g.k, dtype=weight_dtype)), g.outer(is_static)
    residual = g.call("add", g.x, g.x)
    plain = chosen(g.call("rms_norm_quantize", g.x, weight, 1e-6, 1.0, outer, form, LAYOUT)).spec
    fused = chosen(
        g.call("add_rms_norm_quantize", g.x, residual, weight, 1e-6, 1.0, outer, form, LAYOUT)
    ).spec
    assert dict(fused.params)["OFFSET"] == 1.0 and dict(fused.params)["EPS"] == 1e-6
    for spec, more in ((plain, []), (fused, [(f"out_{len(parts_of(form, is_static))}", "bf16")])):
        results = [name for name in names(spec) if name[0].startswith("out") and name[0] != "outer"]
        wanted = [dtype for _, dtype in parts_of(form, is_static)] + [dtype for _, dtype in more]
        assert [dtype for _, dtype in sorted(results)] == wanted
        assert ("weight", "bf16" if weight_dtype == BF16 else "fp32") in names(spec)
        assert dict(spec.params)["residual"] == bool(more) == (("residual", "bf16") in names(spec))


@every_format
def test_an_activation_that_quantises(form: str, is_static: bool) -> None:
    g = Quantized(256)
    spec = chosen(g.call("act_mul_quantize", g.x, "gelu", g.outer(is_static), form, LAYOUT)).spec
    assert (dict(spec.params)["K"], dict(spec.params)["activation"]) == (128, "gelu")
    assert names(spec)[0] == ("gate_up", "bf16")


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", ["nvfp4", "fp8", "weight_only"])
@pytest.mark.parametrize("is_static", [False, True])
def test_a_product_applies_the_scales_that_it_is_given(
    form: str, is_static: bool, by_column: bool, has_bias: bool
) -> None:
    node = Quantized().product(form, is_static, by_column=by_column, has_bias=has_bias)
    spec = chosen(node).spec
    row_scale = not is_static and form != "weight_only"
    for launch in spec.launches:
        if launch.template.endswith("saturate_fp16.py.jinja"):
            continue
        assert dict(launch.params)["alpha"] == ("column" if by_column else "scalar")
        assert (("row_scale", "fp32") in names(launch)) == row_scale
        assert (("bias", "bf16") in names(launch)) == has_bias
        assert ("out", "bf16") in names(launch)


def test_a_product_that_leaves_the_graph_makes_fp32() -> None:
    for form in ("nvfp4", "fp8", "weight_only"):
        g = Quantized(rows="L")
        node = g.product(form)
        g.finish(node)
        results = {
            dtype for launch in chosen(node).spec.launches for name, dtype in names(launch) if name == "out"
        }
        assert results == {"fp32"}
        assert all("L" in launch.when for launch in chosen(node).spec.launches)


@pytest.mark.parametrize(
    ("node", "target", "reason"),
    [
        (Quantized().product("nvfp4"), "h100", "sm_90 has no FP4 tensor core; weight-only products serve: keep x in"),
        (Quantized(96).product("nvfp4"), "b200", "K must be a multiple of 64, .* got 96; dequantise the weights"),
        (Quantized(96).product("weight_only"), "h100", "K must be a multiple of 64, .* got 96"),
        (Quantized().product("nvfp4", n=257), "b200", r"rows of y of a multiple of 16 bytes, got n 257"),
        (Quantized(dtype=FP32).product("weight_only"), "b200", "x must be bf16 beside weights of NVFP4, got fp32; com"),
        (Quantized().quantize("nvfp4", True, "linear"), "b200", "in the layout swizzled_128x4, got linear; quantise"),
    ],
)  # fmt: skip
def test_refusals_say_what_serves(node: fx.Node, target: str, reason: str) -> None:
    with pytest.raises(CodegenError, match=reason):
        chosen(node, target)


def test_no_arch_before_sm_89_has_fp8() -> None:
    for node in (Quantized().product("fp8"), Quantized().quantize("nvfp4", True)):
        with pytest.raises(CodegenError, match="sm_80 has no FP8; keep the weights in bf16"):
            chosen(node, arch=80)


def test_rows_that_no_program_holds_are_refused() -> None:
    g = Quantized(MAX_ROW + 16)
    weight = g.weight("norm", torch.zeros(g.k))
    node = g.call("rms_norm_quantize", g.x, weight, 1e-6, 0.0, None, "fp8")
    with pytest.raises(CodegenError, match=f"rows of x must have at most {MAX_ROW} elements, got {g.k}"):
        chosen(node)


def test_fp8_has_no_layout_and_any_size() -> None:
    assert chosen(Quantized().quantize("fp8", True, "linear")).row == "quantize"
    odd = chosen(Quantized(100).product("fp8", n=257))
    assert odd.row == "fp8_pointer"
    assert odd.skipped == (
        ("fp8_tma", "TMA needs rows of a multiple of 16 bytes, got k 100 (100 bytes), n 257 (514 bytes)"),
    )
    assert dict(odd.spec.params)["dtype"] == "fp8"


def test_a_bias_beside_fp8_has_the_dtype_of_the_model() -> None:
    for dtype, name in ((BF16, "bf16"), (FP32, "fp32")):
        spec = chosen(Quantized(dtype=dtype).product("fp8", has_bias=True)).spec
        assert {kind for launch in spec.launches for arg, kind in names(launch) if arg == "bias"} == {name}


def every_node() -> list[fx.Node]:
    nodes = [Quantized().quantize(*form) for form in FORMATS]
    nodes += [
        Quantized().product(form, is_static) for form in ("nvfp4", "fp8") for is_static in (True, False)
    ]
    nodes += [Quantized(100).product("fp8"), Quantized().product("weight_only")]
    g = Quantized()
    norm, residual = g.weight("norm", torch.zeros(g.k)), g.call("add", g.x, g.x)
    return [
        *nodes,
        g.call("rms_norm_quantize", g.x, norm, 1e-6, 0.0, None, "nvfp4", LAYOUT),
        g.call("add_rms_norm_quantize", g.x, residual, norm, 1e-6, 0.0, None, "nvfp4", LAYOUT),
        g.call("act_mul_quantize", g.x, "silu", None, "nvfp4", LAYOUT),
    ]


def test_every_row_serves_some_node() -> None:
    assert {chosen(node).row for node in every_node()} == {row.name for row in ROWS}
    assert {op_name(node) for node in every_node()} == {row.op for row in ROWS}


@pytest.mark.parametrize("node", every_node(), ids=lambda node: node.name)
def test_expressions_of_a_spec_are_about_sizes_of_a_step(node: fx.Node) -> None:
    spec = chosen(node).spec
    for count in (1, 8, 9, 16, 17, 64, 65, 1000):
        assert any(holds(launch.when, {"T": count}) for launch in spec.launches)
    for launch in spec.launches:
        validate_condition(launch.when, DIMS)
        for expression in (*launch.grid, *(size for arg in launch.args for size in arg.shape)):
            validate(expression, DIMS)
        for expression in (launch.bytes, launch.flops):
            assert evaluate(expression, dict.fromkeys(DIMS, 3)) >= 0


@every_format
@pytest.mark.parametrize("rows", ["T", "L"])
def test_a_program_has_room_for_every_part_and_binds_each_to_its_argument(
    form: str, is_static: bool, rows: str
) -> None:
    g = Quantized(320, rows=rows)
    module = g.finish(g.product(form, is_static))
    specs = {node: select(node, B200).spec for node in module.graph.nodes if op_name(node)}
    program = emit(module, specs, plan_memory(module.graph), 64)
    buffers = {buffer.name: buffer for buffer in program.buffers}
    producer = next(node for node in module.graph.nodes if op_name(node) == "quantize")
    (written,) = [step for step in program.steps if step.kernel == specs[producer].name]
    parts = [f"{producer.name}.{i}" for i in range(len(producer.meta["val"]))]
    assert [arg for arg in written.args if arg in parts] == parts
    arguments = ["x", *["x_scale"] * (form == "nvfp4"), *["row_scale"] * (not is_static)]
    product = next(spec for spec in specs.values() if spec.op in ("nvfp4_linear", "linear"))
    for launch in product.launches:
        (read,) = [step for step in program.steps if step.kernel == launch.name]
        bound = {arg.name: place for arg, place in zip(launch.args, read.args, strict=True)}
        assert [bound[name] for name in arguments] == parts
    for count in (1, 5, 127, 128, 129, 4000):
        dims = dict(T=count, R=1, L=count, P=1, num_pages=1)
        ends = []
        for part in parts:
            buffer = buffers[part]
            size = math.prod(evaluate(extent, dims) for extent in buffer.shape) * ITEM_BYTES[buffer.dtype]
            assert evaluate(str(buffer.offset), dims) % 64 == 0
            ends.append((evaluate(str(buffer.offset), dims), size))
        ends.sort()
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ends))
        assert ends[-1][0] + ends[-1][1] <= evaluate(program.workspace, dims)
    assert program_from_json(program_to_json(program)) == program
    if form == "nvfp4":
        assert [evaluate(buffers[parts[1]].shape[0], {rows: n}) for n in (128, 129)] == [2560, 5120]
