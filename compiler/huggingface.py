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
# Arguments of an attention that its result does not depend on: what to return, where keys are kept, dropout's chance
# in training, and positions, which the rotation before it has used.
IRRELEVANT = frozenset(
    (
        "dropout", "position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict", "deterministic", "num_items_in_batch",
        "logits_to_keep",
    )
)  # fmt: skip


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
    if name == "chunked_overlay":
        raise CaptureError(
            f"capture: attention in chunks of {closure['chunk_size']} tokens is not served, only causal masks and "
            "sliding windows; sequences that fit into one chunk need none: give these layers the layer type "
            "full_attention in the configuration"
        )
    raise CaptureError(
        f"capture: the mask {mask_function.__qualname__!r} is not one that can be paged (causal, sliding "
        "window); remove the mask from the model"
    )


def _build_mask(mask_function: Any = causal_mask_function, attention_mask: Any = None, **_: Any) -> MaskSpec:
    if attention_mask is not None:
        raise CaptureError(
            "capture: the model makes a padding mask of its own, and sequences in a step have no padding; leave the "
            "attention mask None where none was given"
        )
    return mask_spec(mask_function)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """q, k, v (B, heads, T, head_dim) as transformers passes them; returns (B, T, heads, head_dim).

    Raises CaptureError for arguments that may change the result and that `octavo::attention` does not have.
    """
    if isinstance(attention_mask, Tensor):
        raise CaptureError(
            f"capture: {type(module).__name__} passes a mask tensor to the attention interface"
        )
    unknown = {name: value for name, value in others.items() if name not in IRRELEVANT and value is not None}
    if unknown:
        raise CaptureError(
            f"capture: {type(module).__name__} passes {', '.join(map(_argument, unknown.items()))} to the attention "
            "interface: attention is served with a mask, a scale, a soft-cap, a window and sinks, and nothing else"
        )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    spec = attention_mask or MaskSpec(is_causal, sliding_window or 0)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.ops.octavo.attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), s_aux, float(scale), spec.causal,
        int(spec.window), float(softcap or 0.0),
    )  # fmt: skip
    return out, None


def _argument(named: tuple[str, Any]) -> str:
    """`position_bias (1, 4, 7, 7)`, `chunk_size=8`, for messages."""
    name, value = named
    return f"{name} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{name}={value!r}"


def explanation(error: Exception) -> str | None:
    """What an error of the model's own code means, where the mask's stand-in is its cause."""
    if MaskSpec.__name__ not in str(error):
        return None
    return (
        "capture: the model's code reads the attention mask itself, to join it with another or to choose keys by; "
        "only masks that go to the attention interface as they were made are served (causal, sliding window)"
    )


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


def require_positions_from_zero(model: PreTrainedModel) -> None:
    """Raise CaptureError for a model that, asked without positions, takes others than 0, 1, 2, ... (RoBERTa's)."""
    config = model.config.get_text_config()
    # Positions that skip padding start behind its id, so it must not come first, where it would hide that.
    ids = torch.arange(5, 0, -1, device=model.device)[None] % config.vocab_size
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits.float()
        given = call(model, ids, torch.arange(5, device=model.device)[None]).float()
    bound = 1e-3 * float(own.abs().max().nan_to_num())
    if not torch.allclose(own, given, rtol=0.0, atol=bound, equal_nan=True):
        raise CaptureError(
            f"capture: {type(model).__name__} counts positions otherwise than 0, 1, 2, ... where it is given none: its "
            "logits for five tokens differ from those with position_ids by "
            f"{float((own - given).abs().max()):.3g}; positions that skip padding or start elsewhere are not served"
        )


def is_model(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel)


def description(model: PreTrainedModel) -> dict[str, Any]:
    """What the configuration says of the model; missing entries are None."""
    config = model.config.get_text_config()
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    eos = eos if eos is not None else getattr(config, "eos_token_id", None)
    return {
        "name": model.config.name_or_path or type(model).__name__,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "max_model_len": getattr(config, "max_position_embeddings", None),
        "eos_token_ids": [] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        "bos_token_id": getattr(config, "bos_token_id", None),
    }
