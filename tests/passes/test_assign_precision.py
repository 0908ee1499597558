"""Which format every product and every attention's pages have, why, and what calibration must have seen for it."""

from typing import Any

import pytest
import torch
from calibrated import lowered
from lowered import LoweredGraph
from torch.fx import GraphModule

from octavo.compiler.errors import OptionError
from octavo.compiler.observed import Observed, ObservedInput, ObservedPages
from octavo.compiler.options import QuantConfig
from octavo.compiler.precision import PrecisionPlan, ProductPrecision
from octavo.passes.assign_precision import Choice, assign_precision, quantisable
from octavo.passes.products import find_pages, find_products
from octavo.passes.rule import PassReport


def observed_of(graph_module: GraphModule, amax: float = 2688.0) -> Observed:
    """Every input's largest magnitude is `amax`, every key's 44.8 and every value's 0."""
    seen = ObservedInput(1, amax, (0.0, 0.0, 0.0), torch.ones(1))
    weights = [weight for product in find_products(graph_module) for weight in product.weights]
    pages = {one.number: ObservedPages(44.8, 0.0) for one in find_pages(graph_module)}
    return Observed(dict.fromkeys(weights, seen), pages)


def assigned(
    config: QuantConfig, name: str = "llama", amax: float = 2688.0, **rest: Any
) -> tuple[PrecisionPlan, PassReport]:
    graph_module, plan = lowered(name), PrecisionPlan()
    report = assign_precision(graph_module, config, observed_of(graph_module, amax), plan, **rest)
    return plan, report


def formats(plan: PrecisionPlan, part: str) -> set[str]:
    found: set[str] = {precision.format for name, precision in plan.products.items() if part in name}
    assert found
    return found


@pytest.mark.parametrize("mode", ["nvfp4", "nvfp4_weight_only", "fp8", "bf16"])
def test_a_mode_is_for_all_but_the_logits(mode: Any) -> None:
    plan, report = assigned(QuantConfig(mode))
    assert formats(plan, "layers") == {mode}
    assert plan.products["lm_head.weight"].format == "bf16"
    assert len(plan.products) == 9 and len(plan.pages) == 2
    if mode != "bf16":
        assert report.notes == {mode: 8, "bf16": 1, "pages in bf16": 2}
        assert [rejection.reason for rejection in report.rejected] == ["makes the logits"]
        assert not report.sites


def test_static_scales_carry_what_calibration_saw_and_head_room() -> None:
    plan, _ = assigned(QuantConfig("nvfp4", headroom=1.5))
    precision = plan.products["model.layers.0.mlp.down_proj.weight"]
    assert precision.input_scale == pytest.approx(1.5) and precision.hidden_scale is None
    assert precision.reason == "mode nvfp4; largest input 2688, head-room 1.5"


@pytest.mark.parametrize(
    "config",
    [QuantConfig("nvfp4", activations="by_token"), QuantConfig("fp8"), QuantConfig("nvfp4_weight_only")],
)
def test_other_forms_need_no_calibration(config: QuantConfig) -> None:
    graph_module, plan = lowered(), PrecisionPlan()
    assign_precision(graph_module, config, None, plan)
    assert {precision.input_scale for precision in plan.products.values()} == {None}


def test_an_input_of_zeros_has_scale_one() -> None:
    plan, _ = assigned(QuantConfig("nvfp4"), amax=0.0)
    assert plan.products["model.layers.0.mlp.down_proj.weight"].input_scale == 1.0


@pytest.mark.parametrize("missing", ["model.layers.1.mlp.down_proj.weight", "all"])
def test_a_missing_observation_is_named(missing: str) -> None:
    graph_module = lowered()
    observed = observed_of(graph_module)
    observed.products.pop(missing, None)
    with pytest.raises(OptionError, match=r"saw no input of model\.layers"):
        assign_precision(
            graph_module, QuantConfig("nvfp4"), None if missing == "all" else observed, PrecisionPlan()
        )


def test_an_infinite_observation_is_named() -> None:
    with pytest.raises(OptionError, match=r"input of model\.layers\.0\.self_attn\.q_proj_k_proj.*got inf"):
        assigned(QuantConfig("nvfp4"), amax=float("inf"))


