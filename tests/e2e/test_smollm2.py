"""SmolLM2-135M against Hugging Face: exact tokens in fp32, bounded logits in bf16. Needs the demo's weights."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import octavo
from octavo.compiler.api import with_dtype
from octavo.compiler.artifact import Artifact
from octavo.compiler.compiled import Compiled
from octavo.compiler.fresh_inputs import Chunk, step_inputs
from octavo.compiler.models import LoadedModel, load_model
from octavo.runtime.batch import Batch
from octavo.runtime.model_runner import NativeRunner

NUM_TOKENS = 64
NEAR_TIE = 1e-4  # a top-2 gap below this may fall either way
# Relative to a position's largest logit. bf16 keeps 8 bits, and a residual stream rounds twice in each of 30 layers;
# seen 5.5e-2 here. Hugging Face's own bf16 is compared in the same test.
BF16_LOGIT_BOUND = 8e-2
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "1 2 3 4 5",
    "Q: What is the boiling point of water at sea level?\nA:",
    "a",
    "The three laws of robotics are: first, a robot may not injure a human being or, through inaction, allow a "
    "human being to come to harm; second,",
    "In 1969",
)
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"max_batch_tokens": 16}, {"chunked_prefill": False})

NEW_PROCESS = """
import json, sys
import octavo
from octavo.runtime.sampling_params import SamplingParams
path, prompts, settings = json.loads(sys.stdin.read())
engine = octavo.load(path).engine(**settings)
answers = engine.generate(prompts, SamplingParams(max_tokens={num_tokens}, ignore_eos=True))
assert "transformers" not in sys.modules
print(json.dumps([list(a.token_ids) for a in answers]))
"""


class Reference:
    """Greedy continuations by Hugging Face's own generate-like loop, with the gap between the best two logits."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.prompts = [loaded.tokenizer(text)["input_ids"] for text in PROMPTS]
        self.answers: list[list[int]] = []
        self.gaps: list[list[float]] = []
        for prompt in self.prompts:
            tokens, gaps = self._continue(loaded.model, prompt)
            self.answers.append(tokens)
            self.gaps.append(gaps)

    def _continue(self, model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        gaps: list[float] = []
        cache, current = None, torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                out = model(input_ids=current, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                best = out.logits[0, -1].topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
                current = best.indices[:1][None]
        return tokens, gaps


def differences(reference: Reference, answers: Sequence[Sequence[int]]) -> list[str]:
    """First difference of every answer; beyond a near tie the two may go different ways."""
    found = []
    for i, (wanted, got) in enumerate(zip(reference.answers, answers, strict=True)):
        assert len(got) == NUM_TOKENS
        for step, (a, b) in enumerate(zip(wanted, got, strict=True)):
            if a != b:
                if reference.gaps[i][step] > NEAR_TIE:
                    found.append(
                        f"prompt {i}, token {step}: {b}, expected {a}, gap {reference.gaps[i][step]:.2e}"
                    )
                break
    return found


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("demo")


@pytest.fixture(scope="module")
def reference(demo: LoadedModel) -> Reference:
    return Reference(demo)


@pytest.fixture(scope="module", params=[16, 64], ids=["page16", "page64"])
def compiled(
    demo: LoadedModel, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    output = tmp_path_factory.mktemp("smollm2") / f"page{request.param}"
    return octavo.compile(demo.model, page_size=request.param, output=output, tokenizer=demo.tokenizer)


@pytest.mark.parametrize("settings", SETTINGS, ids=["default", "chunks_of_16", "unchunked"])
def test_fp32_tokens_are_exact(compiled: Compiled, reference: Reference, settings: dict[str, Any]) -> None:
    params = octavo.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = compiled.engine(**settings).generate(reference.prompts, params)
    assert differences(reference, [a.token_ids for a in answers]) == []


def test_fp32_tokens_are_exact_in_a_new_process_without_transformers(
    compiled: Compiled, reference: Reference, tmp_path: Path
) -> None:
    saved = compiled.save(tmp_path / "saved")
    given = json.dumps([str(saved), reference.prompts, {}])
    program = NEW_PROCESS.format(num_tokens=NUM_TOKENS)
    source = str(Path(octavo.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=given,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": source},
    )
    assert result.returncode == 0, result.stderr
    assert differences(reference, json.loads(result.stdout)) == []


def test_a_repetition_penalty_is_hugging_face_s(
    compiled: Compiled, demo: LoadedModel, reference: Reference
) -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.3, "min_new_tokens": 24, "max_new_tokens": 24}
    wanted = []
    model: Any = demo.model
    for prompt in reference.prompts[:3]:
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **options)
        wanted.append(out[0, len(prompt) :].tolist())
    params = octavo.SamplingParams(max_tokens=24, min_tokens=24, repetition_penalty=1.3)
    answers = compiled.engine().generate(reference.prompts[:3], params)
    assert [list(answer.token_ids) for answer in answers] == wanted
    assert wanted[0] != reference.answers[0][:24], "the penalty shows"


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_json_of_a_schema_by_a_real_tokenizer(compiled: Compiled, temperature: float) -> None:
    fields = {
        "city": {"type": "string", "maxLength": 20},
        "rivers": {"type": "array", "items": {"enum": ["Seine", "Tiber"]}, "maxItems": 2},
        "capital": {"type": "boolean"},
    }
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    params = octavo.SamplingParams(
        max_tokens=200, temperature=temperature, seed=3, structured=octavo.Structured.json_schema(schema)
    )
    for answer in compiled.generate([PROMPTS[0], PROMPTS[3]], params):
        assert answer.finish_reason == "stop"
        value = json.loads(answer.text or "")
        assert list(value) == ["city", "rivers", "capital"]
        assert isinstance(value["city"], str) and len(value["city"]) <= 20
        assert {*value["rivers"]} <= {"Seine", "Tiber"} and len(value["rivers"]) <= 2
        assert type(value["capital"]) is bool


def test_thirty_attentions_in_and_thirty_paged_attentions_out(compiled: Compiled) -> None:
    rows = {row["pass"]: row for row in compiled.report().data["passes"]}
    assert rows["fuse_rope"]["matched"] == 60
    assert rows["fuse_rms_norm"]["matched"] == 61
    assert rows["fuse_gated_mlp"]["matched"] == rows["merge_qkv"]["matched"] == 30
    steps = [step.kernel for step in compiled.artifact.program.steps]
    assert sum(kernel.startswith("paged_attention") for kernel in steps) == 30


def logits_of(artifact: Artifact, tokens: list[int]) -> NDArray[np.float32]:
    """Logits at every position of one sequence, in one step."""
    runner = NativeRunner(artifact, num_pages=32)
    step = step_inputs(
        [Chunk(0, 0, len(tokens))], runner.page_size, 1, torch.Generator().manual_seed(0), 256
    ).tensors
    arrays: dict[str, Any] = {name: value.numpy() for name, value in step.items()}
    arrays["positions"] = arrays["positions"][0]
    arrays["logit_rows"] = np.arange(len(tokens))
    return runner.run(Batch(input_ids=np.array(tokens), **arrays)).copy()


def largest_error(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Of all positions, relative to the largest logit of each."""
    return float((np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(axis=1)).max())


def hugging_face_logits(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().numpy()


def test_bf16_logits_are_within_their_bound(demo: LoadedModel, reference: Reference, tmp_path: Path) -> None:
    """Against the fp32 model: every top-1 that twice the bound cannot overturn must agree."""
    artifact = octavo.compile(demo.model, dtype="bf16", output=tmp_path / "bf16").artifact
    in_bf16 = with_dtype(demo.model, "bf16")
    agreeing = decided = total = 0
    ours = theirs = 0.0
    for prompt, answer in list(zip(reference.prompts, reference.answers, strict=True))[:4]:
        tokens = prompt + answer
        wanted, got = hugging_face_logits(demo.model, tokens), logits_of(artifact, tokens)
        ours = max(ours, largest_error(got, wanted))
        theirs = max(theirs, largest_error(hugging_face_logits(in_bf16, tokens), wanted))
        best = np.sort(wanted, axis=1)[:, -2:]
        clear = best[:, 1] - best[:, 0] > 2 * BF16_LOGIT_BOUND * np.abs(wanted).max(axis=1)
        same = got.argmax(axis=1) == wanted.argmax(axis=1)
        assert same[clear].all()
        agreeing, decided, total = agreeing + int(same.sum()), decided + int(clear.sum()), total + len(tokens)
    print(
        f"bf16: top-1 agrees on {agreeing} of {total} ({decided} decided), error {ours:.1e}, eager's {theirs:.1e}"
    )
    assert ours <= BF16_LOGIT_BOUND
    assert ours <= 1.5 * theirs
    assert agreeing >= 0.95 * total


def test_bf16_is_what_runs(demo: LoadedModel) -> None:
    converted = with_dtype(demo.model, "bf16")
    assert {p.dtype for p in converted.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in demo.model.parameters()} == {torch.float32}
