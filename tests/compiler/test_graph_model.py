"""A graph of kernels as a model: the logits of the model it was made of, and how a rounding moves them."""

import torch
from stages import before, model_of, tokens

from octavo.compiler.capture import reference_logits
from octavo.compiler.graph_model import GraphModel


def logits(seed: int | None) -> torch.Tensor:
    ids = tokens(9)
    with torch.no_grad():
        result: torch.Tensor = GraphModel(before("", "llama"), 4, seed)(ids, torch.arange(9)[None])[0][0]
    return result


def test_it_computes_what_the_model_does() -> None:
    with torch.no_grad():
        expected = reference_logits(model_of("llama"), tokens(9))[0]
    torch.testing.assert_close(logits(None), expected, rtol=1e-4, atol=1e-4)


def test_products_move_by_a_rounding_in_the_way_of_the_seed() -> None:
    exact, first, second = logits(None), logits(1), logits(2)
    assert torch.equal(first, logits(1)) and not torch.equal(first, second)
    for moved in (first, second):
        error = (moved - exact).abs().max() / exact.abs().max()
        assert 2**-25 < error < 2**-17