def test_what_the_plan_says_stays() -> None:
    graph_module = lowered()
    given = ProductPrecision("nvfp4", 0.5, None, "as the checkpoint has it")
    plan = PrecisionPlan({"model.layers.0.mlp.down_proj.weight": given})
    assign_precision(graph_module, QuantConfig("fp8"), None, plan)
    assert plan.products["model.layers.0.mlp.down_proj.weight"] == given
    assert formats(plan, "layers.1") == {"fp8"}


def test_experts_have_scales_of_both_inputs_and_routers_stay() -> None:
    plan, _ = assigned(QuantConfig("nvfp4"), "gpt_oss")
    experts = [precision for name, precision in plan.products.items() if "experts_gate_up_proj" in name]
    assert [(p.format, p.input_scale, p.hidden_scale) for p in experts] == [("nvfp4", 1.25, 1.25)] * 2
    assert "largest input 2688, 2688" in experts[0].reason
    router = plan.products["model.layers.0.mlp.router.weight"]
    assert (router.format, router.reason) == ("bf16", "selects experts")


def test_latents_stay() -> None:
    plan, _ = assigned(QuantConfig("fp8", kv="fp8"), "deepseek_v3")
    latents = {n: p.reason for n, p in plan.products.items() if "kv_a_proj" in n}
    assert len(latents) == 4 and set(latents.values()) == {"makes the latent that attention keeps"}
    assert formats(plan, "q_a_proj") == formats(plan, "o_proj") == {"fp8"}
    assert not [name for name in plan.products if "kv_b_proj" in name]
    assert {(page.format, page.reason) for page in plan.pages.values()} == {
        ("fp8", "largest latent 44.8, head-room 1.25")
    }
    plan, _ = assigned(QuantConfig("bf16", kv="nvfp4", include=("*.pages",)), "deepseek_v3")
    assert {(page.format, page.reason[:9]) for page in plan.pages.values()} == {("bf16", "a latent ")}


def test_rows_that_are_not_whole_blocks_stay() -> None:
    plan, report = assigned(QuantConfig("nvfp4"), "deepseek_v3")
    precision = plan.products["model.layers.0.self_attn.q_b_proj_reshape_37"]
    assert (precision.format, precision.reason) == ("bf16", "rows of 24 elements are not whole blocks of 16")
    assert precision.reason in [rejection.reason for rejection in report.rejected]
    plan, _ = assigned(QuantConfig("fp8"), "deepseek_v3")
    assert plan.products["model.layers.0.self_attn.q_b_proj_reshape_37"].format == "fp8"
    with pytest.raises(OptionError, match=r"include: .*q_b_proj_reshape_37 cannot be nvfp4: rows of 24"):
        assigned(QuantConfig("nvfp4", include=("*.q_b_proj",)), "deepseek_v3")


@pytest.mark.parametrize("mode", ["nvfp4", "nvfp4_weight_only"])
def test_rows_whose_scales_kernels_cannot_read_together_stay(mode: Any) -> None:
    plan, report = assigned(QuantConfig(mode), layout="swizzled_128x4")
    assert formats(plan, "down_proj") == {"bf16"} and formats(plan, "o_proj") == {mode}
    reason = "rows of 96 elements are no multiple of 64, whose scales GPU kernels read together"
    assert reason in [rejection.reason for rejection in report.rejected]
    with pytest.raises(OptionError, match=r"include: .*down_proj.weight cannot be nvfp4.*no multiple of 64"):
        assigned(QuantConfig(mode, include=("*.down_proj",)), layout="swizzled_128x4")


def test_gates_and_draft_heads_stay() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (32,), torch.bfloat16)
    for name, outputs in (("gate", 1), ("mtp.0.proj", 32), ("mtproj", 32)):
        y = g.call("linear", x, g.weight(f"{name}.weight", torch.ones(outputs, 32).bfloat16()))
    graph_module = g.finish(g.call("linear", y, g.weight("head.weight", torch.ones(64, 32).bfloat16())))
    plan = PrecisionPlan()
    assign_precision(graph_module, QuantConfig("fp8"), None, plan)
    assert {name: precision.reason for name, precision in plan.products.items()} == {
        "gate.weight": "has 1 outputs, fewer than 16: a gate",
        "mtp.0.proj.weight": "belongs to a head that drafts tokens",
        "mtproj.weight": "mode fp8",
        "head.weight": "makes the logits",
    }


