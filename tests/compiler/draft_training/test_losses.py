import pytest
import torch
from draft_examples import make_examples, target

from octavo.compiler.draft_training.examples import batches
from octavo.compiler.draft_training.losses import DEPTH_DECAY, FEATURE_WEIGHT, eagle_loss, medusa_loss
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.medusa import MedusaHeads


def test_eagle_compares_distributions_and_hidden_states_of_answers() -> None:
    model = target()
    head = EagleHead.for_target(model, torch.arange(0, 200, 3))
    [batch] = batches(make_examples(model, [(3, 8)]), 8, 1, 0)
    with torch.no_grad():
        logits, hidden = head(batch.token_ids, batch.position_ids, batch.before)
        wanted = model.lm_head(batch.features)[..., ::3][..., : logits.shape[-1]].double().softmax(-1)
        rows = [2, 3, 4, 5, 6]
        entropy = sum(-(wanted[0, r] * logits[0, r].double().log_softmax(-1)).sum() for r in rows) / 5
        spread = batch.features[0, rows].std()
        gap = ((hidden - batch.features)[0, rows] / spread).abs()
        distance = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
        expected = float(entropy + FEATURE_WEIGHT * distance)
    assert float(eagle_loss(head, batch, 1)) == pytest.approx(expected, rel=1e-4)
    loss = eagle_loss(head, batch, 3)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in head.trained_parameters().values())


def test_medusa_asks_each_head_for_its_token() -> None:
    model = target()
    ids = torch.arange(0, 259, 2)
    heads = MedusaHeads.for_target(model, 2, ids)
    [batch] = batches(make_examples(model, [(3, 8)]), 8, 1, 0)
    places = torch.full((259,), -1)
    places[ids] = torch.arange(len(ids))
    with torch.no_grad():
        logits = heads(batch.token_ids, batch.position_ids, batch.before)[0].unflatten(-1, (2, -1)).double()
        text = batch.token_ids[0].tolist()
        means = []
        for head in range(2):
            rows = [r for r in range(8) if 3 <= r + 1 + head < 8 and text[r + 1 + head] % 2 == 0]
            means.append(
                sum(-logits[r, head].log_softmax(-1)[text[r + 1 + head] // 2] for r in rows) / len(rows)
            )
        expected = float((means[0] + DEPTH_DECAY * means[1]) / (1 + DEPTH_DECAY))
    assert float(medusa_loss(heads, batch, places)) == pytest.approx(expected, rel=1e-4)
