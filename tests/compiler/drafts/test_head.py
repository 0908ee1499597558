"""What heads have in common: graphs and programs compute what the modules do, and artifacts say what they are."""

import json
import re

import numpy as np
import pytest
import torch
from heads import IDS, KINDS, PROMPTS, head_of, lowered_of, results, step_of, target_of, two_prompts
from torch import nn

import octavo
from octavo.compiler.capture import capture, reference_outputs
from octavo.compiler.drafts.head import (
    TARGET_IDS,
    check_ids,
    chosen_rows,
    draft_facts,
    embedding_of,
    product_of_parts,
    target_ids_file,
)
from octavo.compiler.eager_runner import EagerRunner
from octavo.compiler.errors import CaptureError, ExecutionError, OptionError
from octavo.runtime.features import narrow, wide
from octavo.runtime.model_runner import NativeRunner


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_kernels_compute_what_the_module_does(kind: str) -> None:
    head = head_of(kind)
    step = step_of(head, 9)
    wanted = results(head, *step)
    got = results(lowered_of(head), *step)
    assert len(got) == len(wanted) == (1 if kind == "medusa" else 2)
    for own, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_its_token_and_features_and_on_those_before(kind: str) -> None:
    head = head_of(kind)
    ids, positions, features = step_of(head, 6)
    first = results(head, ids, positions, features)[0]
    changed = features.clone()
    changed[:, 3] += 1
    second = results(head, ids, positions, changed)[0]
    moved = _moved(first, second)
    assert moved == [False] * 3 + ([True, False, False] if kind == "medusa" else [True] * 3)
    others = ids.clone()
    others[:, 2] = (ids[:, 2] + 1) % 96
    moved = _moved(first, results(head, others, positions, features)[0])
    assert moved == ([False] * 6 if kind == "medusa" else [False] * 2 + [True] * 4)


def _moved(first: torch.Tensor, second: torch.Tensor) -> list[bool]:
    """Of each row, by more than products of other shapes round."""
    found: list[bool] = ((first - second).abs().amax(-1)[0] > 1e-3).tolist()
    return found


def test_a_program_reads_features_beside_tokens_of_a_step() -> None:
    """Its proof ran two steps, the second over pages of the first; here are both runners, and hidden states."""
    head = head_of("eagle")
    made = octavo.compile(head, page_size=4)
    given = [step_of(head, len(prompt), seed)[2] for seed, prompt in enumerate(PROMPTS)]
    wanted = [
        results(head, torch.tensor([ids]), torch.arange(len(ids))[None], features)
        for ids, features in zip(PROMPTS, given, strict=True)
    ]
    states = torch.cat([own[0] for _, own in wanted])
    for runner in (NativeRunner(made.artifact, 8), EagerRunner(made.artifact, 8)):
        logits = runner.run(two_prompts(torch.cat(given, 1)[0].numpy()))
        assert logits.shape == (2, len(IDS)) and runner.features is not None
        for row, (expected, _) in zip(logits, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(row), expected[0, -1], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(torch.from_numpy(wide(runner.features)), states, rtol=1e-4, atol=1e-4)


def test_artifacts_say_what_they_are_and_need() -> None:
    head = head_of("medusa")
    made = octavo.compile(head, page_size=4, dtype="bf16")
    facts = made.artifact.manifest["provenance"]["draft"]
    assert facts == {"kind": "medusa", "heads": 3, "target_features": [-1]} == draft_facts(head)
    assert json.loads(made.artifact.read(TARGET_IDS)) == IDS.tolist()
    assert made.artifact.model.max_model_len == 48
    runner = NativeRunner(made.artifact, 8)
    right = narrow(np.ones((11, 64), np.float32), "bf16")
    assert runner.run(two_prompts(right)).shape == (2, 3 * len(IDS))
    for wrong in (None, right[:5], right.astype(np.float32), np.asfortranarray(right)):
        with pytest.raises(
            ExecutionError, match=r"expected contiguous features of its target, uint16 \(11, 64\)"
        ):
            runner.run(two_prompts(wrong))


def test_heads_of_the_whole_vocabulary_name_no_ids() -> None:
    assert target_ids_file(head_of("mtp")) == {}
    assert draft_facts(target_of("eagle")) == draft_facts(nn.Linear(2, 2)) == {}


class Unsaid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.inner(features)  # type: ignore[no-any-return]


def test_a_head_has_to_say_how_wide_its_features_are() -> None:
    with pytest.raises(CaptureError, match="give it an attribute features_width"):
        capture(Unsaid())


def test_a_head_makes_its_own_hidden_states() -> None:
    head = head_of("medusa")
    with pytest.raises(CaptureError, match="MedusaHeads reads features itself"):
        reference_outputs(head, *step_of(head, 4)[::2], features=(-1,))


@pytest.mark.parametrize("ids", [[], [3, 3], [-1, 4], [4, 96], [[1, 2]]])
def test_ids_that_are_no_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(OptionError, match="expected different ids below 96 as its vocabulary"):
        check_ids(torch.tensor(ids), 96)


def test_rows_of_the_last_product() -> None:
    linear, x = nn.Linear(5, 7), torch.randn(2, 5)
    ids = torch.tensor([6, 0, 3])
    torch.testing.assert_close(chosen_rows(linear, ids)(x), linear(x)[:, ids])
    assert chosen_rows(linear, None) is linear


def test_a_product_of_parts_is_that_of_the_joined() -> None:
    linear = nn.Linear(9, 4)
    parts = torch.randn(3, 2), torch.randn(3, 4), torch.randn(3, 3)
    torch.testing.assert_close(product_of_parts(linear, parts), linear(torch.cat(parts, -1)))


def test_a_target_without_such_modules_is_refused() -> None:
    with pytest.raises(OptionError, match=re.escape("a target with get_input_embeddings() -> Embedding")):
        embedding_of(nn.Linear(2, 2))
    assert embedding_of(target_of("eagle")).num_embeddings == 96
