"""A tiny model quantised, built and run: the host program's logits are those of the quantised graph run eagerly."""

import numpy as np
import pytest
import torch
from models import LONGEST, tiny
from stages import BF16, FP32

import octavo
from octavo.compiler.eager_runner import EagerRunner
from octavo.compiler.options import QuantConfig
from octavo.compiler.whole_model import _artifact_rows, _prompts

CONFIGS = (
    QuantConfig("nvfp4"),
    QuantConfig("nvfp4", activations="by_token"),
    QuantConfig("nvfp4_weight_only"),
    QuantConfig("fp8"),
)
# Largest difference of two logits relative to the largest: codes agree, so only roundings differ. Seen 6e-7 and 3e-3.
BOUND = {FP32: 1e-5, BF16: 2e-2}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.mode}-{c.activations}")
@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=pytest.mark.slow)], ids=str)
def test_host_program_equals_the_quantised_graph(config: QuantConfig, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    calibration = [torch.randint(0, 90, (40,), generator=generator).tolist() for _ in range(2)]
    compiled = octavo.compile(
        tiny("llama", dtype),
        page_size=4,
        max_model_len=LONGEST,
        quantize=config,
        calibration=calibration,
        verify="off",
    )
    prompts = _prompts(compiled.artifact)
    runners = (compiled.runner(num_pages=64), EagerRunner(compiled.artifact, 64))
    got, wanted = (
        np.stack(_artifact_rows(prompts, compiled.artifact.program, runner).logits) for runner in runners
    )
    assert np.abs(got - wanted).max() <= BOUND[dtype] * np.abs(wanted).max()
