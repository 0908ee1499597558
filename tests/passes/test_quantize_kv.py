"""Which pages are quantised, that what they hold is what the format makes of keys and values, and what is refused."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from models import LAYERS
from stages import BF16, FP32, before, calls, logits, tokens
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.dump import print_graph
from octavo.compiler.dump_load import load_graph
from octavo.compiler.errors import IllegalGraphError, OptionError
from octavo.compiler.options import PageFormat
from octavo.compiler.paging_rules import check_paging
from octavo.compiler.pipeline import Step, apply_step
from octavo.compiler.precision import PagePrecision, PrecisionPlan
from octavo.compiler.quantizing import QuantSettings
from octavo.passes.quantize_kv import quantize_kv
from octavo.passes.rewrite import held
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
LARGEST = {"fp8": 448.0, "nvfp4": 2688.0}
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def run(graph_module: GraphModule, plan: PrecisionPlan) -> PassReport:
    def no_weights(*_: object) -> None:
        raise AssertionError("weights are no business of pages")

    settings = QuantSettings(plan, no_weights, "linear")  # type: ignore[arg-type]
    return apply_step(Step(quantize_kv, "quantized", ("plan",)), graph_module, settings)[0]


def pages_of(name: str = "llama", dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    """What the model's pages hold after twelve tokens, in the model's dtype."""
    caches: dict[str, Tensor] = {}
    logits(before("", name, dtype), tokens(12), caches)
    return caches


def plan_of(pages: dict[str, Tensor], format: PageFormat) -> PrecisionPlan:
    """Multipliers that the largest key and value just fit."""
    amax = {name: float(value.nan_to_num().abs().max()) / LARGEST[format] for name, value in pages.items()}
    layers = range(sum(name.startswith("k_cache") for name in pages))
    values = {i: (amax[f"k_cache_{i}"], amax.get(f"v_cache_{i}", 1.0)) for i in layers}
    return PrecisionPlan(pages={i: PagePrecision(format, *pair) for i, pair in values.items()})


def quantized(
    format: PageFormat, name: str = "llama", dtype: torch.dtype = FP32
) -> tuple[GraphModule, PassReport]:
    graph_module = before("", name, dtype)
    report = run(graph_module, plan_of(pages_of(name, dtype), format))
    return graph_module, report


def test_fp8_pages_keep_their_shape() -> None:
    graph_module, report = quantized("fp8")
    assert (report.matched, report.exactness) == (LAYERS, "quantizes")
    own = {
        n.name: n.meta["val"] for n in graph_module.graph.find_nodes(op="placeholder") if "cache" in n.name
    }
    assert {(v.dtype, tuple(v.shape[1:])) for v in own.values()} == {(torch.float8_e4m3fn, (2, 4, 16))}
    assert list(own) == ["k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"]


def test_nvfp4_pages_are_codes_and_scales() -> None:
    graph_module, _ = quantized("nvfp4")
    own = {n.name: n.meta["val"] for n in graph_module.graph.find_nodes(op="placeholder")}
    for kind in "kv":
        for i in range(LAYERS):
            cache, scales = own[f"{kind}_cache_{i}"], own[f"{kind}_scales_{i}"]
            assert (cache.dtype, tuple(cache.shape[1:])) == (torch.uint8, (2, 4, 8))
            assert (scales.dtype, tuple(scales.shape[1:])) == (torch.float8_e4m3fn, (2, 4, 1))
            assert cache.shape[0] == scales.shape[0]


@pytest.mark.parametrize("name", ["llama", "fused"])
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_every_layer_has_multipliers_of_its_own(format: PageFormat, name: str) -> None:
    graph_module, report = quantized(format, name)
    assert report.matched == LAYERS and not report.rejected
    plan = plan_of(pages_of(name), format)
    writes = calls(graph_module, octavo.rope_kv_write.default) + calls(graph_module, octavo.kv_write.default)
    reads = calls(graph_module, octavo.paged_attention.default)
    assert len(writes) == len(reads) == LAYERS
    for i, (write, read) in enumerate(zip(writes, reads, strict=True)):
        assert write.kwargs == read.kwargs
        values = held(graph_module, str(write.kwargs["multipliers"].target))  # type: ignore[union-attr]
        assert values.tolist() == pytest.approx([plan.pages[i].k_multiplier, plan.pages[i].v_multiplier])


def decoded(caches: dict[str, Tensor], kind: str, multiplier: float) -> tuple[Tensor, Tensor]:
    """What the first layer's pages stand for, and half the distance of neighbouring values there."""
    cache = caches[f"{kind}_cache_0"]
    if cache.dtype != torch.uint8:
        value = cache.double()
        exponent = torch.frexp(value.abs().clamp_min(2.0**-6)).exponent - 1
        return value * multiplier, 2.0 ** (exponent - 4) * multiplier
    low_first = torch.stack((cache & 15, cache >> 4), -1).flatten(-2).long()
    value = torch.cat((MAGNITUDES, -MAGNITUDES)).double()[low_first]
    step = caches[f"{kind}_scales_0"].double().repeat_interleave(16, -1) * multiplier
    gaps = torch.tensor([0.25, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0]).double()[low_first & 7]
    return value * step, gaps * step


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_pages_hold_keys_and_values_to_the_nearest(format: PageFormat, dtype: torch.dtype) -> None:
    graph_module, _ = quantized(format, "llama", dtype)
    caches: dict[str, Tensor] = {}
    logits(graph_module, tokens(12), caches)
    expected, plan = pages_of("llama", dtype), plan_of(pages_of("llama", dtype), format)
    for kind, multiplier in (("k", plan.pages[0].k_multiplier), ("v", plan.pages[0].v_multiplier)):
        wanted = expected[f"{kind}_cache_0"].double()
        written = ~wanted.isnan()
        value, half = decoded(caches, kind, multiplier)
        assert int(written.sum()) == 12 * 2 * 16
        assert ((value - wanted).abs() <= half * (1 + 1e-5))[written].all()
        # One block scale for 16 elements: the largest of them is met within its rounding to E4M3.
        assert (value[written].abs().max() / wanted[written].abs().max() - 1).abs() <= 2.0**-4


