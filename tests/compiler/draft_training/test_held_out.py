from itertools import pairwise

import pytest
import torch
from draft_examples import make_examples, target

from octavo.compiler.draft_training.examples import Example
from octavo.compiler.draft_training.held_out import Acceptance, measure
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.medusa import MedusaHeads


def drafted(head: EagleHead | MedusaHeads, example: Example, known: int, depth: int) -> list[int]:
    """Token ids that the head drafts behind the first `known` tokens, one step after another."""
    ids = example.token_ids[:known].clone()
    before = torch.cat([torch.zeros(1, example.features.shape[1]), example.features[: known - 1]])
    chosen: list[int] = []
    names = torch.arange(1000) if head.target_ids is None else head.target_ids
    if isinstance(head, MedusaHeads):
        logits = head(ids[None], torch.arange(known)[None], before[None])[0, -1]
        return names[logits.unflatten(0, (head.num_heads, -1)).argmax(-1)][:depth].tolist()
    for _ in range(depth):
        logits, hidden = head(ids[None], torch.arange(len(ids))[None], before[None])
        chosen.append(int(names[logits[0, -1].argmax()]))
        ids = torch.cat([ids, torch.tensor(chosen[-1:])])
        before = torch.cat([before, hidden[0, -1:]])
    return chosen


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_acceptance_is_counted_as_drafts_would_be(kind: str) -> None:
    model = target()
    ids = torch.arange(3, 40)
    head = EagleHead.for_target(model, ids) if kind == "eagle" else MedusaHeads.for_target(model, 3, ids)
    examples = []
    with torch.no_grad():
        for one in make_examples(model, [(3, 14), (5, 12)]):
            text = one.token_ids.clone()  # some of what the head guesses is right
            for place in range(one.prompt_len, len(text), 2):
                known = Example(text, one.features, one.prompt_len)
                guesses = drafted(head, known, place, 2)
                text[place : place + 2] = torch.tensor(guesses)[: len(text) - place]
            examples.append(Example(text, one.features, one.prompt_len))
        reached = [0, 0, 0, 0]
        for one in examples:
            for known_len in range(one.prompt_len, len(one.token_ids) - 2):
                right = drafted(head, one, known_len, 3)
                following = one.token_ids[known_len : known_len + 3].tolist()
                count = next((i for i in range(3) if right[i] != following[i]), 3)
                for depth in range(count + 1):
                    reached[depth] += 1
        found = measure(head, examples, 3, 14, 2)
    assert found.rows == reached[0]
    assert 0 < reached[2] < reached[0]
    assert found.rates == pytest.approx(
        [after / before if before else 0 for before, after in pairwise(reached)]
    )


def test_the_mean_counts_paths() -> None:
    assert Acceptance((0.5, 0.5, 0.0), 10).mean_accepted == 0.75
    assert Acceptance((), 0).mean_accepted == 0
