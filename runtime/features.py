"""Hidden states on their way from a target to its draft head: raw numbers, as numpy has no bf16."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.compiler.program import FEATURES, Program
from octavo.runtime.batch import Batch

HOLDERS: dict[str, type[np.generic]] = {"fp32": np.float32, "bf16": np.uint16}


def check_features(program: Program, batch: Batch) -> None:
    """Raise ExecutionError for a batch without the features that the program reads, or with others."""
    given = batch.features
    for buffer in program.of_kind("input"):
        if buffer.name != FEATURES:
            continue
        shape, dtype = (len(batch.input_ids), buffer.shape[1]), HOLDERS[buffer.dtype]
        if given is None or given.shape != shape or given.dtype != dtype or not given.flags.c_contiguous:
            got = "none" if given is None else f"{given.dtype} {given.shape}"
            raise ExecutionError(
                f"batch: the program is a draft head; expected contiguous features of its target, "
                f"{dtype.__name__} {shape}, got {got}"
            )


def joined(hidden_states: Sequence[NDArray[np.generic]]) -> NDArray[np.generic] | None:
    """Hidden states (T, width) of one step as its features (T, F), in their order; None where there are none."""
    if len(hidden_states) < 2:
        return hidden_states[0] if hidden_states else None
    return np.concatenate(hidden_states, axis=1)


def wide(features: NDArray[np.generic]) -> NDArray[np.float32]:
    """The numbers that raw features are."""
    if features.dtype != np.uint16:
        return features.astype(np.float32, copy=False)
    return (features.astype(np.uint32) << 16).view(np.float32)


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Numbers as raw features of a buffer's dtype; bf16 rounds to the nearest, of two to the even one."""
    if dtype == "fp32":
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
