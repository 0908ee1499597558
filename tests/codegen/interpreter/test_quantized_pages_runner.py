"""A model with pages of FP8 and NVFP4 compiled for a B200 and served by CudaRunner, beside the eager references."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import POISON, caches_of
from interpreted_cuda import InterpretingDriver
from paged_model import paged_artifact

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.kernel import Kernel, KernelSpec
from octavo.compiler.artifact import Artifact
from octavo.compiler.eager_runner import EagerRunner
from octavo.compiler.target import Target
from octavo.runtime.batch import Batch
from octavo.runtime.cuda_runner import CudaRunner

PAGE_SIZE, NUM_PAGES, LENGTHS = 16, 8, (21, 9)


def build_one_form(specs: Sequence[KernelSpec], target: Target, progress: Any) -> list[Kernel]:
    return build_kernels([replace(spec, candidates=()) for spec in specs], target, progress)


@pytest.fixture(scope="module", params=["fp8", "nvfp4"])
def artifact(request: pytest.FixtureRequest) -> Iterator[Artifact]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.compiler.build.build_kernels", build_one_form)
        yield paged_artifact(request.param, "b200", torch.bfloat16, PAGE_SIZE)


def step(starts: Sequence[int], ends: Sequence[int]) -> Batch:
    """Tokens starts..ends - 1 of two requests, in pages 5, 2 and 7, 1."""
    table = np.array([[5, 2], [7, 1]], np.int32)
    places = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    slots = [row[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for row, p in zip(table, places, strict=True)]
    new = np.cumsum([0, *map(len, places)])
    positions = np.concatenate(places)
    return Batch(
        input_ids=(positions * 31 + 5) % 96, positions=positions, slot_mapping=np.concatenate(slots).astype(np.int64),
        page_table=table, seq_lens=np.array(ends, np.int32), cu_seqlens_q=new.astype(np.int32),
        logit_rows=(new[1:] - 1).astype(np.int64),
    )  # fmt: skip


def test_logits_and_pages_are_the_eager_references(artifact: Artifact) -> None:
    """A prompt each, then a token each through CUDA graphs, over pages of garbage."""
    driver = InterpretingDriver(artifact)
    runner, eager = (
        CudaRunner(artifact, NUM_PAGES, driver=driver, max_requests=2),
        EagerRunner(artifact, NUM_PAGES),
    )
    caches = caches_of(runner, driver)
    for cache in caches.values():
        cache[1:] = POISON
    for starts, ends in (((0, 0), LENGTHS), (LENGTHS, [n + 1 for n in LENGTHS])):
        batch = step(starts, ends)
        found, expected = runner.run(batch).copy(), eager.run(batch)
        # A key or value near a tie may round to the other side, and bf16 rounds in other places.
        assert np.abs(found - expected).max() <= 0.15 * np.abs(expected).max()
    assert driver.num_graph_launches == 1
    written = np.concatenate([step((0, 0), [n + 1 for n in LENGTHS]).slot_mapping])
    for name, cache in caches.items():
        rows = cache.reshape(NUM_PAGES, 2, PAGE_SIZE, -1)
        own = eager.caches[name].view(torch.uint8).numpy().reshape(rows.shape)
        at = rows[written // PAGE_SIZE, :, written % PAGE_SIZE]
        same = at == own[written // PAGE_SIZE, :, written % PAGE_SIZE]
        # The first layer's keys differ by nothing but what the product before them rounds.
        assert same.mean() >= (0.9 if name.endswith("_0") else 0.6)
        others = np.setdiff1d(np.arange(PAGE_SIZE, NUM_PAGES * PAGE_SIZE), written)
        assert (rows[others // PAGE_SIZE, :, others % PAGE_SIZE] == POISON).all()
