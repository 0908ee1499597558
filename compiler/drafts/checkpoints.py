"""Draft heads in the files that they are published in, and back.

EAGLE-1   embed_tokens, fc, layers.0.*; the last product is the target's
EAGLE-3   fc, midlayer.*, norm, lm_head, d2t (target id = d + d2t[d]), t2d (which of the target's tokens it knows)
Medusa    {head}.{block}.linear.*, and {head}.{blocks}.weight
MTP       model.layers.{layers of the target}.*, beside the target's own weights

EAGLE-1 and Medusa heads with a vocabulary of their own have d2t and t2d too, which nobody else writes. The names are
those of the authors' code; no published file was at hand to read.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from octavo.compiler.checkpoints.shards import INDEX, SINGLE, Shards, read_json
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.eagle3 import Eagle3Head, default_features
from octavo.compiler.drafts.head import DraftHead, check_ids, chosen_rows, embedding_of, logits_of
from octavo.compiler.drafts.medusa import MedusaHeads
from octavo.compiler.drafts.mtp import MtpHead
from octavo.compiler.errors import CheckpointError

CONFIG = "config.json"
MEDUSA_FILE = "medusa_lm_head.safetensors"
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
# What files hold beside weights: angles that are computed anew.
IGNORED = re.compile(r".*rotary_emb\.inv_freq")
VOCABULARY = ("d2t", "t2d")


def load_draft_head(path: Path | str, target: nn.Module) -> DraftHead:
    """The head in a directory, of the kind that its tensors show, with the target's table and last product.

    Weights get the target's dtype. Raises CheckpointError, which names the tensors that are missing or have no place.
    """
    directory = Path(path)
    tensors, config = _tensors(directory), _config(directory)
    for kind, (shows, read) in _READERS.items():
        if any(re.fullmatch(shows, name) for name in tensors):
            head = read(tensors, config, target, f"{directory} ({kind})")
            return head.to(device=logits_of(target).weight.device).eval()
    known = "; ".join(f"{kind}: {shows}" for kind, (shows, _) in _READERS.items())
    raise CheckpointError(
        f"{directory}: expected the tensors of a draft head ({known}), got {', '.join(sorted(tensors)[:4])}, ..."
    )


def save_draft_head(head: DraftHead, path: Path | str) -> Path:
    """Write a head into a directory, as it is published; returns the directory."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors, config = _WRITERS[type(head)](head)
    if head.target_ids is not None:
        tensors |= _vocabulary(head.target_ids, config["vocab_size"])
    file = MEDUSA_FILE if isinstance(head, MedusaHeads) else SINGLE
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, directory / file)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return directory


