"""Seconds of a step by its tokens on this machine's processor, for an artifact to bring along."""

import json
import statistics
import time
from typing import Any

import numpy as np

from octavo.compiler.artifact import STEP_TIMES, Artifact
from octavo.compiler.cost import step_dims
from octavo.compiler.host import host_features, usable_cores
from octavo.compiler.program import FEATURES
from octavo.compiler.progress import Report
from octavo.compiler.rewrite_artifact import files_of, write_anew
from octavo.compiler.step_cost import PROFILED_CONTEXT, PROFILED_TOKENS, step_times_table
from octavo.compiler.tune import step_inputs
from octavo.runtime.batch import Batch
from octavo.runtime.features import HOLDERS
from octavo.runtime.model_runner import NativeRunner

WARM_UP, REPEATS = 2, 7


def measure_steps(artifact: Artifact, progress: Report) -> dict[str, Any]:
    """The table of a cpu artifact for one rank: one request, each size's median of rounds that run all sizes."""
    longest = min(PROFILED_CONTEXT, artifact.model.max_model_len)
    num_pages = -(-longest // artifact.program.page_size)
    runner = NativeRunner(artifact, num_pages + 1)
    batches = [_batch(runner, artifact, tokens, longest, num_pages) for tokens in PROFILED_TOKENS]
    seconds: list[list[float]] = [[] for _ in batches]
    for turn in range(WARM_UP + REPEATS):
        progress("step times", turn, WARM_UP + REPEATS)
        for own, batch in zip(seconds, batches, strict=True):
            began = time.perf_counter()
            runner.run(batch)
            own.append(time.perf_counter() - began)
    medians = [statistics.median(own[WARM_UP:]) for own in seconds]
    return step_times_table(medians, f"measured on {host_features()}, {usable_cores()} cores")


def _batch(runner: NativeRunner, artifact: Artifact, tokens: int, context: int, num_pages: int) -> Batch:
    """The last tokens of a context; in a model of fewer, as many as there are."""
    count = min(tokens, context)
    arrays = step_inputs(step_dims(count, 1, count, context, num_pages), runner.page_size)
    groups = len(runner.page_windows) - 1
    windowed = ((arrays["page_table"], arrays["slot_mapping"]),) * groups
    features = None
    if read := [b for b in artifact.program.of_kind("input") if b.name == FEATURES]:
        features = np.zeros((count, int(read[0].shape[1])), HOLDERS[read[0].dtype])
    return Batch(**arrays, windowed=windowed, features=features)


def add_step_times(artifact: Artifact, table: dict[str, Any]) -> None:
    """Write the artifact anew, in its place, with the table."""
    text = json.dumps(table, indent=1, sort_keys=True) + "\n"
    write_anew(artifact, {**files_of(artifact), STEP_TIMES: text.encode()}, {"profiled": table["source"]})
