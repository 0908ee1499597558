"""Mixtures of experts on quantised weights, kernel by kernel and whole, against plain loops over experts in fp64."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import nvfp4
import pytest
import torch
from torch import Tensor
from triton_interpreter import poisoned

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.moe_grouped import Experts, Grouped, Places, Unit
from octavo.codegen.moe_nvfp4_triton import few_spec, fp8_many_spec, nvfp4_few_spec, nvfp4_many_spec
from octavo.codegen.moe_permute_triton import placed_sum_spec, quantize_rows_spec
from octavo.codegen.moe_quantized_triton import experts_spec
from octavo.compiler.expression import evaluate
from octavo.compiler.target import Target, load_target

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
# few programs, each with many tiles
B200 = replace(load_target("b200"), sm_count=2)
HOPPER = replace(load_target("h100"), sm_count=2)
OAI = Unit(2.0, 1.702, 1.0)
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("target", [B200, HOPPER], ids=["hardware", "portable"])
def test_rows_are_quantised_once_and_stored_for_every_expert(launch: Launch, target: Target) -> None:
    place = torch.tensor([[3, 140], [-1, 0], [17, -1], [-1, -1]], dtype=torch.int32)
    k = 2064
    x = torch.randn(4, k).bfloat16() * torch.logspace(-6, 2, k)
    x[0, :32] = 0.0
    outer = float(x.abs().max()) / 2688
    places = Places("T", 5, 2, 16)
    codes, scales = poisoned([256, k // 2], "u8"), poisoned([2 * 33 * 512], "fp8")
    spec = quantize_rows_spec(places, "nvfp4", k, "fp32", "x", "rows", target)
    tensors = {"x": x, "place": place, "x_outer": torch.tensor([outer]), "rows": codes, "rows_scale": scales}
    launch(spec, tensors, {"T": 4})
    wanted, wanted_scales = nvfp4.quantize(x, outer)
    linear = nvfp4.unswizzle(scales, 256, k // 16).view(torch.uint8)
    used = {int(row): token for token in range(4) for row in place[token] if row >= 0}
    for row in range(256):
        if row in used:
            assert torch.equal(codes[row], wanted[used[row]])
            assert torch.equal(linear[row], wanted_scales[used[row]].view(torch.uint8))
        else:
            assert bool((codes[row] == 0xFF).all() and (linear[row] == 0xFF).all())


@pytest.mark.parametrize("kind", ["fp8", "fp16"])
def test_rows_of_fp8_have_a_scale_and_those_of_fp16_saturate(launch: Launch, kind: str) -> None:
    k, place = 83, torch.tensor([[1, 2], [-1, 0], [4, -1]], dtype=torch.int32)
    x = (torch.randn(3, k) * 1000).bfloat16()
    x[0, :2], x[1] = torch.tensor([1e6, -1e6]), 0.0
    rows, scales = poisoned([5, k], kind), poisoned([5], "fp32")
    spec = quantize_rows_spec(Places("T", 3, 2, 16), kind, k, "bf16", "x", "rows", B200)
    launch(spec, {"x": x, "place": place, "rows": rows, "rows_scale": scales}, {"T": 3})
    for row, token in {1: 0, 2: 0, 0: 1, 4: 2}.items():
        wide = x[token].double()
        if kind == "fp16":
            assert torch.equal(rows[row].double(), wide.clamp(-65504, 65504).half().double())
            continue
        scale = wide.abs().max() / 448 if token != 1 else torch.tensor(1.0)
        assert float(scales[row]) == pytest.approx(float(scale), rel=1e-6)
        assert torch.equal(rows[row].double(), (wide / scales[row].double()).to(FP8).double())
    assert bool(rows[3].isnan().all())


def test_rows_in_order_end_with_the_last_tile(launch: Launch) -> None:
    x, k = torch.randn(48, 40).bfloat16(), 40
    rows, scales = poisoned([48, k], "fp8"), poisoned([48], "fp32")
    places = Places("T", 3, 1, 16)
    spec = quantize_rows_spec(places, "fp8", k, "bf16", "x", "rows", B200, in_order=True)
    tensors = {"x": x, "num_tiles": torch.tensor([2], dtype=torch.int32), "rows": rows, "rows_scale": scales}
    launch(spec, tensors, {"T": 3})
    error = (rows.double() * scales[:, None].double() - x.double())[:32].abs()
    assert bool((error <= x[:32].abs().amax(1, keepdim=True) / 27).all())
    assert bool(scales[32:].isnan().all())


@dataclass
class Operands:
    """Rows of every expert in padded order, their weights, the tensors of a launch, and what both stand for in fp64."""

    tensors: dict[str, Tensor]
    owners: list[int]
    used: list[int]  # rows that hold a token
    x: Tensor  # (rows, K)
    w: Tensor  # (experts, N, K)
    alpha: Tensor  # (experts, N)
    bias: Tensor  # (experts, N)


def weights_of(experts: int, n: int, k: int, kind: str, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Codes behind each other, scales for each expert, and the values (experts, N, K) without an outer scale."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "fp8":
        codes = torch.randn(experts * n, k, generator=generator).mul(50).to(FP8)
        return {"w": codes}, codes.double().view(experts, n, k)
    packed, scale = nvfp4.any_codes(experts * n, k, generator)
    swizzled = [nvfp4.swizzle(part) for part in scale.view(torch.uint8).view(experts, n, -1)]
    values = nvfp4.dequantize(packed, scale, 1.0).view(experts, n, k)
    return {
        "w": packed,
        "w_scale": torch.cat([part.view(torch.uint8) for part in swizzled]).view(FP8),
    }, values


def rows_of(rows: int, used: list[int], k: int, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Rows in padded order; those that hold no token hold nan."""
    generator = torch.Generator().manual_seed(5)
    unused = [row for row in range(rows) if row not in set(used)]
    if kind == "nvfp4":
        packed, scale = nvfp4.any_codes(rows, k, generator)
        packed[unused] = 0xFF
        raw = scale.view(torch.uint8)
        raw[unused] = 0x7F
        return {"x": packed, "x_scale": nvfp4.swizzle(scale)}, nvfp4.dequantize(packed, scale, 1.0)
    x = torch.randn(rows, k, generator=generator).mul(30)
    x[unused] = float("nan")
    if kind == "fp16":
        return {"x": x.half()}, x.half().double()
    scale = torch.rand(rows, generator=generator) + 0.5
    scale[unused] = float("nan")
    return {"x": x.to(FP8), "x_scale": scale}, x.to(FP8).double() * scale[:, None].double()


