"""Draft heads with random weights beside tiny targets, and steps that they and their targets run."""

from functools import cache
from typing import Any

import numpy as np
import torch
from models import llama
from numpy.typing import NDArray
from torch import Tensor, nn
from zoo import build

from octavo.compiler.capture import capture
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.eagle3 import Eagle3Head
from octavo.compiler.drafts.head import DraftHead
from octavo.compiler.drafts.medusa import MedusaHeads
from octavo.compiler.drafts.mtp import MtpHead
from octavo.compiler.graph_model import GraphModel
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import Settings, lower
from octavo.runtime.batch import Batch

KINDS = ("eagle", "eagle3", "medusa", "mtp")
IDS = torch.arange(1, 96, 3)  # a vocabulary of its own
PROMPTS = [[1, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6]]


@cache
def target_of(kind: str) -> Any:
    return build("deepseek_v3") if kind == "mtp" else llama(num_hidden_layers=7 if kind == "eagle3" else 2)


def head_of(kind: str) -> DraftHead:
    """Fresh; all weights that are not the target's are random."""
    target, head = target_of(kind), _fresh(kind)
    theirs = {id(p) for p in target.parameters()}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        if id(parameter) not in theirs and not name.startswith("lm_head"):
            base = 1.0 if parameter.dim() == 1 and name.endswith("norm.weight") else 0.0
            scale = 0.2 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.data = (base + scale * torch.randn(parameter.shape, generator=generator)).to(
                parameter.dtype
            )
    return head


def _fresh(kind: str) -> DraftHead:
    target = target_of(kind)
    if kind == "eagle":
        return EagleHead.for_target(target, IDS)
    if kind == "eagle3":
        return Eagle3Head.for_target(target, IDS)
    return MtpHead.for_target(target) if kind == "mtp" else MedusaHeads.for_target(target, 3, IDS, 2)


def step_of(head: DraftHead, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and features of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(head.parameters()).dtype
    features = torch.randn(1, length, head.features_width, generator=generator).to(dtype)
    return torch.randint(0, 96, (1, length), generator=generator), torch.arange(length)[None], features


def results(head: nn.Module, *step: Tensor) -> tuple[Tensor, ...]:
    """Logits and, where a head has them, hidden states."""
    with torch.no_grad():
        made = head(*step)
    return made if isinstance(made, tuple) else (made,)


def lowered_of(head: DraftHead) -> GraphModel:
    """The head's graph of kernels, run op by op."""
    lowered = lower(capture(head), CompileOptions(verify="off"), Settings(4, 48))
    return GraphModel(lowered.graph_module, 4)


def two_prompts(features: NDArray[Any] | None = None) -> Batch:
    """PROMPTS in one step: request 0 in page 3, request 1 in pages 1 and 2, four tokens a page."""
    return Batch(
        input_ids=np.array([*PROMPTS[0], *PROMPTS[1]], np.int64),
        positions=np.array([0, 1, 2, *range(8)], np.int64),
        slot_mapping=np.array([12, 13, 14, 4, 5, 6, 7, 8, 9, 10, 11], np.int64),
        page_table=np.array([[3, 0], [1, 2]], np.int32),
        seq_lens=np.array([3, 8], np.int32),
        cu_seqlens_q=np.array([0, 3, 11], np.int32),
        logit_rows=np.array([2, 10], np.int64),
        features=features,
    )
