"""Every byte that is made, against NumPy that knows the rules and no code of ours (tests/support/nvfp4.py)."""

import numpy as np
import nvfp4 as book
import pytest
import torch
from ml_dtypes import float8_e4m3fn
from stages import before, calls
from torch import Tensor

from octavo.compiler import nvfp4
from octavo.compiler.errors import IllegalGraphError, OptionError
from octavo.compiler.precision import Format, PrecisionPlan, ProductPrecision, QuantizedWeight
from octavo.compiler.types import NVFP4, shard
from octavo.passes.quantize_linear import quantize_linear
from octavo.passes.rewrite import held

octavo = torch.ops.octavo
ROWS, BLOCKS = (1, 5, 31, 32, 33, 127, 128, 129), (1, 3, 4, 5)
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def same(ours: Tensor, theirs: object) -> bool:
    return np.array_equal(ours.view(torch.uint8).numpy(), np.asarray(theirs))


def mixed(rows: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of all magnitudes, with a zero block, a zero row and negative zeros."""
    generator = torch.Generator().manual_seed(rows * k)
    x = torch.randn(rows, k, generator=generator) * torch.logspace(-6, 2, rows)[:, None]
    x[rows // 2, :16] = 0.0
    x[0, :8] = -0.0
    x[-1] = torch.where(torch.rand(k, generator=generator) < 0.5, 0.0, x[-1])
    return x.to(dtype)


def test_the_book_agrees_with_ml_dtypes_on_every_tie_and_beside_it() -> None:
    ties = np.array([*TIES, *(0.5 * np.arange(13)), 7.0, 1e-30], np.float32)
    values = np.concatenate([ties, np.nextafter(ties, np.float32(9)), np.nextafter(ties, np.float32(-9))])
    values = np.concatenate([values, -values])
    assert np.array_equal(book.codes_by_distance(values), book.codes_of(values))
    middles = ((book.E4M3[1:] + book.E4M3[:-1]) / 2).astype(np.float32)
    around = np.concatenate(
        [middles, np.nextafter(middles, np.float32(999)), np.nextafter(middles, np.float32(0))]
    )
    around = np.clip(around, 2.0**-9, 448)
    assert np.array_equal(book.scales_by_distance(around), around.astype(float8_e4m3fn).view(np.uint8))


def test_every_code_stands_for_its_number() -> None:
    assert np.array_equal(nvfp4.decode_e2m1(torch.arange(16)).numpy(), book.E2M1.astype(np.float32))
    exact = torch.from_numpy(book.E2M1.astype(np.float32))
    assert nvfp4.encode_e2m1(exact).tolist() == list(range(16))
    every = torch.arange(256, dtype=torch.uint8)
    assert nvfp4.unpack(every).view(-1, 2).tolist() == [[b & 15, b >> 4] for b in range(256)]


@pytest.mark.parametrize("outer", [1.0, 0.0123, 3e-5])
def test_every_scale_with_every_tie(outer: float) -> None:
    """126 scales; under each, every number and every tie of a block, and its neighbours on both sides."""
    step = torch.from_numpy(book.E4M3[1:].astype(np.float32) * np.float32(outer))
    points = torch.tensor([*TIES, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 0.0, 0.1])
    x = step[:, None, None] * torch.stack([points, -points])
    up = torch.nextafter(x, torch.tensor(float("inf")))
    down = torch.nextafter(x, torch.tensor(float("-inf")))
    blocks = torch.cat((x, up, down), 1)
    largest = (step * 6)[:, None, None].expand(-1, blocks.shape[1], 1)
    rows = torch.cat((largest, blocks), -1).flatten(1)
    codes, scales = nvfp4.quantize(rows, torch.tensor(outer))
    wanted_codes, wanted_scales = book.quantize_rows(rows, np.full(len(rows), outer))
    assert same(codes, wanted_codes) and same(scales, wanted_scales)
    assert set(scales.view(torch.uint8).unique().tolist()) == set(range(1, 0x7F))
    assert set(nvfp4.unpack(codes).unique().tolist()) == set(range(16))


def test_outer_scales_carry_the_largest_element() -> None:
    amax = torch.tensor([0.0, 2688.0, 1e-20, 0.37, 3e38])
    wanted = [np.float32(1) if a == 0 else np.float32(a) / np.float32(2688) for a in amax.numpy()]
    assert nvfp4.outer_scale(amax).tolist() == [float(w) for w in wanted]


def test_saturation_and_underflow() -> None:
    x = torch.zeros(4, 16)
    x[0] = torch.linspace(-1e6, 1e6, 16)
    x[1, :2] = torch.tensor([2688.0, 2687.0])
    x[2, 3] = 1e-8
    codes, scales = nvfp4.quantize(x, torch.tensor(1.0))
    assert scales.view(torch.uint8)[:, 0].tolist() == [0x7E, 0x7E, 0x01, 0x00]
    assert nvfp4.unpack(codes)[0].tolist() == [15] * 8 + [7] * 8
    wanted_codes, wanted_scales = book.quantize_rows(x, np.ones(4))
    assert same(codes, wanted_codes) and same(scales, wanted_scales)
    assert not nvfp4.dequantize(codes, scales, torch.tensor(1.0))[2:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("blocks", [*BLOCKS, 180])
def test_activations_in_both_layouts(blocks: int, by_row: bool, dtype: torch.dtype) -> None:
    """180 blocks: rows of 2880 elements, as of gpt-oss."""
    for rows in ROWS if blocks < 180 else (5, 129):
        x = mixed(rows, 16 * blocks, dtype)
        amax = x.float().abs().amax(-1).numpy()
        own = np.where(amax == 0, np.float32(1), amax / np.float32(2688))
        outer = None if by_row else torch.tensor([float(own.max()) / 4])
        codes, scales, *rest = octavo.quantize(x, outer, "nvfp4", "linear")
        wanted_codes, wanted_scales = book.quantize_rows(
            x, own if by_row else np.full(rows, float(own.max()) / 4)
        )
        assert same(codes, wanted_codes) and same(scales, wanted_scales)
        assert not by_row or np.array_equal(rest[0].flatten().numpy(), own)
        flat = octavo.quantize(x, outer, "nvfp4", "swizzled_128x4")[1]
        linear = torch.from_numpy(wanted_scales).view(torch.float8_e4m3fn)
        assert flat.numel() == -(-rows // 128) * -(-blocks // 4) * 512
        assert same(flat, book.swizzle(linear, padding=0).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_activations(dtype: torch.dtype) -> None:
    x = mixed(33, 80, dtype)
    amax = x.float().abs().amax(-1, keepdim=True).numpy()
    own = np.where(amax == 0, np.float32(1), amax / np.float32(448))
    codes, rows = octavo.quantize(x, None, "fp8")
    assert np.array_equal(rows.numpy(), own) and same(codes, book.fp8_bytes(x, own))
    fixed = float(own.max()) / 4  # the largest saturate
    assert same(octavo.quantize(x, torch.tensor([fixed]), "fp8")[0], book.fp8_bytes(x, np.array(fixed)))


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_weights_of_a_graph(layout: str) -> None:
    graph_module = before("")
    names = [str(n.all_input_nodes[1].target) for n in calls(graph_module, octavo.linear.default)]
    plain = {name: held(graph_module, name).clone() for name in names}

    def quantizer(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        outer = nvfp4.outer_scale(weight.abs().amax())
        return QuantizedWeight(*nvfp4.quantize(weight, outer), outer, rule="nearest")

    plan = PrecisionPlan({name: ProductPrecision("nvfp4", 0.0371) for name in names})
    quantize_linear(graph_module, plan, quantizer, layout)
    for name, weight in plain.items():
        outer = np.float32(weight.abs().max()) / np.float32(2688)
        codes, scales = book.quantize_rows(weight, np.full(len(weight), outer))
        assert same(held(graph_module, f"{name}_codes"), codes)
        linear = torch.from_numpy(scales).view(torch.float8_e4m3fn)
        wanted = linear if layout == "linear" else book.swizzle(linear, padding=0)
        assert same(held(graph_module, f"{name}_scales"), wanted.view(torch.uint8).numpy())
        assert held(graph_module, f"{name}_alpha").numpy() == outer * np.float32(0.0371)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_pages(format: str) -> None:
    """Tokens in shuffled slots, one of them nowhere; what was not written stays."""
    tokens, heads, width, page = 9, 2, 32, 4
    k, v = (
        mixed(tokens * heads, width)[torch.randperm(tokens * heads)].view(1, tokens, heads, width)
        for _ in "kv"
    )
    slots = torch.randperm(16)[:tokens]
    slots[4] = -1
    multipliers = torch.tensor([0.0021, 0.011])
    packed = format == "nvfp4"
    caches = [
        torch.full((4, heads, page, width // 2 if packed else width), 0xAA, dtype=torch.uint8) for _ in "kv"
    ]
    scales = [torch.full((4, heads, page, width // 16), 0x55, dtype=torch.uint8) for _ in "kv"]
    as_fp8 = [t.view(torch.float8_e4m3fn) for t in (scales if packed else caches)]
    if packed:
        octavo.kv_write(k, v, *caches, slots, *as_fp8, multipliers)
    else:
        octavo.kv_write(k, v, *as_fp8, slots, None, None, multipliers)
    for value, cache, scale, outer in zip((k, v), caches, scales, multipliers.numpy(), strict=True):
        for slot in range(16):
            where = (slots == slot).nonzero().flatten().tolist()
            place = (slot // page, slice(None), slot % page)
            if not where:
                assert (cache[place] == 0xAA).all() and (scale[place] == 0x55).all()
            elif packed:
                codes, wanted = book.quantize_rows(value[0, where[0]], np.full(heads, outer))
                assert same(cache[place], codes) and same(scale[place], wanted)
            else:
                assert same(cache[place], book.fp8_bytes(value[0, where[0]], outer))


def test_rows_of_232_are_refused_and_shards_end_at_blocks() -> None:
    """1856 columns over 8 ranks are 232 each, 14.5 blocks. On edges of blocks shards have the bytes of the whole."""
    weight = mixed(24, 1856)
    outer = nvfp4.outer_scale(weight.abs().amax())
    with pytest.raises(OptionError, match=r"multiple of 16 elements, got \(24, 232\)"):
        nvfp4.quantize(weight[:, :232], outer)
    with pytest.raises(IllegalGraphError, match="1856 / 8 = 232, expected a multiple of 16; shard over 4"):
        shard(NVFP4((24, 1856)), -1, 8)
    width = shard(NVFP4((24, 1856)), -1, 4).shape[-1]
    codes, scales = nvfp4.quantize(weight, outer)
    for rank in range(4):
        part = slice(rank * width, (rank + 1) * width)
        own_codes, own_scales = nvfp4.quantize(weight[:, part], outer)
        assert torch.equal(own_codes, codes[:, part.start // 2 : part.stop // 2])
        whole = scales.view(torch.uint8)[:, part.start // 16 : part.stop // 16]
        assert torch.equal(own_scales.view(torch.uint8), whole)
