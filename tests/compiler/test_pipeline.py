"""The order of the passes, what a run checks and reports, and how it fails."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from models import LAYERS, SPELLINGS, TinyLM
from stages import FP32, SETTINGS, captured, step_of
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.capture import capture
from octavo.compiler.errors import IllegalGraphError, OptionError, PassError
from octavo.compiler.legality import op
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import (
    DEFAULT_MODEL_LEN,
    PIPELINE,
    Lowered,
    Settings,
    Step,
    expected_attentions,
    lower,
    settings_of,
)
from octavo.compiler.step_rows import summary
from octavo.passes.rule import PassReport


def lowered(name: str = "llama", **options: Any) -> Lowered:
    return lower(captured(name), CompileOptions(**options), SETTINGS)


def test_every_pass_runs_once_in_order_and_is_reported() -> None:
    seen: list[tuple[str, int, int]] = []
    result = lower(captured(), CompileOptions(), SETTINGS, progress=lambda *args: seen.append(args))
    assert (
        [r.name for r in result.reports] == [step.name for step in PIPELINE] == [name for name, _, _ in seen]
    )
    assert [at[1:] for at in seen] == [(i, len(PIPELINE)) for i in range(len(PIPELINE))]
    assert result.num_layers == LAYERS
    assert result.proof_s > 0


def test_rows_of_the_report_hold_counts_proofs_and_reasons() -> None:
    rows = {row["pass"]: row for row in summary(lowered("fused").reports)}
    fused = rows["fuse_attention"]
    assert (fused["matched"], fused["proven_sites"], fused["exactness"]) == (LAYERS, 1, "reassociates")
    assert 0 < fused["worst_error"] <= fused["error_bound"]
    assert rows["merge_qkv"]["rejected"] == LAYERS
    assert rows["merge_qkv"]["reasons"][0].startswith("node paged_attention")
    assert rows["canonicalize"]["nodes_after"] < rows["canonicalize"]["nodes_before"]


def test_tidying_after_a_pass_is_part_of_its_counts() -> None:
    reports = lowered(verify="off").reports
    for one, following in itertools.pairwise(reports):
        assert one.nodes_after == following.nodes_before


def test_off_skips_the_proofs() -> None:
    result = lowered(verify="off")
    assert result.proof_s == 0
    assert {r.proof.sites for r in result.reports} == {0}


def test_missed_attention_is_an_error_with_counts_and_reasons() -> None:
    with pytest.raises(PassError) as raised:
        lowered("prefix")
    text = str(raised.value)
    assert text.startswith(
        "fuse_attention: expected 2 attentions, got 0; missed: node softmax, inner.layers.0.attention, "
    )
    assert "models.py:" in text and "is prefix-LM: query i sees key j > i for j < 3" in text


def test_attention_that_is_not_causal_is_an_error_with_its_place() -> None:
    with pytest.raises(IllegalGraphError) as raised:
        lowered("bidirectional")
    text = str(raised.value)
    assert text.startswith(
        "insert_paged_kv: octavo::attention is not legal in a paged graph (node attention, layers.0."
    )
    assert "insert_paged_kv left node attention, layers.0.attention, models.py:" in text
    assert "attention is not causal: later tokens would change the pages of earlier ones" in text


def test_what_no_kernel_serves_is_an_error_with_what_passes_left() -> None:
    class Summing(TinyLM):
        def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
            return super().forward(input_ids, positions).cumsum(-1)

    with pytest.raises(IllegalGraphError) as raised:
        lower(capture(Summing(SPELLINGS["biased"])), CompileOptions(verify="off"), SETTINGS)
    text = str(raised.value)
    assert "aten::cumsum is not legal in a lowered graph (node cumsum, " in text
    assert "kernels exist for " in text
    assert "fuse_gated_mlp left node linear_" in text and "has a bias" in text


def test_no_attention_is_an_error_before_any_pass() -> None:
    with pytest.raises(
        PassError, match=r"^capture: TinyLM has no attention: no softmax over keys, no scaled_dot"
    ):
        lowered("none")


def test_fewer_attentions_than_layers_are_an_error_and_more_are_not() -> None:
    model = captured()
    assert len(expected_attentions(model)) == LAYERS
    model.model_info["num_layers"] = 5
    with pytest.raises(
        PassError,
        match=r"has 5 layers by its configuration and attention in 2 \(model.layers.0.self_attn, model.layers.1.self",
    ):
        expected_attentions(model)
    model.model_info["num_layers"] = 1
    assert len(expected_attentions(model)) == LAYERS


def test_layers_are_not_counted_where_the_library_does_not_name_attention() -> None:
    model = captured("softmax")
    model.model_info["num_layers"] = 5
    assert [op_name for op_name in expected_attentions(model)] == ["softmax", "softmax_1"]


def test_an_exception_inside_a_pass_names_the_pass() -> None:
    def broken(graph_module: GraphModule) -> PassReport:
        raise IndexError("tuple index out of range")

    pipeline = (PIPELINE[0], Step(broken, "canonical"))
    expected = r"^broken: IndexError: tuple index out of range \(after: canonicalize\)$"
    with pytest.raises(PassError, match=expected):
        lower(captured(), CompileOptions(), SETTINGS, pipeline)


def test_a_pass_that_leaves_something_illegal_is_named() -> None:
    def undo(graph_module: GraphModule) -> PassReport:
        for node in graph_module.graph.nodes:
            if op(node) == "octavo::linear":
                node.target = torch.ops.aten.linear.default
        return PassReport("undo")

    pipeline = (PIPELINE[0], Step(undo, "canonical"))
    with pytest.raises(IllegalGraphError, match=r"^undo: aten::linear is not legal in a canonical graph"):
        lower(captured(), CompileOptions(), SETTINGS, pipeline)


def test_steps_get_the_settings_they_name() -> None:
    given: dict[str, int] = {}

    def taking(graph_module: GraphModule, page_size: int) -> PassReport:
        given["page_size"] = page_size
        return PassReport("taking")

    step = Step(taking, "captured", ("page_size",))
    step.bind(Settings(32, 7))(captured().graph_module)
    assert given == {"page_size": 32}
    assert step.name == "taking"
    assert dataclasses.replace(step_of("fuse_rope"), stage="fused").name == "fuse_rope"


@pytest.mark.parametrize(
    ("longest", "options", "expected"),
    [
        (48, {}, Settings(16, 48)),
        (48, {"max_model_len": 20, "page_size": 64}, Settings(64, 20)),
        (None, {}, Settings(16, DEFAULT_MODEL_LEN)),
        (None, {"max_model_len": 9000}, Settings(16, 9000)),
    ],
)
def test_sizes_are_the_users_then_the_models(
    longest: int | None, options: dict[str, int], expected: Settings
) -> None:
    model = captured()
    model.model_info["max_model_len"] = longest
    assert settings_of(model, CompileOptions(**options), 16) == expected  # type: ignore[arg-type]


def test_a_length_above_the_models_is_refused() -> None:
    with pytest.raises(
        OptionError, match="max_model_len: the model's positions end at 48, got 49; choose at most that"
    ):
        settings_of(captured(), CompileOptions(max_model_len=49), 16)


def test_equal_models_lower_to_equal_graphs() -> None:
    assert str(lowered(verify="off").graph_module.graph) == str(lowered().graph_module.graph)
    assert captured(dtype=FP32).graph_module is not captured().graph_module
