"""Going on from a dump between the steps that quantise: the same artifact, and what stands in the way is said."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import VOCAB, tiny

import octavo
from octavo.compiler.commands.inspect import show_artifact
from octavo.compiler.compiled import Compiled
from octavo.compiler.errors import IllegalGraphError, OptionError
from octavo.compiler.options import QuantConfig
from octavo.compiler.resume import resume
from octavo.compiler.types import part_from_text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compiled, Path]:
    folder = tmp_path_factory.mktemp("quantized") / "dump"
    generator = torch.Generator().manual_seed(4)
    text = [torch.randint(0, VOCAB, (40,), generator=generator).tolist() for _ in range(3)]
    config = QuantConfig("nvfp4", kv="fp8", weights="nearest")
    return octavo.compile(
        tiny("llama"), quantize=config, calibration=text, page_size=4, max_model_len=48, dump=folder
    ), folder


@pytest.mark.parametrize("name", ["26_fuse_add_norm", "33_quantize_linear", "36_fuse_norm_quantize"])
def test_the_artifact_is_that_of_an_uninterrupted_compile(name: str, whole: tuple[Compiled, Path]) -> None:
    expected, folder = whole
    got = resume(folder / f"{name}.py").artifact
    for file in ("program.json", "types.json", "weights.safetensors"):
        assert got.read(file) == expected.artifact.read(file)
    assert got.manifest["provenance"]["resumed_from"] == f"{name}.py"


def test_the_artifact_says_what_its_weights_hold(whole: tuple[Compiled, Path]) -> None:
    artifact = whole[0].artifact
    types = {name: part_from_text(text) for name, text in artifact.types().items()}
    codes = [part for part in types.values() if part.role == "codes"]
    assert len(codes) == 8 and {part.type.shape[-1] for part in codes} == {64, 96}
    assert set(types) <= set(artifact.weights)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("None, 'fp32', 'linear')", "None, 'fp32', 'swizzled_128x4')"),
         r"reads swizzled_128x4 scales, got x_scale linear.*33_quantize_linear\.py:\d+"),
        ((" linear axis", " swizzled_128x4 axis"), "must belong to weight|reads linear scales"),
    ],
)  # fmt: skip
def test_an_edit_that_mixes_types_is_refused(
    change: tuple[str, str], said: str, whole: tuple[Compiled, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[1], tmp_path / "dump")
    path = folder / "33_quantize_linear.py"
    lines = path.read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if change[0] in line)
    lines[place] = lines[place].replace(*change)
    path.write_text("".join(lines))
    with pytest.raises(IllegalGraphError, match=said):
        resume(path)


def test_a_plan_that_is_missing_and_another_family_are_refused(
    whole: tuple[Compiled, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[1], tmp_path / "dump")
    with pytest.raises(
        OptionError, match="holds block scales as cpu reads them, got target b200; go on from"
    ):
        resume(folder / "33_quantize_linear.py", "b200")
    (folder / "precision.json").unlink()
    with pytest.raises(OptionError, match=r"expected .*precision\.json, the plan of a quantised graph"):
        resume(folder / "33_quantize_linear.py")


def test_a_target_without_the_tensor_cores_is_refused(whole: tuple[Compiled, Path]) -> None:
    with pytest.raises(OptionError, match="got 'nvfp4': sm_90 has no NVFP4 tensor core"):
        resume(whole[1] / "26_fuse_add_norm.py", "h100")


def test_inspect_counts_the_types_of_weights(
    whole: tuple[Compiled, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = whole[0].artifact.path
    show_artifact(path, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["types"] == {"nvfp4 octavo-v1 max 448 linear axis -1 by tensor": 8}
    assert facts["weight_types"] == whole[0].artifact.types()
    show_artifact(path, as_json=False)
    assert "nvfp4 octavo-v1 max 448 linear axis -1 by tensor 8" in " ".join(capsys.readouterr().out.split())
