"""`octavo.resume`: from any graph of a dump to the same artifact; edits go through, or are refused with their line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from heads import head_of
from models import LONGEST, tiny
from stages import SETTINGS, captured, tokens
from tiny_llama import build_tokenizer
from zoo import ARCHITECTURES_AND_MIXTURES

import octavo
from octavo.compiler.capture import reference_logits
from octavo.compiler.compiled import Compiled
from octavo.compiler.drafts.head import TARGET_IDS
from octavo.compiler.dump import print_graph
from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.dump_load import load_graph
from octavo.compiler.dump_summary import read_summary
from octavo.compiler.dump_weights import DumpedWeights, save_weights
from octavo.compiler.errors import ArtifactError, IllegalGraphError, OptionError, PassError
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import lower, lower_from
from octavo.passes.rewrite import held

BINDING = ("program.json", "weights.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compiled, Path]:
    """A compilation without interruption, and its dump."""
    directory = tmp_path_factory.mktemp("whole") / "dump"
    options: dict[str, Any] = {"page_size": 4, "max_model_len": LONGEST, "max_batch_tokens": 64}
    compiled = octavo.compile(
        tiny("llama"), tokenizer=build_tokenizer(), dump=directory, verify="sites", **options
    )
    return compiled, directory


@pytest.fixture
def dump(whole: tuple[Compiled, Path], tmp_path: Path) -> Path:
    """A copy of the dump to do with as one likes."""
    return Path(shutil.copytree(whole[1], tmp_path / "dump"))


def edited(dump: Path, step: str, change: Callable[[str], str]) -> Path:
    (path,) = dump.glob(f"??_{step}.py")
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    return path


def bound_files(compiled: Compiled) -> list[str]:
    return [compiled.artifact.files[name].sha256 for name in BINDING]


@pytest.mark.parametrize(
    "step", ["capture", "canonicalize", "fuse_gated_mlp", "insert_paged_kv", "fold_constants"]
)
def test_the_artifact_is_that_of_an_uninterrupted_compile(step: str, whole: tuple[Compiled, Path]) -> None:
    compiled, directory = whole
    (path,) = directory.glob(f"??_{step}.py")
    resumed = octavo.resume(path)
    assert bound_files(resumed) == bound_files(compiled)
    assert resumed.artifact.model == compiled.artifact.model
    assert resumed.artifact.manifest["options"] == {**compiled.artifact.manifest["options"], "verify": "full"}
    assert resumed.artifact.manifest["provenance"]["resumed_from"] == path.name
    assert resumed.artifact.manifest["provenance"]["edited"] is False
    assert resumed.tokenizer is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES_AND_MIXTURES)
def test_every_architecture_lowers_to_the_same_graph_and_weights_from_every_file(
    name: str, tmp_path: Path
) -> None:
    """Program and weights are made of these alone."""
    options = CompileOptions(verify="off")
    dumps = DumpWriter(tmp_path, facts={"target": "cpu", "model": {"name": name}})
    expected = lower(captured(name), options, SETTINGS, dumps=dumps).graph_module
    dumps.write_summary([])
    summary = read_summary(tmp_path)
    assert summary["weights"] is not None
    for path in sorted(tmp_path.glob("*.py")):
        weights = DumpedWeights(tmp_path, summary["weights"])
        start = load_graph(path.read_text(), weights, str(path))
        found = lower_from(start, int(path.name[:2]), options, SETTINGS).graph_module
        assert print_graph(found) == print_graph(expected), path.name
        for node in found.graph.find_nodes(op="get_attr"):
            mine, other = held(found, node.target), held(expected, node.target)
            assert torch.equal(mine, other) and mine.stride() == other.stride(), (path.name, node.target)


def test_dumping_changes_nothing(whole: tuple[Compiled, Path]) -> None:
    plain = octavo.compile(
        tiny("llama"), page_size=4, max_model_len=LONGEST, max_batch_tokens=64, verify="off"
    )
    assert bound_files(plain) == bound_files(whole[0])


def test_an_edit_goes_through_the_rest(dump: Path, tmp_path: Path) -> None:
    """Another eps in every norm: the artifact is that of a model which has it."""
    path = edited(dump, "fuse_rms_norm", lambda text: text.replace(", 1e-06)", ", 0.5)"))
    resumed = octavo.resume(path, dump=tmp_path / "again")
    assert resumed.artifact.manifest["provenance"]["edited"] is True
    summary = json.loads((tmp_path / "again/summary.json").read_text())
    assert (summary["resumed_from"], summary["edited"], summary["start"]["file"]) == (
        path.name,
        True,
        path.name,
    )
    assert summary["steps"][0]["index"] == int(path.name[:2]) + 1
    model = tiny("llama")
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5  # type: ignore[assignment]
    with torch.no_grad():
        expected = reference_logits(model, tokens(7))[0, -1]
    (token,) = resumed.generate([tokens(7)[0].tolist()], octavo.SamplingParams(max_tokens=1))[0].token_ids
    assert token == int(expected.argmax())


def test_the_artifact_is_compared_with_the_graph_of_the_file(dump: Path) -> None:
    path = edited(dump, "insert_paged_kv", lambda text: text.replace(", 1e-06)", ", 0.5)", 1))
    (path,) = dump.glob("??_insert_paged_kv.py")
    octavo.resume(path)
    with (
        mock.patch("octavo.compiler.graph_model.GraphModel.forward", lambda *_: torch.ones(1, 14, 96)),
        pytest.raises(PassError, match=r"^verify: logits of the artifact differ"),
    ):
        octavo.resume(path)


@pytest.mark.parametrize(
    ("step", "old", "new", "said"),
    [
        ("fuse_rms_norm", ", 1e-06)", ")", "octavo.rms_norm.default does not take these arguments"),
        ("fuse_rms_norm", "(embedding", "(embeding", "is not defined above"),
        ("fuse_rms_norm", "octavo.rms_norm.default", "octavo.rms_nrm.default", "is not an op of aten or octavo"),
        ("fuse_rms_norm", 'w["model.norm.weight"]', 'w["model.nrm.weight"]', "model.nrm.weight is not in WEIGHTS"),
        ("fuse_rms_norm", '"model.norm.weight": "f32[64]"', '"model.norm.weight": "f32[65]"', "the text says f32[65]"),
        ("fuse_rms_norm", '"model.norm.weight":', '"model.nrm.weight":', "is not among those that came with"),
        ("fuse_rms_norm", "    return (", "    return ((", "the text is not Python"),
    ],
)  # fmt: skip
def test_a_wrong_edit_is_refused_with_file_and_line(
    step: str, old: str, new: str, said: str, dump: Path
) -> None:
    before = next(dump.glob(f"??_{step}.py")).read_text().splitlines()
    path = edited(dump, step, lambda text: text.replace(old, new, 1))
    after = path.read_text().splitlines()
    line = 1 + [a == b for a, b in zip(before, after, strict=True)].index(False)
    with pytest.raises(IllegalGraphError) as raised:
        octavo.resume(path)
    assert str(raised.value).startswith(f"{path}:{line}: ") and said in str(raised.value)


def test_an_edit_that_its_stage_or_a_later_one_forbids_names_the_line(dump: Path) -> None:
    def transposed(text: str) -> str:
        return text.replace("    return (", '    odd = aten.t.default(w["lm_head.weight"])\n    return (')

    path = edited(dump, "fuse_rms_norm", transposed)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "odd = " in text)
    with pytest.raises(
        IllegalGraphError, match=rf"aten::t is not legal in a canonical graph.*; see {path}:{line} "
    ):
        octavo.resume(path)
    shutil.copy(dump / "00_capture.py", dump / "00_capture.mine.py")
    late = dump / "00_capture.mine.py"
    late.write_text(
        late.read_text().replace(
            "    return (", "    extra = aten.cumsum.default(linear_14, 1)\n    return (extra, "
        )
    )
    late.write_text(late.read_text().replace("return (extra, linear_14", "return (extra"))
    with pytest.raises(
        IllegalGraphError, match=r"aten::cumsum is not legal.*; see .*00_capture.mine.py:\d+ \(extra\)"
    ):
        octavo.resume(late)


def test_what_is_no_file_of_a_dump_is_refused(dump: Path, tmp_path: Path) -> None:
    def refuse(path: Path, said: str, **options: Any) -> None:
        with pytest.raises(OptionError, match=said):
            octavo.resume(path, **options)

    norm = next(dump.glob("??_fuse_rms_norm.py"))
    refuse(dump / "summary.json", "expected a dumped graph such as")
    refuse(dump / "77_none.py", "no such file")
    shutil.copy(norm, dump / "02_fuse_rms_norm.py")
    refuse(
        dump / "02_fuse_rms_norm.py", "was written after step 2 fuse_rms_norm, which now is fold_constants"
    )
    shutil.copy(norm, dump / norm.name.replace(".py", ".failed.py"))
    refuse(dump / norm.name.replace(".py", ".failed.py"), "a graph that a pass left half done")
    shutil.copy(norm, dump / "02_fold_constants.py")
    refuse(dump / "02_fold_constants.py", "is not a file of the dump")
    refuse(norm, "expected another directory", dump=dump)
    (tmp_path / "empty").mkdir()
    shutil.copy(norm, tmp_path / "empty" / norm.name)
    refuse(
        tmp_path / "empty" / norm.name,
        "expected a dump, got no summary.json in it; `octavo compile MODEL --dump",
    )


def test_weights_must_be_those_of_the_dump(dump: Path, tmp_path: Path) -> None:
    weights = dump / "weights.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(
        ArtifactError, match=r"expected the .* bytes that were written with the dump, got other bytes"
    ):
        octavo.resume(dump / "00_capture.py")
    weights.unlink()
    with pytest.raises(ArtifactError, match="got no such file"):
        octavo.resume(dump / "00_capture.py")
    octavo.compile(tiny("llama"), dump=tmp_path / "bare", dump_weights=False, verify="off")
    assert not (tmp_path / "bare/weights.safetensors").exists()
    with pytest.raises(OptionError, match="has no weights: they were not asked for"):
        octavo.resume(tmp_path / "bare/00_capture.py")


def test_a_tensor_under_two_names_is_one(tmp_path: Path) -> None:
    tensor, other = torch.randn(3, 4), torch.ones(2, dtype=torch.bool)
    facts = save_weights(tmp_path, {"a": tensor, "b": tensor, "c": tensor.t(), "d": other})
    read = DumpedWeights(tmp_path, facts)
    assert set(read) == {"a", "b", "c", "d"} and len(read) == 4
    assert read["a"] is read["b"] and torch.equal(read["a"], tensor)
    assert torch.equal(read["c"], tensor.t()) and torch.equal(read["d"], other)
    with pytest.raises(ArtifactError, match="weight a is on the meta device"):
        save_weights(tmp_path, {"a": torch.ones(1, device="meta")})


def test_without_an_output_the_artifact_keeps_its_directory(whole: tuple[Compiled, Path]) -> None:
    artifact = octavo.resume(whole[1] / "00_capture.py", verify="off").artifact
    assert artifact.read("report.json")
    path = artifact.path
    del artifact
    assert not path.exists()


def test_a_head_stays_the_head_that_it_is(tmp_path: Path) -> None:
    compiled = octavo.compile(head_of("medusa"), page_size=4, verify="off", dump=tmp_path)
    resumed = octavo.resume(tmp_path / "00_capture.py")
    facts = [made.artifact.manifest["provenance"]["draft"] for made in (compiled, resumed)]
    assert facts[0] == facts[1] and facts[0]["kind"] == "medusa"
    assert resumed.artifact.read(TARGET_IDS) == compiled.artifact.read(TARGET_IDS)
