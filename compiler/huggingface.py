"""Hugging Face's extension points: attention and masks arrive as one op with its attributes.

Imports transformers, so it is imported only for a model that is one of theirs (see capture.py).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

import octavo.compiler.ops  # noqa: F401  (registers octavo::attention)
from octavo.compiler.errors import CaptureError
from octavo.compiler.huggingface_experts import experts_as_op

INTERFACE = "octavo"


@dataclass(frozen=True)
class MaskSpec:
    """What a mask allows, in place of a 4-D tensor. window counts the keys that a query sees; 0 means all."""

    causal: bool
    window: int


def mask_spec(mask_function: Any) -> MaskSpec:
    """Read the composed closures that transformers builds its masks from."""
    atoms = _atoms(mask_function)
    windows = [size for kind, size in atoms if kind == "window"]
    return MaskSpec(("causal", 0) in atoms, min(windows, default=0))


def _atoms(mask_function: Any) -> set[tuple[str, int]]:
    name = mask_function.__qualname__.split(".")[0]
    cells = mask_function.__closure__ or ()
    closure = dict(zip(mask_function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))
    if mask_function is causal_mask_function:
        return {("causal", 0)}
    if name in ("bidirectional_mask_function", "packed_sequence_mask_function"):
        # Which sequence a token belongs to is the page table's business, not the mask's.
        return set()
    if name == "remap_positions_for_packed_sequence":
        return _atoms(closure["mask_function"])
    if name == "and_masks":
        return set().union(*(_atoms(f) for f in closure["mask_functions"]))
    if name == "sliding_window_overlay":
        return {("window", closure["sliding_window"])}
    raise CaptureError(
        f"capture: the mask {mask_function.__qualname__!r} is not one that can be paged (causal, sliding "
        "window); pass attn_implementation='eager' models through the pattern route or remove the mask"
    )


def _build_mask(mask_function: Any = causal_mask_function, attention_mask: Any = None, **_: Any) -> MaskSpec:
    if attention_mask is not None:
        raise CaptureError("capture: a padding mask was built in the ragged form, which has no padding")
    return mask_spec(mask_function)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """q, k, v (B, heads, T, head_dim) as transformers passes them; returns (B, T, heads, head_dim)."""
    if isinstance(attention_mask, Tensor):
        raise CaptureError(
            f"capture: {type(module).__name__} passes a mask tensor to the attention interface"
        )
    spec = attention_mask or MaskSpec(bool(getattr(module, "is_causal", True)), sliding_window or 0)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.ops.octavo.attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), s_aux, float(scale), spec.causal,
        int(spec.window), float(softcap or 0.0),
    )  # fmt: skip
    return out, None


@contextlib.contextmanager
def layers_as_ops(model: PreTrainedModel) -> Iterator[None]:
    """While active, attentions of `model` call `octavo::attention`, experts `octavo::moe`. Undone afterwards."""
    with attention_as_op(model), experts_as_op(model):
        yield


@contextlib.contextmanager
def attention_as_op(model: PreTrainedModel) -> Iterator[None]:
    """While active, every attention layer of `model` calls `octavo::attention`. Undone afterwards."""
    AttentionInterface.register(INTERFACE, _attention)
    AttentionMaskInterface.register(INTERFACE, _build_mask)
    previous: Any = model.config._attn_implementation
    try:
        model.set_attn_implementation(INTERFACE)
        yield
    finally:
        model.set_attn_implementation(previous)


def call(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits (1, T, vocab)."""
    logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return logits


def is_model(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel)


def description(model: PreTrainedModel) -> dict[str, Any]:
    """What the configuration says of the model; missing entries are None."""
    config = model.config.get_text_config()
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    eos = eos if eos is not None else config.eos_token_id
    return {
        "name": model.config.name_or_path or type(model).__name__,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "max_model_len": getattr(config, "max_position_embeddings", None),
        "eos_token_ids": [] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        "bos_token_id": config.bos_token_id,
    }
