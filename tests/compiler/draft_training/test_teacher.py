import torch
from draft_examples import target

from octavo.compiler.draft_training.teacher import hidden_states


def test_hidden_states_make_the_logits() -> None:
    model = target()
    ids = [5, 9, 33, 2, 7]
    states = hidden_states(model, ids)
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(states), model(torch.tensor([ids])).logits[0])
