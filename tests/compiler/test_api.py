"""`octavo.compile`: from a model to an artifact that generates what the model does, and clear refusals."""

import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import LONGEST, VOCAB, llama, tiny
from stages import BF16, FP32, compiled, greedy
from tiny_llama import build, build_tokenizer

import octavo
from octavo import QuantConfig, SamplingParams
from octavo.compiler import api, pipeline
from octavo.compiler.api import with_dtype
from octavo.compiler.eager_runner import EagerRunner
from octavo.compiler.errors import ArtifactError, CaptureError, OptionError, PassError
from octavo.compiler.verify import prove_report
from octavo.runtime.model_runner import NativeRunner

PROMPTS = [[1, 5, 9], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [11, 12, 13, 14]]
MAX_TOKENS = 12


def answers(model: Any) -> list[list[int]]:
    completions = model.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    return [list(completion.token_ids) for completion in completions]


def expected(name: str) -> list[list[int]]:
    """The model's own greedy tokens, which no rounding can have decided."""
    found = [greedy(name, prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert min(gap for _, gap in found) > 1e-3
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize("name", ["llama", "sdpa", "fused"])
def test_compile_save_load_generate_equals_the_model(name: str, tmp_path: Path) -> None:
    artifact = compiled(name)
    assert isinstance(artifact.runner(), NativeRunner)
    assert answers(artifact) == expected(name)
    artifact.save(tmp_path / "saved")
    assert answers(octavo.load(tmp_path / "saved")) == expected(name)


def test_greedy_tokens_are_the_librarys() -> None:
    model = tiny("llama")
    for prompt, own in zip(PROMPTS, expected("llama"), strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, max_new_tokens=MAX_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids)
        )  # type: ignore[operator]
        assert out[0, len(prompt) :].tolist() == own


def test_a_new_process_without_the_compiler_generates_the_same(tmp_path: Path) -> None:
    compiled("llama").save(tmp_path / "saved")
    program = f"""
import sys, octavo
params = octavo.SamplingParams(max_tokens={MAX_TOKENS})
out = octavo.load({str(tmp_path / "saved")!r}).generate({PROMPTS}, params)
print([list(c.token_ids) for c in out])
print(sorted({{"torch", "transformers", "octavo.passes", "octavo.compiler.api"}} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line.replace("'", '"')) for line in result.stdout.splitlines()] == [
        expected("llama"),
        [],
    ]


def test_the_model_is_not_changed() -> None:
    model = llama(attn_implementation="eager").train()
    state = {name: (tensor.dtype, tensor.clone()) for name, tensor in model.state_dict().items()}
    with no_compiler():
        octavo.compile(model, dtype="bf16", verify="off")
    assert model.training and all(module.training for module in model.modules())
    assert model.config._attn_implementation == "eager"
    for name, tensor in model.state_dict().items():
        assert tensor.dtype is state[name][0]
        assert torch.equal(tensor, state[name][1])


@contextlib.contextmanager
def no_compiler() -> Iterator[None]:
    """A machine on which no C++ compiler is found. Warnings about that are expected."""
    with warnings.catch_warnings(action="ignore"), mock.patch.dict("os.environ", {"CXX": "no-such-compiler"}):
        yield


@pytest.mark.parametrize("missing", ["CXX", "PATH"])
def test_without_a_cxx_compiler_it_says_so_and_generates_the_same(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(missing, "no-such-compiler" if missing == "CXX" else str(tmp_path))
    said = (
        "CXX is 'no-such-compiler', which is not on PATH"
        if missing == "CXX"
        else "on PATH, found none; install one"
    )
    with pytest.warns(
        UserWarning, match=rf"^C\+\+ compiler: .*{said}.*; text is generated with the eager references"
    ):
        artifact = octavo.compile(tiny("sdpa"), page_size=4, max_model_len=LONGEST)
    assert not (artifact.path / "kernels/program.so").exists()
    assert (artifact.path / "kernels/program.cpp").exists()
    with pytest.warns(UserWarning, match=rf"{said}.*; running the eager references instead, slowly"):
        assert answers(artifact) == expected("sdpa")
    with pytest.warns(UserWarning, match="running the eager references"):
        assert isinstance(artifact.runner(8), EagerRunner)


def test_a_built_artifact_needs_no_cxx_compiler() -> None:
    path = compiled("llama").path
    with no_compiler(), warnings.catch_warnings(action="error"):
        assert isinstance(octavo.load(path).runner(8), NativeRunner)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "z80"}, r"target: expected one of b200, .*cpu.*, got 'z80'"),
        ({"page_size": 0}, "page_size: expected 1 or more, got 0"),
        ({"page_size": 24}, "page_size: expected a power of two, got 24"),
        ({"max_model_len": -1}, "max_model_len: expected 1 or more, got -1"),
        ({"max_model_len": LONGEST + 1}, "max_model_len: the model's positions end at 48, got 49"),
        ({"max_batch_tokens": 0}, "max_batch_tokens: expected 1 or more, got 0"),
        ({"dtype": "fp8"}, "dtype: expected fp32 or bf16, got 'fp8'"),
        ({"verify": "maybe"}, "verify: expected off, sites or full, got 'maybe'"),
        (
            {"quantize": "int4"},
            "quantize: expected one of nvfp4, nvfp4_weight_only, fp8, bf16, auto, auto_weight_only, got 'int4'",
        ),
        ({"quantize": QuantConfig(bits=3.0)}, "bits: expected .*, got 3.0"),
        (
            {"quantize": "nvfp4"},
            "calibration: expected token ids, or a tokenizer, got neither, and activations=",
        ),
        ({"quantize": "auto", "calibration": "text"}, "calibration: expected .*got text without a tokenizer"),
        ({"quantize": "fp8", "calibration": [[1], None]}, "calibration: expected .*got NoneType at 1"),
        ({"calibration": [[1]]}, "calibration: expected quantize or carve beside it"),
        ({"tokenizer": object()}, "tokenizer: expected a Hugging Face tokenizer, got object"),
    ],
)
def test_refuses_options_before_the_work(options: dict[str, Any], said: str) -> None:
    with mock.patch.object(api, "lower") as passes, pytest.raises(OptionError, match=said):
        octavo.compile(tiny("llama"), **options)
    passes.assert_not_called()


def test_refuses_a_tokenizer_without_its_own_file() -> None:
    class Slow:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "vocab.txt").write_text("a")

    with pytest.raises(ArtifactError, match=r"it saves no tokenizer\.json; use a fast tokenizer"):
        octavo.compile(tiny("llama"), tokenizer=Slow())


def test_refuses_models_that_cannot_be_paged() -> None:
    for name, error, said in (
        ("none", PassError, "TinyLM has no attention"),
        ("prefix", PassError, "is prefix-LM: query i sees key j > i for j < 3"),
    ):
        with pytest.raises(error, match=said):
            octavo.compile(tiny(name), max_model_len=LONGEST)
    with pytest.raises(CaptureError):
        octavo.compile(torch.nn.Bilinear(2, 2, 2))


def test_a_tokenizer_travels_with_the_artifact(tmp_path: Path) -> None:
    with no_compiler():
        artifact = octavo.compile(
            tiny("llama"), tokenizer=build_tokenizer(), output=tmp_path / "new", verify="off"
        )
    assert artifact.path == tmp_path / "new"
    assert (tmp_path / "new/tokenizer/tokenizer.json").is_file()
    assert octavo.load(tmp_path / "new").tokenizer is not None


@pytest.mark.parametrize(
    ("verify", "proven", "whole"), [("off", False, 0), ("sites", True, 0), ("full", True, 1)]
)
def test_verify_says_what_is_proven(verify: Any, proven: bool, whole: int) -> None:
    with (
        no_compiler(),
        mock.patch.object(api, "check_whole_model") as logits,
        mock.patch.object(pipeline, "prove_report", wraps=prove_report) as sites,
    ):
        artifact = octavo.compile(tiny("llama"), verify=verify)
    assert (sites.call_count > 0, logits.call_count) == (proven, whole)
    rows = artifact.report().data["passes"]
    assert any(row["proven_sites"] for row in rows) is proven


def test_the_manifest_tells_what_was_compiled() -> None:
    artifact = compiled("llama").artifact
    model = artifact.model
    assert (model.name, model.vocab_size, model.num_layers) == ("tiny-llama", VOCAB, 2)
    assert (model.max_model_len, model.max_batch_tokens) == (LONGEST, 2048)
    assert artifact.program.page_size == 4
    manifest = json.loads((artifact.path / "manifest.json").read_text())
    assert manifest["target"] == "cpu"
    assert manifest["options"]["verify"] == "full"
    assert manifest["provenance"]["capture_route"] == "interface"
    assert {"graph/00_capture.py", "graph/lowered.py", "report.json", "program.json"} <= set(
        manifest["files"]
    )


def test_dumps_go_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DUMP", str(tmp_path / "dump"))
    with no_compiler():
        octavo.compile(tiny("llama"), verify="off")
    assert (tmp_path / "dump/00_capture.py").is_file()
    assert "kernels" in (tmp_path / "dump/summary.txt").read_text()


def test_a_dtype_is_a_copys_and_buffers_keep_theirs() -> None:
    model = tiny("sdpa")
    assert with_dtype(model, None) is model
    assert with_dtype(model, "fp32") is model
    model.register_buffer("table", torch.ones(2))
    converted = with_dtype(model, "bf16")
    assert {p.dtype for p in converted.parameters()} == {BF16}
    assert {p.dtype for p in model.parameters()} == {FP32}
    assert converted.table.dtype is FP32
    assert converted.head.weight is converted.embed.weight  # type: ignore[union-attr]


CALIBRATION = [[(7 * i + 3 * j) % VOCAB for i in range(40)] for j in range(3)]


def quantised(output: Path, **options: Any) -> Path:
    with no_compiler():
        return octavo.compile(
            tiny("llama"), page_size=4, max_model_len=LONGEST, output=output, **options
        ).path


def test_two_compilations_give_the_same_bytes(tmp_path: Path) -> None:
    config = QuantConfig(kv="nvfp4", weights="gptq")
    first, second = (
        quantised(tmp_path / name, quantize=config, calibration=CALIBRATION) for name in ("a", "b")
    )
    names = sorted(str(p.relative_to(first)) for p in first.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(second)) for p in second.rglob("*") if p.is_file())
    with_times = {"report.json", "manifest.json"}  # the manifest has the report's hash
    for name in set(names) - with_times:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    ours, theirs = (json.loads((path / "manifest.json").read_text()) for path in (first, second))
    for manifest in (ours, theirs):
        del manifest["files"]["report.json"], manifest["checksum"]
    assert ours == theirs


def test_a_quantised_artifact_tells_how_and_generates(tmp_path: Path) -> None:
    config = QuantConfig(kv="fp8", keep=("*.o_proj",))
    artifact = octavo.load(quantised(tmp_path / "a", quantize=config, calibration=CALIBRATION))
    manifest = artifact.artifact.manifest
    assert manifest["options"]["quantize"]["keep"] == ["*.o_proj"]
    told = manifest["provenance"]["quantization"]
    assert (told["recipe"], told["e4m3_max"], told["calibration"]["tokens"]) == ("octavo-v1", 256, 120)
    formats = {name: one["format"] for name, one in told["plan"]["products"].items()}
    assert sorted(formats.values()) == ["bf16"] * 3 + ["nvfp4"] * 6
    dtypes = {b.name: b.dtype for b in artifact.artifact.program.buffers if b.kind == "cache"}
    assert set(dtypes.values()) == {"fp8"}
    rows = {row["pass"]: row for row in artifact.report().data["passes"]}
    assert rows["quantize_linear"]["matched"] == 6 and rows["quantize_linear"]["proven_sites"] == 6
    with no_compiler():
        assert [len(tokens) for tokens in answers(artifact)] == [MAX_TOKENS] * len(PROMPTS)


def test_a_tokenizer_brings_calibration(tmp_path: Path) -> None:
    with no_compiler():
        artifact = octavo.compile(build(), tokenizer=build_tokenizer(), quantize="nvfp4", verify="off")
    calibration = artifact.artifact.manifest["provenance"]["quantization"]["calibration"]
    assert calibration["tokens"] > 15_000  # a token is a byte


def test_a_dumped_quantised_model_goes_on_with_its_calibration(tmp_path: Path) -> None:
    whole = quantised(
        tmp_path / "a", quantize=QuantConfig(kv="fp8"), calibration=CALIBRATION, dump=tmp_path / "dump"
    )
    (path,) = (tmp_path / "dump").glob("??_merge_qkv.py")
    with no_compiler():
        resumed = octavo.resume(path, output=tmp_path / "b").path
    assert (whole / "weights.safetensors").read_bytes() == (resumed / "weights.safetensors").read_bytes()