def test_globs_keep_whole_products_and_include_what_stays() -> None:
    plan, _ = assigned(QuantConfig("fp8", keep=("*.k_proj", "model.layers.1.mlp"), include=("lm_*",)))
    kept = {name: p.reason for name, p in plan.products.items() if p.format == "bf16"}
    assert sorted(name.split("_5")[0].split("_6")[0] for name in kept if "self_attn" in name) == [
        "model.layers.0.self_attn.q_proj_k_proj_v_proj_cat",
        "model.layers.1.self_attn.q_proj_k_proj_v_proj_cat_1",
    ]
    assert {name for name in kept if "mlp" in name and "layers.0" in name} == set()
    assert len([name for name in kept if "layers.1.mlp" in name]) == 2
    assert set(kept.values()) == {"kept: named by '*.k_proj'", "kept: named by 'model.layers.1.mlp'"}
    assert plan.products["lm_head.weight"].format == "fp8"


def test_keep_beats_include() -> None:
    plan, _ = assigned(QuantConfig("fp8", keep=("lm_head",), include=("lm_head",)))
    assert plan.products["lm_head.weight"].format == "bf16"


@pytest.mark.parametrize("option", ["keep", "include"])
@pytest.mark.parametrize("glob", ["model.layers.7", "*.q_prj", "model.embed_tokens"])
def test_a_glob_that_names_nothing_is_an_error(option: str, glob: str) -> None:
    with pytest.raises(OptionError, match=f"{option}: '{glob.replace('*', '.')}' names no product's module"):
        assigned(
            QuantConfig("fp8", keep=(glob,)) if option == "keep" else QuantConfig("fp8", include=(glob,))
        )


@pytest.mark.parametrize(("kv", "largest"), [("fp8", 448.0), ("nvfp4", 2688.0)])
def test_pages_have_multipliers(kv: Any, largest: float) -> None:
    plan, _ = assigned(QuantConfig("bf16", kv=kv, headroom=1.5))
    for page in plan.pages.values():
        assert (page.format, page.v_multiplier) == (kv, 1.0)
        assert page.k_multiplier == pytest.approx(1.5 * 44.8 / largest)
        assert page.reason == "largest key 44.8 and value 0, head-room 1.5"


def test_multipliers_have_a_least() -> None:
    graph_module, plan = lowered(), PrecisionPlan()
    observed = observed_of(graph_module)
    observed.pages[1] = ObservedPages(1e-30, 1.0)
    assign_precision(graph_module, QuantConfig("bf16", kv="fp8"), observed, plan)
    assert plan.pages[1].k_multiplier == 2.0**-80


def test_pages_need_observations() -> None:
    with pytest.raises(OptionError, match="saw no keys and values of the pages 0"):
        assign_precision(lowered(), QuantConfig("bf16", kv="fp8"), Observed(), PrecisionPlan())


def test_pages_of_a_window_stay_unless_asked_for() -> None:
    plan, report = assigned(QuantConfig("bf16", kv="nvfp4"), "gpt_oss")
    assert [plan.pages[i].format for i in (0, 1)] == ["bf16", "nvfp4"]
    assert plan.pages[0].reason == "its window is 6 tokens"
    assert plan.pages[0].reason in [rejection.reason for rejection in report.rejected]
    plan, _ = assigned(QuantConfig("bf16", kv="nvfp4", include=("*.pages",)), "gpt_oss")
    assert [plan.pages[i].format for i in (0, 1)] == ["nvfp4", "nvfp4"]
    plan, _ = assigned(QuantConfig("bf16", kv="fp8", keep=("model.layers.1.*.pages",)), "gpt_oss")
    assert [plan.pages[i].format for i in (0, 1)] == ["fp8", "bf16"]


def test_auto_takes_what_was_chosen() -> None:
    graph_module = lowered()
    config = QuantConfig("auto", keep=("*.o_proj",))
    names = [product.name for product in quantisable(graph_module, config)]
    assert len(names) == 6 and not any("o_proj" in name or "lm_head" in name for name in names)
    choices = {name: Choice("fp8", "3 of 7") for name in names}
    choices[names[0]] = Choice("nvfp4", "1 of 7")
    plan, _ = assigned(config, choices=choices)
    assert [plan.products[name].format for name in names] == ["nvfp4", *["fp8"] * 5]
    assert plan.products[names[0]].reason.startswith("1 of 7; largest input")
    with pytest.raises(OptionError, match=f"expected a choice for {names[0]}"):
        assigned(config)
