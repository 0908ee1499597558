"""Artifacts of several ranks under torchrun: greedy tokens of Hugging Face, loads, rebalances, lost ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from serve_ranks import NUM_TOKENS, PROMPTS
from zoo import build

import octavo
from octavo.compiler.mesh import Mesh

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests/support'}", "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.slow


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-4, "the test needs another seed: decoding meets a tie"
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "sizes", "dispatchers"),
    [
        ("mixtral", {"ep": 2}, ["-"]),
        ("mixtral", {"ep": 4, "dp": 2}, ["all_to_all", "padded", "all_gather"]),
        ("qwen3_moe", {"ep": 4, "dp": 4}, ["all_to_all"]),
        ("gpt_oss", {"ep": 3}, ["-"]),
        ("deepseek_v3", {"ep": 4, "tp": 2, "dp": 2}, ["padded"]),
    ],
)
def test_greedy_tokens(name: str, sizes: dict[str, Any], dispatchers: list[str], tmp_path: Path) -> None:
    model: Any = build(name)
    parallel = octavo.Parallel(**sizes)
    compiled = octavo.compile(model, page_size=4, parallel=parallel, output=tmp_path / "model")
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    for dispatcher in dispatchers:
        script = [str(ROOT / "tests/support/serve_ranks.py"), str(compiled.path), dispatcher]
        done = subprocess.run(
            [*TORCHRUN, str(parallel.world), *script],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert said["answers"] == [wanted, wanted]  # before every expert moved, and after
        computed = sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)
        per_token = getattr(model.config, "num_experts_per_tok", 0)
        assert {sum(layer) for layer in said["loads"]} == {computed * per_token}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "model"
    return octavo.compile(
        build("mixtral"), parallel=octavo.Parallel(ep=4, dp=2), output=path, page_size=4
    ).path


def ranks_of(torchrun: int) -> dict[int, int]:
    """Process ids by rank, once all have loaded the program."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = {}
        children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
        for child in children:
            environment = Path(f"/proc/{child}/environ").read_text()
            if "program.so" in Path(f"/proc/{child}/maps").read_text() and "RANK=" in environment:
                found[int(re.findall(r"(?:^|\0)RANK=(\d+)", environment)[0])] = int(child)
        if len(found) == 4:
            return found
        time.sleep(0.2)
    raise AssertionError("the ranks did not start")


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_in_mid_generation(artifact: Path, sign: signal.Signals, tmp_path: Path) -> None:
    prompts, errors = tmp_path / "prompts.txt", tmp_path / "errors.txt"
    prompts.write_text("\n".join(f"{i} 2 3" for i in range(1, 100)))
    command = [
        "-m",
        "octavo.compiler.cli",
        "run",
        str(artifact),
        "--prompts-file",
        str(prompts),
        "--max-tokens",
        "58",
    ]
    with errors.open("w") as stderr:
        torchrun = subprocess.Popen(
            [*TORCHRUN, "4", *command], stderr=stderr, stdout=subprocess.DEVNULL, env=ENVIRONMENT
        )
    victim = ranks_of(torchrun.pid)[2]
    time.sleep(2)
    os.kill(victim, sign)
    began = time.monotonic()
    said = f"octavo: RankError: rank 2 (pid {victim} on "
    try:
        while errors.read_text().count(said) < 3 and time.monotonic() < began + 40:
            time.sleep(0.1)
        took = time.monotonic() - began
    finally:
        os.kill(victim, signal.SIGKILL)
        torchrun.wait(60)
    text = errors.read_text()
    assert text.count(said) == 3, text
    assert {"SIGKILL": "is gone", "SIGSTOP": "is stopped"}[sign.name] in text
    assert took < 30


def test_another_number_of_processes_says_what_to_type(artifact: Path) -> None:
    command = ["-m", "octavo", "run", str(artifact), "1 2 3"]
    for start in ([sys.executable], [*TORCHRUN, "2"]):
        done = subprocess.run(
            [*start, *command], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
        )
        assert done.returncode != 0 and done.stdout == ""
        assert f"expected 4 processes ({Mesh(2, 2, 1)})" in done.stderr
        assert "type `torchrun --nproc-per-node 4 -m octavo run ARTIFACT ...`" in done.stderr