def operands(product: Grouped, counts: list[int], tokens: int, x_kind: str, w_kind: str) -> Operands:
    places, n, k = product.places, product.n, product.k
    owners: list[int] = []
    used: list[int] = []
    for e, count in enumerate(counts):
        used += [len(owners) * places.tile + i for i in range(count)]
        owners += [e] * -(-count // places.tile)
    rows = evaluate(places.rows, {"T": tokens})
    x_tensors, x = rows_of(rows, used, k, x_kind)
    w_tensors, w = weights_of(places.experts, n, k, w_kind, 3)
    # results of all experts are of the order of one
    typical = (x[used[0]][None, :] * w[0]).square().sum(1).mean().sqrt() if used else torch.tensor(1.0)
    alphas = n if product.by_row else 2 if product.unit else 1
    alpha = (1.0 + torch.rand(places.experts, alphas)) / float(typical)
    bias = torch.randn(places.experts, n).to(torch.bfloat16 if product.bias == "bf16" else torch.float32)
    tables = poisoned([evaluate(places.pairs, {"T": tokens})], "i32")
    tables[: len(owners)] = torch.tensor(owners, dtype=torch.int32)
    tensors = {
        **x_tensors, **w_tensors, "w_alpha": alpha.flatten(), "w_bias": bias.flatten(), "tile_expert": tables,
        "num_tiles": torch.tensor([len(owners)], dtype=torch.int32),
    }  # fmt: skip
    wide = alpha.double().repeat_interleave(n // alphas, 1)
    biases = bias.double() * bool(product.bias)
    gated = product.unit is not None
    return Operands(tensors, owners, used, x, w, in_turn(wide, gated), in_turn(biases, gated))


def in_turn(numbers: Tensor, gated: bool) -> Tensor:
    """(experts, N), the gates' before the ups', as the rows of the weight lie."""
    return numbers.unflatten(1, (2, -1)).transpose(1, 2).flatten(1) if gated else numbers


def expected_of(product: Grouped, given: Operands) -> Tensor:
    """(rows, width) in fp64; nan in rows that no token has."""
    y = torch.full((given.x.shape[0], product.width), float("nan"), dtype=torch.float64)
    for row in given.used:
        e = given.owners[row // product.places.tile]
        value = given.w[e] @ given.x[row] * given.alpha[e] + given.bias[e]
        if product.unit:
            value = unit_of(value[0::2], value[1::2], product.unit)
        y[row] = value
    return y


def unit_of(gate: Tensor, up: Tensor, unit: Unit) -> Tensor:
    if unit.limit:
        gate, up = gate.clamp(max=unit.limit), up.clamp(-unit.limit, unit.limit)
    return gate * torch.sigmoid(unit.alpha * gate) * (up + unit.offset)


KERNELS: dict[str, tuple[int, str, str, Callable[[Grouped], KernelSpec]]] = {
    "nvfp4 many": (128, "nvfp4", "nvfp4", lambda product: nvfp4_many_spec(product, B200)),
    "nvfp4 many 128": (128, "nvfp4", "nvfp4", lambda product: nvfp4_many_spec(product, B200, 128)),
    "nvfp4 few": (16, "nvfp4", "nvfp4", lambda product: nvfp4_few_spec(product, B200)),
    "fp8 many": (128, "fp8", "fp8", lambda product: fp8_many_spec(product, B200)),
    "fp8 few": (16, "fp8", "fp8", lambda product: few_spec(product, "fp8", B200)),
    "weight-only few": (16, "fp16", "nvfp4", lambda product: few_spec(product, "nvfp4", B200)),
    "weight-only many": (64, "fp16", "nvfp4", lambda product: few_spec(product, "nvfp4", HOPPER, 64)),
    "weight-only fp16": (16, "fp16", "nvfp4", lambda product: few_spec(product, "nvfp4", HOPPER, 16, "fp16")),
}
# tokens of each expert; sizes that end within tiles of columns, of scales and of K
SHAPES = {
    "nvfp4 many": ([129, 0, 3], 3, 328, 320),
    "nvfp4 many 128": ([2, 1], 2, 136, 64),
    "nvfp4 few": ([0, 17, 1], 3, 200, 320),
    "fp8 many": ([1, 130], 2, 144, 176),
    "fp8 few": ([18, 0, 1], 3, 144, 208),
    "weight-only few": ([0, 16, 1], 3, 200, 192),
    "weight-only many": ([65, 1], 2, 136, 192),
    "weight-only fp16": ([3], 1, 16, 64),
}


@pytest.mark.parametrize("bias", ["", "fp32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_product(launch: Launch, kernel: str, bias: str) -> None:
    tile, x_kind, w_kind, make = KERNELS[kernel]
    counts, experts, n, k = SHAPES[kernel]
    product = Grouped(
        Places("T", experts, 1, tile), "x", "w", "y", n, k, None, bias, by_row=is_by_row(kernel, bias)
    )
    run_product(launch, product, counts, x_kind, w_kind, make)


@pytest.mark.parametrize(("unit", "bias"), [(Unit(), ""), (OAI, "bf16")], ids=["silu", "oai"])
@pytest.mark.parametrize("kernel", [name for name in KERNELS if not name.startswith("nvfp4")])
def test_gated_product(launch: Launch, kernel: str, unit: Unit, bias: str) -> None:
    tile, x_kind, w_kind, make = KERNELS[kernel]
    counts, experts, _, k = SHAPES[kernel]
    by_row = is_by_row(kernel, bias)
    product = Grouped(Places("T", experts, 1, tile), "x", "w", "y", 160, k, unit, bias, by_row)
    run_product(launch, product, counts, x_kind, w_kind, make)


def is_by_row(kernel: str, bias: str) -> bool:
    """Alphas of every row, once of each kernel that reads them."""
    return bool(bias) and not kernel.startswith("nvfp4")


def run_product(
    launch: Launch, product: Grouped, counts: list[int], x_kind: str, w_kind: str, make: Callable[[Grouped], KernelSpec]
) -> None:  # fmt: skip
    tokens = sum(counts)
    given, spec = operands(product, counts, tokens, x_kind, w_kind), make(product)
    dtype = next(arg.dtype for arg in spec.args if arg.name == "y")
    out = poisoned([given.x.shape[0], product.width], dtype)
    launch(spec, {**given.tensors, "y": out}, {"T": tokens})
    expected = expected_of(product, given)
    close(out[given.used].double(), expected[given.used], 2.0**-8 if dtype == "bf16" else 2.0**-10)
    assert bool(out[len(given.owners) * product.places.tile :].isnan().all())


def close(got: Tensor, expected: Tensor, unit: float) -> None:
    """One rounding of the result, and sums in fp32 of terms as large as the largest result."""
    error = (got - expected).abs()
    assert bool((error <= unit * expected.abs() + 2.0**-16 * expected.abs().max()).all()), float(error.max())


@pytest.mark.parametrize(
    ("kernel", "unit", "bias"),
    [
        ("nvfp4 many", OAI, "bf16"),
        ("nvfp4 many 128", Unit(), ""),
        ("nvfp4 few", OAI, "bf16"),
        ("nvfp4 few", Unit(), ""),
    ],
)
def test_gated_product_is_quantised(launch: Launch, kernel: str, unit: Unit, bias: str) -> None:
    tile, _, _, make = KERNELS[kernel]
    counts, experts, _, k = SHAPES[kernel]
    product = Grouped(
        Places("T", experts, 1, tile), "x", "w", "y", 384, k, unit, bias, rounded="bf16" if bias else ""
    )
    tokens, width = sum(counts), product.width
    given, spec = operands(product, counts, tokens, "nvfp4", "nvfp4"), make(product)
    expected = expected_of(product, given)
    outer = torch.rand(experts) * 0.001 + 0.002
    rows = given.x.shape[0]
    codes, scales = poisoned([rows, width // 2], "u8"), poisoned([-(-rows // 128) * 3 * 512], "fp8")
    launch(spec, {**given.tensors, "y": codes, "y_scale": scales, "hidden_outer": outer}, {"T": tokens})
    linear = nvfp4.unswizzle(scales, rows, width // 16)
    different = 0
    for row in given.used:
        e = float(outer[given.owners[row // tile]])
        h = expected[row].bfloat16() if product.rounded else expected[row]
        wanted = nvfp4.dequantize(*nvfp4.quantize(h[None].float(), e), e)[0]
        got = nvfp4.dequantize(codes[row][None], linear[row][None], e)[0]
        # sums in another order may cross to the next code or scale
        different += int((got != wanted).sum())
        assert bool(((got - wanted).abs() <= wanted.abs() * 0.51 + 2 * e).all())
    assert different <= 0.01 * len(given.used) * width
    done = len(given.owners) * tile
    assert bool((codes[done:] == 0xFF).all() and (linear[done:].view(torch.uint8) == 0xFF).all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_tile_stores_nothing(launch: Launch, kernel: str) -> None:
    tile, x_kind, w_kind, make = KERNELS[kernel]
    product = Grouped(Places("T", 2, 1, tile), "x", "w", "y", 16, 64)
    given, spec = operands(product, [], 3, x_kind, w_kind), make(product)
    out = poisoned([given.x.shape[0], 16], next(arg.dtype for arg in spec.args if arg.name == "y"))
    launch(spec, {**given.tensors, "y": out}, {"T": 3})
    assert bool(out.isnan().all())


@pytest.mark.parametrize(("weighted", "shared"), [(True, False), (True, True), (False, True)])
def test_sum_over_places(launch: Launch, assert_rounds_to: Check, weighted: bool, shared: bool) -> None:
    """Rows of others are left out, and rows that no token has are not read."""
    place = torch.tensor([[3, 0, -1], [-1, -1, -1], [5, 1, 2]], dtype=torch.int32)
    parts, weights, addend = (
        torch.randn(7, 1030).bfloat16(),
        torch.rand(3, 3),
        torch.randn(3, 1030).bfloat16(),
    )
    parts[[4, 6]] = float("nan")
    out = poisoned([3, 1030], "bf16")
    spec = placed_sum_spec("T", 3, 1030, "bf16", "bf16", weighted, shared)
    launch(spec, {"parts": parts, "place": place, "weights": weights, "shared": addend, "out": out}, {"T": 3})
    expected = addend.double() * shared
    for token in range(3):
        for slot in range(3):
            if place[token, slot] >= 0:
                weight = weights[token, slot].double() if weighted else 1.0
                expected[token] += weight * parts[place[token, slot]].double()
    assert_rounds_to(out, expected, sums=0.1)


LAYER = Experts("T", "bf16", 2, 2, 128, 64, shared=True)
LAYERS = {
    "nvfp4": LAYER,
    "fp8": replace(
        LAYER, dtype="fp32", shared=False, hidden=80, intermediate=48, unit=OAI, bias="fp32", by_row=True
    ),
    "weight_only": replace(LAYER, hidden=192, unit=Unit(1.5), bias="bf16"),
}


@pytest.mark.parametrize(("tokens", "holes"), [(1, False), (33, True), (5, True)])
@pytest.mark.parametrize("scheme", LAYERS)
def test_mixture_of_experts(launch: Launch, scheme: str, tokens: int, holes: bool) -> None:
    """Short tiles and tall ones, against the same rows quantised by the book between the products.

    holes: some slots have no expert and a weight of nan, those of the second token and the last none at all
    """
    layer = LAYERS[scheme]
    e, hidden, inner = layer.experts, layer.hidden, layer.intermediate
    experts = torch.randint(0, layer.experts, (tokens, layer.top_k))
    if holes:
        experts.flatten()[::3] = -1
        experts[1], experts[-1] = -1, -1
    x = torch.randn(tokens, hidden).to(torch.bfloat16 if layer.dtype == "bf16" else torch.float32)
    kind = "fp8" if scheme == "fp8" else "nvfp4"
    tensors: dict[str, Tensor] = {"x": x, "experts": experts, "weights": torch.rand(tokens, layer.top_k)}
    tensors["weights"].masked_fill_(experts < 0, float("nan"))
    values = {}
    for seed, (name, n, k, columns) in enumerate(
        (("gate_up", 2 * inner, hidden, 2), ("down", hidden, inner, 1))
    ):
        found, wide = weights_of(e, n, k, kind, seed)
        tensors |= {key.replace("w", name, 1): value for key, value in found.items()}
        columns = n if layer.by_row else columns
        alpha = (torch.rand(e, columns) + 1.0) / float(wide.square().mean().sqrt() * k**0.5)
        bias = torch.randn(e, n).to(torch.bfloat16 if layer.bias == "bf16" else torch.float32)
        tensors |= {f"{name}_alpha": alpha.flatten(), f"{name}_bias": bias.flatten()}
        values[name] = (
            wide * in_turn(alpha.double().repeat_interleave(n // columns, 1), name == "gate_up")[:, :, None],
            bias.double() * bool(layer.bias),
        )
    x_outer, hidden_outer = float(x.abs().max()) / 2688, torch.rand(e) * 0.001 + 0.002
    out = torch.full((tokens, hidden), float("nan"), dtype=x.dtype)
    tensors |= {"out": out, "shared": torch.randn_like(x), "hidden_outer": hidden_outer}
    tensors["x_outer"] = torch.tensor([x_outer])
    if scheme == "nvfp4":  # alphas hold the outer scales of the rows
        tensors["gate_up_alpha"] = tensors["gate_up_alpha"] * x_outer
        tensors["down_alpha"] = tensors["down_alpha"] * hidden_outer
    ran = launch(
        experts_spec(layer, scheme, HOPPER if scheme == "weight_only" else B200), tensors, {"T": tokens}
    )
    assert len(ran) == (6 if scheme == "fp8" else 5)
    expected = tensors["shared"].double() * layer.shared
    for token in range(tokens):
        for slot in range(layer.top_k):
            own = int(experts[token, slot])
            if own < 0:
                continue
            row = rounded(x[token].double(), scheme, x_outer)
            (gate_up, b_1), (down, b_2) = values["gate_up"], values["down"]
            wide = gate_up[own] @ row
            h = unit_of(wide[0::2] + b_1[own, :inner], wide[1::2] + b_1[own, inner:], layer.unit)
            h = h.bfloat16().double() if layer.dtype == "bf16" and scheme == "nvfp4" else h
            h = rounded(h, scheme, float(hidden_outer[own]))
            expected[token] += tensors["weights"][token, slot].double() * (down[own] @ h + b_2[own])
    # a code that rounds the other way changes an element of the hidden state by a step
    assert float((out.double() - expected).norm() / expected.norm()) < (
        0.004 if scheme == "weight_only" else 0.02
    )


def rounded(row: Tensor, scheme: str, outer: float) -> Tensor:
    if scheme == "nvfp4":
        return nvfp4.dequantize(*nvfp4.quantize(row[None].float(), outer), outer)[0]
    if scheme == "fp8":
        scale = float(row.abs().max()) / 448
        return (row / scale).to(FP8).double() * scale
    return row.half().double()
