"""Compiling from quantised checkpoints: the bytes of the files, and logits as with inputs quantised by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nvfp4 as by_the_book
import pytest
import torch
from foreign import compressed_tensors_llama, quiet
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.fx import GraphModule

from octavo.compiler.capture import capture
from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.checkpoints.given import GivenWeights
from octavo.compiler.errors import CheckpointError
from octavo.compiler.graph_model import GraphModel
from octavo.compiler.models import load_model
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import lower, settings_of
from octavo.compiler.precision import PrecisionPlan
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.passes.rewrite import Recipe, held, recipes

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
QKV = f"{ATTENTION}.q_proj_k_proj_v_proj_cat"
PAGE_SIZE = 4
IDS = torch.arange(12)[None] * 7


@dataclass
class Lowered:
    model: Any
    checkpoint: Checkpoint
    graph_module: GraphModule
    given: GivenWeights

    def quantized(self) -> PrecisionPlan:
        plan = self.given.plan(self.graph_module)
        quantize(self.graph_module, QuantSettings(plan, self.given, "linear"))
        return plan

    def logits(self) -> Tensor:
        with torch.no_grad():
            positions = torch.arange(IDS.shape[1])[None]
            return GraphModel(self.graph_module, PAGE_SIZE)(IDS, positions)[0]  # type: ignore[no-any-return]


def lowered(path: Path) -> Lowered:
    with quiet():
        loaded = load_model(str(path))
    assert loaded.checkpoint is not None
    captured, options = capture(loaded.model), CompileOptions(verify="off")
    graph_module = lower(captured, options, settings_of(captured, options, PAGE_SIZE)).graph_module
    given = GivenWeights(loaded.checkpoint, dict(recipes(graph_module)), torch.float32)
    return Lowered(loaded.model, loaded.checkpoint, graph_module, given)


def change(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def with_quantized_inputs(model: Any, checkpoint: Checkpoint) -> Tensor:
    """Logits of the model whose products read what their format makes of their inputs."""

    def hook(module: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
        group = checkpoint.groups[module]
        outer = checkpoint.input_scale(module) if group.static_inputs else None

        def quantized(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            rows = inputs[0].flatten(0, -2)
            if group.format == "nvfp4":
                assert outer is not None
                values = by_the_book.dequantize(*by_the_book.quantize(rows, outer), outer)
            else:
                scale: Any = outer if outer is not None else rows.abs().amax(-1, keepdim=True) / 448
                values = (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            return (values.to(rows.dtype).reshape(inputs[0].shape),)

        return quantized

    hooks = [
        model.get_submodule(module).register_forward_pre_hook(hook(module))
        for module, group in checkpoint.groups.items()
        if group.format != "nvfp4_weight_only"
    ]
    with torch.no_grad():
        logits: Tensor = model(IDS).logits[0]
    for one in hooks:
        one.remove()
    return logits


@pytest.mark.parametrize(
    "preset",
    ["NVFP4", "FP8_DYNAMIC", *(pytest.param(name, marks=pytest.mark.slow) for name in ("NVFP4A16", "FP8"))],
)
def test_bytes_are_kept_and_logits_are_those_of_the_format(tmp_path: Path, preset: str) -> None:
    path = compressed_tensors_llama(tmp_path, preset)
    one, files = lowered(path), load_file(path / "model.safetensors")
    plain = one.logits()
    one.quantized()
    end = "weight_packed" if "NVFP4" in preset else "weight"
    codes = torch.cat([files[f"{ATTENTION}.{name}_proj.{end}"].view(torch.uint8) for name in "qkv"])
    assert torch.equal(held(one.graph_module, f"{QKV}_codes").view(torch.uint8), codes)
    down = files[f"{MLP}.down_proj.{end}"].view(torch.uint8)
    assert torch.equal(held(one.graph_module, f"{MLP}.down_proj.weight_codes").view(torch.uint8), down)
    if "NVFP4" in preset:
        scales = torch.cat(
            [files[f"{ATTENTION}.{name}_proj.weight_scale"].view(torch.uint8) for name in "qkv"]
        )
        assert torch.equal(held(one.graph_module, f"{QKV}_scales").view(torch.uint8), scales)
        # Each of the three has an outer scale of its own: a product of 32 + 16 + 16 columns.
        outers = [1 / files[f"{ATTENTION}.{name}_proj.weight_global_scale"] for name in "qkv"]
        scale = 1 / files[f"{ATTENTION}.q_proj.input_global_scale"] if preset == "NVFP4" else torch.ones(1)
        expected = torch.cat(
            [o * scale for o, rows in zip(outers, (32, 16, 16), strict=True) for _ in range(rows)]
        )
        assert torch.allclose(held(one.graph_module, f"{QKV}_alpha"), expected, rtol=2**-22, atol=0)
    logits, wanted = one.logits(), with_quantized_inputs(one.model, one.checkpoint)
    # Inputs at ties may round the other way; a wrong scale anywhere would be far off.
    bound = 1e-5 if preset == "NVFP4A16" else 0.1 * float((plain - wanted).norm() / wanted.norm())
    assert float((logits - wanted).norm() / wanted.norm()) <= bound


def test_the_largest_of_unequal_input_scales_is_taken_and_noted(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{ATTENTION}.k_proj.input_global_scale"] /= 2

    one = lowered(change(compressed_tensors_llama(tmp_path), edit))
    plan = one.quantized()
    assert plan.products[QKV].input_scale == pytest.approx(0.022)
    assert (
        f"{QKV}: scales of its input from 0.011 to 0.022 in 3 weights; the largest is taken"
        in one.checkpoint.notes
    )


@pytest.mark.parametrize("preset", ["NVFP4A16"])
def test_a_product_that_is_quantised_in_parts_is_refused(tmp_path: Path, preset: str) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for end in ("weight_packed", "weight_scale", "weight_global_scale"):
            del tensors[f"{ATTENTION}.k_proj.{end}"]
        tensors[f"{ATTENTION}.k_proj.weight"] = torch.ones(16, 32)

    one = lowered(change(compressed_tensors_llama(tmp_path, preset), edit))
    with pytest.raises(
        CheckpointError, match=rf"^{QKV}: {ATTENTION}.q_proj is quantised .* {ATTENTION}.k_proj.weight is not"
    ):
        one.given.plan(one.graph_module)


def test_multipliers_of_pages_come_from_the_files(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{ATTENTION}.k_scale"] = torch.tensor([0.03125], dtype=torch.bfloat16)
        tensors[f"{ATTENTION}.v_scale"] = torch.tensor([0.0625], dtype=torch.bfloat16)

    path = change(compressed_tensors_llama(tmp_path, "NVFP4A16"), edit)
    config = path / "config.json"
    scheme = '"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false}'
    config.write_text(config.read_text().replace('"kv_cache_scheme": null', scheme))
    one = lowered(path)
    plain = one.logits()
    plan = one.quantized()
    (pages,) = plan.pages.values()
    assert (pages.format, pages.k_multiplier, pages.v_multiplier) == ("fp8", 0.03125, 0.0625)
    difference = float((one.logits() - plain).norm() / plain.norm())
    assert 1e-4 < difference < 0.05


def leaf(one: Lowered, name: str = f"{MLP}.down_proj.weight") -> tuple[str, Tensor]:
    return name, one.model.get_parameter(name).detach()


@pytest.fixture(scope="module")
def weight_only(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lowered(compressed_tensors_llama(tmp_path_factory.mktemp("given"), "NVFP4A16"))


def turned(weight: Tensor) -> Tensor:
    """Rows of 4 heads of 8, in turn."""
    return weight.view(4, 8, -1).transpose(0, 1).reshape(32, -1)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (lambda s: s[0], lambda w: w),
        (lambda s: s[0][5:20], lambda w: w[5:20]),
        (lambda s: torch.cat([s[0][16:], s[0][:16]]), lambda w: torch.cat([w[16:], w[:16]])),
        (lambda s: turned(s[0]), turned),
    ],
)
def test_any_choice_of_rows_is_followed(
    weight_only: Lowered, make: Callable[[Sequence[Tensor]], Tensor], changes: Callable[[Tensor], Tensor]
) -> None:
    name, weight = leaf(weight_only)
    given = GivenWeights(weight_only.checkpoint, {"made": Recipe((name,), make)}, torch.float32)
    stored = weight_only.checkpoint.read(f"{MLP}.down_proj")
    parts = given("made", changes(weight), "nvfp4_weight_only")
    assert parts.rule == "given" and torch.equal(parts.codes, changes(stored.codes))
    assert parts.outer.shape == ()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda s: s[0].T, "in another way than row by row"),
        (lambda s: s[0].flip(1), "stand for other values"),
        (lambda s: s[0] * 2, "in another way than row by row"),
    ],
)
def test_what_is_not_a_choice_of_rows_is_refused(
    weight_only: Lowered, make: Callable[[Sequence[Tensor]], Tensor], said: str
) -> None:
    name, weight = leaf(weight_only)
    given = GivenWeights(weight_only.checkpoint, {"made": Recipe((name,), make)}, torch.float32)
    with pytest.raises(CheckpointError, match=f"^made: .*{said}"):
        given("made", make([weight]).contiguous(), "nvfp4_weight_only")


def test_a_model_with_other_weights_is_refused(weight_only: Lowered) -> None:
    name, weight = leaf(weight_only)
    other = weight.clone()
    other[3, 3] += 1
    given = GivenWeights(weight_only.checkpoint, {}, torch.float32)
    with pytest.raises(CheckpointError, match=rf"^{name}: the checkpoint's codes stand for other values"):
        given(name, other, "nvfp4_weight_only")
