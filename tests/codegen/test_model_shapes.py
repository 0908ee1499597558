"""Sets of kernels of whole models: complete, distinct, and of the precision that was asked for."""

import pytest

from octavo.codegen.model_shapes import PRECISIONS, SHAPES, kernel_set
from octavo.compiler.target import load_target


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("target", ["b200", "h100"])
def test_every_set_is_complete_and_distinct(name: str, precision: str, target: str) -> None:
    shape = SHAPES[name]
    specs = kernel_set(shape, precision, load_target(target), 64)
    names = [spec.name for spec in specs]
    assert len(names) == len(set(names)) and all(not spec.also for spec in specs)
    ops = {spec.op for spec in specs}
    attention = "paged_mla_attention" if shape.latent else "paged_attention"
    assert {"embedding", "gather_logits", attention, "argmax"} <= ops
    assert ("router" in ops) == (shape.mixture is not None)


def features(name: str, precision: str, target: str) -> set[str]:
    return {
        feature
        for spec in kernel_set(SHAPES[name], precision, load_target(target), 64)
        for feature in spec.features
    }


def test_precision_decides_the_tensor_core() -> None:
    for name in SHAPES:
        assert "mma_nvfp4" not in features(name, "bf16", "b200") | features(name, "fp8", "b200")
        assert "mma_fp8" in features(name, "fp8", "b200") & features(name, "fp8", "h100")
        assert "mma_nvfp4" in features(name, "nvfp4", "b200")
        assert "mma_nvfp4" not in features(name, "nvfp4", "h100")  # its weights alone are NVFP4
