"""Heads in the files that they are published in: written and read again, and what is wrong with others is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import IDS, KINDS, head_of, results, step_of, target_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.compiler.drafts.checkpoints import load_draft_head, save_draft_head
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.errors import CheckpointError

FILES = {"medusa": "medusa_lm_head.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again(kind: str, tmp_path: Path) -> None:
    head, target = head_of(kind), target_of(kind)
    assert save_draft_head(head, tmp_path) == tmp_path
    again = load_draft_head(tmp_path, target)
    assert type(again) is type(head) and again.facts == head.facts and not again.training
    assert again.features_width == head.features_width and again.max_model_len == head.max_model_len
    assert (again.target_ids is None) == (head.target_ids is None) == (kind == "mtp")
    assert again.target_ids is None or torch.equal(again.target_ids, IDS)
    step = step_of(head, 6)
    for got, wanted in zip(results(again, *step), results(head, *step), strict=True):
        assert torch.equal(got, wanted)


NAMES = {
    "eagle": {"embed_tokens.weight", "fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight",
              "layers.0.mlp.down_proj.weight", "layers.0.post_attention_layernorm.weight"},
    "eagle3": {"fc.weight", "d2t", "t2d", "norm.weight", "lm_head.weight", "midlayer.hidden_norm.weight",
               "midlayer.input_layernorm.weight", "midlayer.self_attn.k_proj.weight"},
    "medusa": {"0.0.linear.weight", "2.1.linear.bias", "1.2.weight"},
    "mtp": {f"model.layers.2.{name}.weight" for name in (
        "enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm", "mlp.gate", "mlp.experts.3.up_proj",
        "mlp.shared_experts.down_proj", "self_attn.kv_a_proj_with_mqa",
    )} | {"model.layers.2.mlp.gate.e_score_correction_bias"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_offsets_are_those_of_the_authors(kind: str, tmp_path: Path) -> None:
    save_draft_head(head_of(kind), tmp_path)
    tensors = load_file(tmp_path / FILES.get(kind, "model.safetensors"))
    assert NAMES[kind] <= tensors.keys()
    if kind == "eagle3":
        assert (torch.arange(len(IDS)) + tensors["d2t"]).tolist() == IDS.tolist()
        assert tensors["t2d"].dtype is torch.bool and tensors["t2d"].nonzero()[:, 0].tolist() == IDS.tolist()
        assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 2 * 64)
        assert "embed_tokens.weight" not in tensors  # the target's
    if kind == "mtp":
        both = head_of(kind).state_dict()["layer.mlp.experts.gate_up_proj"][3]
        name = "model.layers.2.mlp.experts.3.{}_proj.weight"
        stacked = torch.cat((tensors[name.format("gate")], tensors[name.format("up")]))
        assert torch.equal(stacked, both)


def test_pickled_heads_are_read_as_tensors_alone(tmp_path: Path) -> None:
    head = head_of("eagle")
    save_draft_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    again = load_draft_head(tmp_path, target_of("eagle"))
    step = step_of(head, 3)
    assert torch.equal(results(again, *step)[0], results(head, *step)[0])
    torch.save({"fc.weight": Path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: expected tensors by name"):
        load_draft_head(tmp_path, target_of("eagle"))


def test_queries_may_have_biases_where_the_last_product_has_none(tmp_path: Path) -> None:
    """As in heads of Qwen2."""
    save_draft_head(head_of("eagle"), tmp_path)

    def add(tensors: dict[str, Tensor]) -> None:
        for name, rows in (("q", 64), ("k", 32), ("v", 32)):
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.full((rows,), 0.5)

    rewrite(tmp_path, add)
    again = load_draft_head(tmp_path, target_of("eagle"))
    assert isinstance(again, EagleHead)
    attention: Any = again.layers[0].self_attn
    assert bool((attention.v_proj.bias == 0.5).all()) and not bool(attention.o_proj.bias.any())


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("eagle", lambda t: t.pop("layers.0.mlp.up_proj.weight"), "expected the tensors layers.0.mlp.up_proj.weight"),
        ("eagle", lambda t: t.update(extra=torch.ones(1)), "extra have no place in the head"),
        ("eagle", lambda t: t.update({"fc.weight": torch.ones(64, 9)}), "fc.weight of shape (64, 128), got (64, 9)"),
        ("eagle3", lambda t: t["t2d"].fill_(True), "expected t2d to name the tokens that d2t leads to"),
        ("eagle", lambda t: t.clear() or t.update(w=torch.ones(1)), "expected the tensors of a draft head (mtp: "),
        (
            "mtp",
            lambda t: t.update({"model.layers.2.eh_proj.weight_scale_inv": torch.ones(1)}),
            "expected plain weights, got FP8",
        ),
        ("mtp", lambda t: t.pop("model.layers.2.mlp.experts.1.up_proj.weight"), "tensors mlp.experts.1.up_proj.weight"),
    ],
)  # fmt: skip
def test_what_is_missing_or_too_much_is_named(
    kind: str, change: Callable[[dict[str, Tensor]], object], said: str, tmp_path: Path
) -> None:
    save_draft_head(head_of(kind), tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load_draft_head(tmp_path, target_of(kind))


def test_a_directory_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"expected a draft head in one of model\.safetensors, .*, got none"
    ):
        load_draft_head(tmp_path, target_of("eagle"))


def test_what_configurations_say(tmp_path: Path) -> None:
    save_draft_head(head_of("eagle3"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == len(IDS) and config["vocab_size"] == 96
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_draft_head(tmp_path, target_of("eagle3")).target_features == (1, 3, 5)