@pytest.mark.parametrize("name", ["llama", "fused"])
def test_logits_stay_near_and_eight_bits_are_nearer(name: str) -> None:
    expected = logits(before("", name), tokens(12))
    errors = []
    formats: tuple[PageFormat, ...] = ("fp8", "nvfp4")
    for format in formats:
        result = logits(quantized(format, name)[0], tokens(12))
        errors.append(float((result - expected).norm() / expected.norm()))
    assert 1e-4 < errors[0] < 0.1 and 2 * errors[0] < errors[1] < 0.4


def test_latents_have_fp8_pages_with_one_multiplier() -> None:
    graph_module, report = quantized("fp8", "latent")
    assert report.matched == LAYERS
    for target in (octavo.latent_write.default, octavo.paged_mla_attention.default):
        assert [list(n.kwargs) for n in calls(graph_module, target)] == [["multiplier"]] * LAYERS
    expected = logits(before("", "latent"), tokens(12))
    error = (logits(graph_module, tokens(12)) - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1


def reasons(name: str, plan: PrecisionPlan) -> list[str]:
    graph_module = before("", name)
    text = print_graph(graph_module)
    report = run(graph_module, plan)
    assert report.matched == 0 and print_graph(graph_module) == text
    return [r.reason for r in report.rejected]


def test_says_why_pages_stay() -> None:
    plan = PrecisionPlan(pages={0: PagePrecision("bf16", reason="outliers")})
    assert reasons("llama", plan) == ["outliers", "stays as it is"]
    plan = PrecisionPlan(pages={i: PagePrecision("nvfp4") for i in range(LAYERS)})
    assert (
        reasons("latent", plan)
        == ["latents have FP8 pages only: a latent is the keys and values of all heads, too much for 4 bits"]
        * LAYERS
    )


def test_refuses_rows_that_are_no_whole_blocks() -> None:
    graph_module = before("")
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if node.name == "v_cache_1":
            node.meta["val"] = node.meta["val"][..., :12]
    report = quantize_kv(graph_module, plan_of(pages_of(), "nvfp4"))
    assert [r.reason for r in report.rejected] == [
        "NVFP4 has blocks of 16 elements, which rows of [16, 12] are no multiples of"
    ]
    assert report.matched == LAYERS - 1


@pytest.mark.parametrize("value", [0.0, 2.0**-81, float("inf"), float("nan"), -1.0])
def test_refuses_multipliers_that_overflow(value: float) -> None:
    plan = PrecisionPlan(pages={1: PagePrecision("fp8", 1.0, value)})
    with pytest.raises(OptionError, match=r"multipliers of the pages 1 must be finite and at least 2\^-80"):
        run(before(""), plan)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_second_run_and_the_text_change_nothing(format: PageFormat) -> None:
    graph_module, _ = quantized(format)
    expected, text = logits(graph_module, tokens(7)), print_graph(graph_module)
    assert run(graph_module, plan_of(pages_of(), format)).matched == 0
    assert print_graph(graph_module) == text
    names = [str(n.target) for n in graph_module.graph.find_nodes(op="get_attr")]
    loaded = load_graph(text, {name: held(graph_module, name) for name in names})
    assert torch.equal(logits(loaded, tokens(7)), expected)


def test_equal_layers_are_one_site() -> None:
    _, report = quantized("nvfp4")
    assert len({site.key for site in report.sites}) == 1
    site = report.sites[0]
    targets = [
        [n.target for n in g.graph.nodes if n.op == "call_function"] for g in (site.before, site.after)
    ]
    assert targets == [[octavo.rope_kv_write.default, octavo.paged_attention.default]] * 2
    dtypes = [{n.meta["val"].dtype for n in calls(site.before, t)[0].all_input_nodes} for t in targets[0]]
    assert torch.uint8 not in dtypes[0] | dtypes[1]


def drop(graph_module: GraphModule, target: object) -> None:
    """A write or a read that forgets the scales of keys."""
    node = calls(graph_module, target)[0]
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "k_scales"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (partial(drop, target=octavo.rope_kv_write.default), "k_scales_0 is written by nobody"),
        (partial(drop, target=octavo.paged_attention.default), "k_scales_0 is written by .* and never read"),
    ],
)
def test_scales_are_pages_to_the_rules(change: Callable[[GraphModule], None], said: str) -> None:
    graph_module, _ = quantized("nvfp4")
    change(graph_module)
    with pytest.raises(IllegalGraphError, match=said):
        check_paging(graph_module, "test")
