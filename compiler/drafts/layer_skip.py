"""The target without some of its layers, as a draft of itself: no other weights, the pages of the layers it keeps."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from octavo.compiler.errors import OptionError
from octavo.compiler.hidden_states import decoder_layers


def without_layers(model: nn.Module, skipped: Sequence[int]) -> nn.Module:
    """A model that shares all weights and runs no layer of these numbers. The model itself is not changed.

    Its artifact says which layers it keeps, as {"kind": "layer_skip", "layers": [...]}: keys and values of the i-th are
    those of the target's layer layers[i] as long as nothing is skipped in front of it, and near them behind.
    Raises OptionError for a number that is no layer's, or where none or all are skipped.
    """
    count = len(decoder_layers(model))
    kept = [number for number in range(count) if number not in set(skipped)]
    if not set(skipped) <= set(range(count)) or not 0 < len(kept) < count:
        raise OptionError(
            f"skip_layers: expected some of the layers 0 to {count - 1} of {type(model).__name__}, not all, got "
            f"{sorted(set(skipped))}"
        )
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    draft: Any = copy.deepcopy(model, shared)
    layers = decoder_layers(draft)
    for number in sorted(set(skipped), reverse=True):
        del layers[number]
    _tell_configuration(draft, kept, count)
    draft.draft_kind, draft.facts = "layer_skip", {"kind": "layer_skip", "layers": kept}
    made: nn.Module = draft
    return made


def _tell_configuration(draft: Any, kept: Sequence[int], count: int) -> None:
    """Hugging Face's models ask their configuration how many layers there are, and of what kind each is."""
    config = getattr(draft, "config", None)
    if config is None:
        return
    config = config.get_text_config()
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[number] for number in kept])
    config.num_hidden_layers = len(kept)
