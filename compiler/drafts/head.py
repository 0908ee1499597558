"""What every draft head is: a module from tokens and a target's hidden states to logits of the tokens behind them."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.compiler.errors import OptionError

TARGET_IDS = "draft/target_ids.json"  # of an artifact: the target's id of each of the head's tokens


class DraftHead(nn.Module):
    """forward(input_ids (1, T), position_ids (1, T), features (1, T, F)) -> logits (1, T, V_d), or these and the head's
    own hidden states (1, T, H).

    Row j is of token j, with the features of token j - 1 (zeros at position 0); its logits are of token j + 1. Where
    the head makes hidden states, those of row j stand in for the target's features of token j while it drafts on.

    draft_kind       "eagle", "eagle3", "medusa" or "mtp"
    target_features  the hidden states that it reads: octavo.compile(target, features=target_features)
    features_width   F
    max_model_len    positions that it knows
    target_ids       (V_d,) i64, the target's id of each of its tokens; None: it has the target's vocabulary
    """

    draft_kind: ClassVar[str] = ""
    target_ids: Tensor | None

    def __init__(
        self, target_features: Sequence[int], features_width: int, max_model_len: int,
        target_ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.target_features = tuple(target_features)
        self.features_width = features_width
        self.max_model_len = max_model_len
        self.register_buffer("target_ids", target_ids, persistent=False)

    @property
    def facts(self) -> dict[str, Any]:
        """What an artifact of it says in provenance["draft"]."""
        return {"kind": self.draft_kind, "target_features": list(self.target_features)}

    @property
    def model_info(self) -> dict[str, Any]:
        return {"name": f"{self.draft_kind} head", "max_model_len": self.max_model_len}


def draft_facts(model: nn.Module) -> dict[str, Any]:
    """provenance["draft"] of what a model's artifact drafts with; {}: it is no draft of its own kind."""
    facts = getattr(model, "facts", None)
    return dict(facts) if getattr(model, "draft_kind", "") and isinstance(facts, Mapping) else {}


def target_ids_file(model: nn.Module) -> dict[str, bytes]:
    """The file of an artifact that names the target's ids, where a head has a vocabulary of its own."""
    ids = getattr(model, "target_ids", None) if draft_facts(model) else None
    return {} if ids is None else {TARGET_IDS: json.dumps(ids.tolist()).encode()}


def embedding_of(target: nn.Module) -> nn.Embedding:
    """The target's table of tokens. Raises OptionError for a model that has no such module."""
    found: nn.Embedding = _part(target, "get_input_embeddings", nn.Embedding)
    return found


def logits_of(target: nn.Module) -> nn.Linear:
    """The target's last product, which makes its logits. Raises OptionError for a model that has no such module."""
    found: nn.Linear = _part(target, "get_output_embeddings", nn.Linear)
    return found


def _part(target: nn.Module, getter: str, kind: type[Any]) -> Any:
    find = getattr(target, getter, None)
    found = find() if callable(find) else None
    if not isinstance(found, kind):
        raise OptionError(
            f"draft head: expected a target with {getter}() -> {kind.__name__} (a model of Hugging Face), got "
            f"{type(target).__name__} with {type(found).__name__}"
        )
    return found


def chosen_rows(linear: nn.Linear, ids: Tensor | None) -> nn.Linear:
    """The product itself, or one of only these rows: the same logits for a part of the vocabulary."""
    if ids is None:
        return linear
    weight, bias = linear.weight, linear.bias
    chosen = nn.Linear(weight.shape[1], len(ids), bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        chosen.weight.copy_(weight[ids])
        if bias is not None:
            chosen.bias.copy_(bias[ids])
    return chosen


def check_ids(ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """Target ids as heads keep them. Raises OptionError for ids that are there twice or not in the vocabulary."""
    if ids is None:
        return None
    ids = ids.detach().long().cpu()
    is_sound = ids.dim() == 1 and len(ids) > 0 and len(ids.unique()) == len(ids)
    if not is_sound or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise OptionError(
            f"draft head: expected different ids below {vocab_size} as its vocabulary, got {tuple(ids.shape)}: "
            f"{ids.flatten()[:4].tolist()} ..."
        )
    return ids


def product_of_parts(linear: nn.Linear, parts: Sequence[Tensor]) -> Tensor:
    """linear(cat(parts)) without the joined value: a product of each part, added."""
    ends = accumulate(part.shape[-1] for part in parts)
    weights = [linear.weight[:, end - part.shape[-1] : end] for part, end in zip(parts, ends, strict=True)]
    total = nn.functional.linear(parts[0], weights[0], linear.bias)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total = total + nn.functional.linear(part, weight)
    return total
