import torch
from draft_examples import make_examples, target

from octavo.compiler.draft_training.drafting import eagle_passes, pass_mask
from octavo.compiler.draft_training.examples import batches
from octavo.compiler.drafts.eagle import EagleHead


def test_passes_are_what_a_head_does_that_drafts() -> None:
    """Row by row, with the head's own forward: known rows read the target's states, drafted ones the head's own."""
    model = target()
    head = EagleHead.for_target(model, torch.arange(0, 60, 2))
    [batch] = batches(make_examples(model, [(2, 9)]), 9, 1, 0)
    with torch.no_grad():
        passes = eagle_passes(head, batch, 3)
        ids, positions, before = batch.token_ids, batch.position_ids, batch.before
        for row in range(2, 9):
            for start in range(max(row - 2, 1), row + 1):  # rows from `start` + 1 on were drafted
                given = before[:, : row + 1].clone()
                for drafted in range(start + 1, row + 1):
                    own = head(ids[:, :drafted], positions[:, :drafted], given[:, :drafted])[1]
                    given[:, drafted] = own[:, -1]
                logits, hidden = head(ids[:, : row + 1], positions[:, : row + 1], given)
                one = passes[row - start]
                torch.testing.assert_close(one.hidden[:, row], hidden[:, -1], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(one.logits[:, row], logits[:, -1], rtol=1e-4, atol=1e-4)


def test_the_first_pass_is_causal() -> None:
    assert pass_mask(1, 4).equal(torch.ones(4, 4, dtype=torch.bool).tril())
