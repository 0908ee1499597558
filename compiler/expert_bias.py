"""DeepSeek's balance without an auxiliary loss: the bias of a router's selection, moved until experts get equal loads.

After each batch, b_e += speed * sign(mean load - load_e), where load_e counts the tokens that chose expert e (Wang et
al., arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). A tool for calibration: the result is
a constant of the model, and nothing moves it while the model serves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.compiler.errors import OptionError
from octavo.compiler.ops.moe import router


@dataclass(frozen=True)
class Selection:
    """How a router selects, as octavo.router has it."""

    top_k: int
    scoring: str = "sigmoid"
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "top2_sum"

    def loads(self, logits: Tensor, bias: Tensor) -> Tensor:
        """(E,) tokens of (T, E) logits that choose each expert, int64."""
        groups = (self.num_groups, self.top_groups, self.group_score)
        _, experts = router(logits[None], bias, self.top_k, self.scoring, False, *groups, 1.0)
        return torch.bincount(experts.flatten(), minlength=logits.shape[-1])


@dataclass(frozen=True)
class Balanced:
    """bias (E,) fp32; loads (rounds, E) int64: of each round's tokens, by the bias in front of it."""

    bias: Tensor
    loads: Tensor


def balance_bias(
    logits: Tensor, selection: Selection, bias: Tensor | None = None, speed: float = 0.001, rounds: int = 1000,
    batch: int | None = None,
) -> Balanced:  # fmt: skip
    """Move a bias for `rounds` batches of tokens.

    logits  (T, E) of calibration tokens; they stay as they are, as routers of other layers do not move with this one
    bias    (E,) to start from; None: zeros
    speed   of the scores' unit: 0.001 for sigmoids
    batch   tokens of a round, one batch after another and from the start again; None: all
    Raises OptionError without tokens.
    """
    if not len(logits):
        raise OptionError("balance_bias: expected logits of calibration tokens, got none")
    moved = torch.zeros(logits.shape[-1]) if bias is None else bias.float().clone()
    size = min(batch or len(logits), len(logits))
    history = []
    for i in range(rounds):
        start = i * size % (len(logits) - size + 1)
        counts = selection.loads(logits[start : start + size], moved)
        history.append(counts)
        wide = counts.double()
        moved += speed * (wide.mean() - wide).sign().float()
    return Balanced(
        moved, torch.stack(history) if history else logits.new_zeros(0, len(moved), dtype=torch.int64)
    )
