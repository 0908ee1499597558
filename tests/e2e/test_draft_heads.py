"""Draft heads beside their target in an engine: they draft what the modules would, and change no answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import build

import octavo
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.eagle3 import Eagle3Head
from octavo.compiler.drafts.head import DraftHead
from octavo.compiler.drafts.medusa import MedusaHeads
from octavo.compiler.drafts.mtp import MtpHead
from octavo.compiler.errors import OptionError
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.draft import Draft
from octavo.runtime.speculative.options import Speculate
from octavo.runtime.speculative.proposer import Asked

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [16, 17, 18, 19, 20, 21]]
FEW = torch.arange(1, 128, 2)
HEADS: dict[str, tuple[str, Callable[[Any], DraftHead]]] = {
    "eagle": ("llama", lambda model: EagleHead.for_target(model)),
    "eagle, few tokens": ("llama", lambda model: EagleHead.for_target(model, FEW)),
    "eagle3": ("llama", lambda model: Eagle3Head.for_target(model, FEW)),
    "medusa": ("llama", lambda model: MedusaHeads.for_target(model, 3)),
    "mtp": ("deepseek_v3", lambda model: MtpHead.for_target(model)),
}


def drafts_of(module: DraftHead, target: Any, tokens: list[int], count: int) -> list[int]:
    """What the modules of torch draft behind these tokens, nothing remembered."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        states = target(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        before = torch.cat([states[index] for index in module.target_features], -1)[:, :-1]
        features = torch.cat([torch.zeros_like(before[:, :1]), before], 1)
        missing = module.features_width - features.shape[-1]
        features = torch.nn.functional.pad(features, (0, missing))
        drafted: list[int] = []
        if isinstance(module, MedusaHeads):
            rows = module(ids, torch.arange(len(tokens))[None], features)[0, -1].view(module.num_heads, -1)
            return [best(module, row) for row in rows[:count]]
        while len(drafted) < count:
            logits, own = module(ids, torch.arange(ids.shape[1])[None], features)
            drafted.append(best(module, logits[0, -1]))
            ids = torch.cat([ids, torch.tensor([[drafted[-1]]])], 1)
            own = (
                own[:, -1:]
                if not missing
                else torch.nn.functional.pad(own[:, -1:], (features.shape[-1] - missing, 0))
            )
            features = torch.cat([features, own], 1)
    return drafted


def best(module: DraftHead, row: torch.Tensor) -> int:
    index = int(row.argmax())
    return index if module.target_ids is None else int(module.target_ids[index])


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_what_its_module_does_and_changes_no_answer(name: str, tmp_path: Path) -> None:
    kind, make = HEADS[name]
    target = build(kind)
    torch.manual_seed(1)
    head = make(target)
    octavo.compile(target, output=tmp_path / "target", features=head.target_features, verify="off")
    octavo.compile(head, output=tmp_path / "head")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    plain = Engine.from_artifact(tmp_path / "target", use_tokenizer=False).generate(PROMPTS, params)
    speculate = Speculate("draft", tmp_path / "head", 3)
    engine = Engine.from_artifact(
        tmp_path / "target", use_tokenizer=False, speculate=speculate, max_batch_tokens=16
    )
    seen = watched(engine)
    assert engine.generate(PROMPTS, params) == plain
    assert len(seen) > 20
    for tokens, draft in seen[:: max(1, len(seen) // 12)]:
        assert list(draft.token_ids) == drafts_of(head, target, tokens, len(draft)), tokens


def watched(engine: Engine) -> list[tuple[list[int], Draft]]:
    """Every draft from now on, with the tokens that it follows."""
    assert engine.speculator is not None
    proposer = engine.speculator.proposer
    seen: list[tuple[list[int], Draft]] = []
    propose = proposer.propose

    def watch(asked: list[Asked]) -> list[Draft]:
        drafts = propose(asked)
        seen.extend((list(each.branch.tokens), draft) for each, draft in zip(asked, drafts, strict=True))
        return drafts

    proposer.propose = watch  # type: ignore[method-assign, assignment]
    return seen


def test_a_head_needs_a_target_that_makes_its_features(tmp_path: Path) -> None:
    target = build("llama")
    octavo.compile(target, output=tmp_path / "plain", verify="off")
    octavo.compile(target, output=tmp_path / "other", features=(0, -1), verify="off")
    octavo.compile(EagleHead.for_target(target), output=tmp_path / "head", verify="off")
    for name, got in (("plain", "makes none"), ("other", "makes fp32 of width 128")):
        with pytest.raises(OptionError, match=f"reads features .* of width 64, and the target {got}"):
            Engine.from_artifact(
                tmp_path / name, speculate=Speculate("draft", tmp_path / "head"), use_tokenizer=False
            )
