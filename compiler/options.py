"""What a user may choose when compiling. Frozen, hashable, recorded in the artifact."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verify = Literal["off", "sites", "full"]
DType = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class CompileOptions:
    """Options of `octavo.compile`.

    target          name of a file in compiler/targets ("cpu", "b200", ...)
    dtype           weights and activations; None keeps the model's on cpu and takes bf16 on GPUs
    page_size       tokens per KV page; None takes the target's default
    max_model_len   longest sequence in tokens; None takes the model's
    max_batch_tokens  most tokens in one step (the T of every kernel)
    verify          "sites": every rewrite site is proven; "full": whole-model logits too; "off": neither
    dump            directory for the numbered graph dumps, or None
    """

    target: str = "cpu"
    dtype: DType | None = None
    page_size: int | None = None
    max_model_len: int | None = None
    max_batch_tokens: int = 2048
    verify: Verify = "full"
    dump: Path | None = None