def _vocabulary(target_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[target_ids] = True
    return {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": known}


def _tensors(directory: Path) -> Mapping[str, Tensor]:
    """Of the first file that is there; pickled ones are read as tensors only, which runs no code."""
    if (directory / SINGLE).is_file() or (directory / INDEX).is_file():
        return Shards(directory)
    if (directory / MEDUSA_FILE).is_file():
        return Shards(directory, MEDUSA_FILE)
    for name in PICKLED:
        if (directory / name).is_file():
            try:
                found = torch.load(directory / name, map_location="cpu", weights_only=True)
            except Exception as error:  # every kind: a pickle may hold anything
                raise CheckpointError(f"{directory / name}: expected tensors by name, got {error}") from None
            return {str(key): value for key, value in found.items() if isinstance(value, Tensor)}
    expected = ", ".join((SINGLE, INDEX, MEDUSA_FILE, *PICKLED))
    raise CheckpointError(f"{directory}: expected a draft head in one of {expected}, got none")


def _config(directory: Path) -> dict[str, Any]:
    return read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}


def _ids(tensors: Mapping[str, Tensor], vocab_size: int, where: str) -> Tensor | None:
    """The target's ids of a head's tokens."""
    if "d2t" not in tensors:
        return None
    offsets = tensors["d2t"].long()
    ids = check_ids(torch.arange(len(offsets)) + offsets, vocab_size)
    assert ids is not None
    if "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero()[:, 0], ids.sort().values):
        raise CheckpointError(f"{where}: expected t2d to name the tokens that d2t leads to, got others")
    return ids


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], where: str, others: tuple[str, ...] = ()) -> None:
    """Copy tensors into a module with the names of the file. others: names that are read elsewhere."""
    state = module.state_dict()
    missing = sorted(state.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{where}: expected the tensors {', '.join(missing)}, got none of these names")
    left = [n for n in sorted(tensors) if n not in state and n not in others and not IGNORED.fullmatch(n)]
    if left:
        raise CheckpointError(
            f"{where}: {', '.join(left[:6])} have no place in the head made of it, which would compute something else"
        )
    for name, value in state.items():
        if tensors[name].shape != value.shape:
            raise CheckpointError(
                f"{where}: expected {name} of shape {tuple(value.shape)}, got {tuple(tensors[name].shape)}; the head "
                "is of another target"
            )
        value.copy_(tensors[name])


def _llama(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any, attention: str
) -> LlamaConfig:
    """The layers' sizes; positions are the target's."""
    made = LlamaConfig.from_dict(dict(config))
    made.max_position_embeddings = target.config.get_text_config().max_position_embeddings
    made.attention_bias = f"{attention}.q_proj.bias" in tensors
    return made


def _with_biases(tensors: Mapping[str, Tensor], attention: str) -> dict[str, Tensor]:
    """Llama's products have all a bias or none: where queries have one and the last has none, it gets zeros."""
    found = dict(tensors)
    if f"{attention}.q_proj.bias" in found and f"{attention}.o_proj.bias" not in found:
        weight = found[f"{attention}.o_proj.weight"]
        found[f"{attention}.o_proj.bias"] = torch.zeros(weight.shape[0], dtype=weight.dtype)
    return found


def _table(tensors: Mapping[str, Tensor], target: nn.Module) -> nn.Embedding:
    """The checkpoint's own, in the target's dtype, or the target's."""
    if "embed_tokens.weight" not in tensors:
        return embedding_of(target)
    rows = tensors["embed_tokens.weight"].to(logits_of(target).weight.dtype)
    table: nn.Embedding = nn.Embedding.from_pretrained(rows)
    return table


def _read_eagle(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: nn.Module, where: str
) -> DraftHead:
    attention = "layers.0.self_attn"
    last = logits_of(target)
    ids = _ids(tensors, last.out_features, where)
    sizes = _llama(config, tensors, target, attention)
    head = EagleHead(sizes, _table(tensors, target), chosen_rows(last, ids), ids, bias="fc.bias" in tensors)
    own = nn.ModuleDict({"fc": head.fc, "layers": head.layers}).to(last.weight.dtype)
    with torch.no_grad():
        _fill(own, _with_biases(tensors, attention), where, others=("embed_tokens.weight", *VOCABULARY))
    return head


def _read_eagle3(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: nn.Module, where: str
) -> DraftHead:
    attention = "midlayer.self_attn"
    last = logits_of(target)
    ids = _ids(tensors, last.out_features, where)
    sizes = _llama(config, tensors, target, attention)
    width = embedding_of(target).embedding_dim
    count = len(ids) if ids is not None else last.out_features
    lm_head = nn.Linear(sizes.hidden_size, count, bias=False)
    features = config.get("eagle_aux_hidden_state_layer_ids") or default_features(target)
    head = Eagle3Head(sizes, _table(tensors, target), lm_head, features, width, ids)
    names = ("fc", "midlayer", "norm", "lm_head")
    own = nn.ModuleDict({name: getattr(head, name) for name in names}).to(last.weight.dtype)
    with torch.no_grad():
        _fill(own, _with_biases(tensors, attention), where, others=("embed_tokens.weight", *VOCABULARY))
    return head


def _read_medusa(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: nn.Module, where: str
) -> DraftHead:
    last = logits_of(target)
    ids = _ids(tensors, last.out_features, where)
    places = [found for name in tensors if (found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight", name))]
    num_heads, num_blocks = (1 + max(int(place[group]) for place in places) for group in (1, 2))
    head = MedusaHeads.for_target(target, num_heads, ids, num_blocks)
    apart = nn.Module()
    for name, value in _medusa_tensors(head).items():
        _hold(apart, name, value)
    with torch.no_grad():
        _fill(apart, tensors, where, others=VOCABULARY)
    return head


def _read_mtp(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: nn.Module, where: str
) -> DraftHead:
    head = MtpHead.for_target(target)
    prefix = f"model.layers.{head.layer_number}."
    found = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
    if any(name.endswith("weight_scale_inv") for name in found):
        raise CheckpointError(
            f"{where}: expected plain weights, got FP8 with scales of blocks (weight_scale_inv); convert them first"
        )
    shared = ("embed_tokens.weight", "shared_head.head.weight")
    found = {name: value for name, value in found.items() if name not in shared}
    apart = nn.Module()
    for name, value in _mtp_tensors(head).items():
        _hold(apart, name, value)
    with torch.no_grad():
        _fill(apart, found, where)
    return head


def _hold(root: nn.Module, name: str, value: Tensor) -> None:
    """A view of a head's weight under its name in files, so that what is copied into one is in the other."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_buffer(leaf, value)


def _medusa_tensors(head: MedusaHeads) -> dict[str, Tensor]:
    """Views of the stacked weights, a head and a block each."""
    found: dict[str, Tensor] = {}
    for number in range(head.num_heads):
        for block, (weight, bias) in enumerate(zip(head.blocks, head.biases, strict=True)):
            found[f"{number}.{block}.linear.weight"] = weight.detach()[number]
            found[f"{number}.{block}.linear.bias"] = bias.detach()[number]
        found[f"{number}.{len(head.blocks)}.weight"] = head.vocab.detach()[number]
    return found


def _mtp_tensors(head: MtpHead) -> dict[str, Tensor]:
    """Views by the names in files, without the layer's number; experts each by itself."""
    found: dict[str, Tensor] = {}
    for name in ("enorm", "hnorm", "eh_proj"):
        found[f"{name}.weight"] = getattr(head, name).weight.detach()
    found["shared_head.norm.weight"] = head.shared_head.norm.weight.detach()  # type: ignore[operator]
    for name, value in head.layer.state_dict().items():
        if not name.startswith("mlp.experts."):
            found[name] = value
        elif name.endswith("gate_up_proj"):
            for expert, rows in enumerate(value):
                for part, half in zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True):
                    found[f"mlp.experts.{expert}.{part}.weight"] = half
        else:
            found |= {f"mlp.experts.{expert}.down_proj.weight": rows for expert, rows in enumerate(value)}
    return found


def _write_eagle(head: DraftHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    assert isinstance(head, EagleHead)
    tensors: dict[str, Tensor] = dict(head.trained_parameters())
    tensors["embed_tokens.weight"] = head.embed_tokens.weight
    config = head.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle"]}
    return tensors, config | {"bias": head.fc.bias is not None, "draft_kind": head.draft_kind}


def _write_eagle3(head: DraftHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    assert isinstance(head, Eagle3Head)
    tensors = {n: p for n, p in head.state_dict().items() if not n.startswith("embed_tokens.")}
    config = head.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"]}
    more = {
        "draft_vocab_size": head.lm_head.out_features,
        "eagle_aux_hidden_state_layer_ids": list(head.target_features), "draft_kind": head.draft_kind,
    }  # fmt: skip
    return tensors, config | more


def _write_medusa(head: DraftHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    assert isinstance(head, MedusaHeads)
    config = {
        "draft_kind": head.draft_kind, "medusa_num_heads": head.num_heads, "medusa_num_layers": len(head.blocks),
        "hidden_size": head.features_width, "vocab_size": head.target_vocab_size,
    }  # fmt: skip
    return _medusa_tensors(head), config


def _write_mtp(head: DraftHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    assert isinstance(head, MtpHead)
    prefix = f"model.layers.{head.layer_number}."
    config = {**head.config.to_dict(), "num_nextn_predict_layers": 1, "draft_kind": head.draft_kind}
    return {prefix + name: value for name, value in _mtp_tensors(head).items()}, config


_Reader = Callable[[Mapping[str, Tensor], Mapping[str, Any], nn.Module, str], DraftHead]
_READERS: dict[str, tuple[str, _Reader]] = {
    "mtp": (r"model\.layers\.\d+\.eh_proj\.weight", _read_mtp),
    "eagle3": (r"midlayer\.self_attn\.q_proj\.weight", _read_eagle3),
    "eagle": (r"fc\.weight", _read_eagle),
    "medusa": (r"\d+\.\d+\.linear\.weight", _read_medusa),
}
_WRITERS: dict[type[DraftHead], Callable[[DraftHead], tuple[dict[str, Tensor], dict[str, Any]]]] = {
    EagleHead: _write_eagle, Eagle3Head: _write_eagle3, MedusaHeads: _write_medusa, MtpHead: _write_mtp,
}  # fmt: skip
