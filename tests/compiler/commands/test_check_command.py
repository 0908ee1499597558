"""`octavo check`: a configuration in, tables, JSON or a picture out; what is no configuration and no mesh."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.compiler.commands.check import config_of
from octavo.compiler.errors import OptionError
from octavo.compiler.options import Parallel, parallel_of

Run = Callable[..., tuple[int, str, str]]
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "config.json"


def test_tables_and_a_picture(run: Run, config: Path) -> None:
    picture = config.parent / "plan.svg"
    code, out, _ = run("check", config, "--parallel", "tp=2", "--plot", picture)
    assert code == 0
    assert "fuse_rms_norm" in out and "plan: figures" in out and "tp 2" in out
    assert "llama: 1 layers" in out and picture.read_text().startswith("<?xml")


@pytest.mark.slow
def test_json(run: Run, config: Path) -> None:
    code, out, _ = run("check", config.parent, "--parallel", "tp=2", "--json", "--target", "cpu")
    assert code == 0
    found = json.loads(out)
    # embedding and logits, qkv and o, gate and up and down, norms
    assert found["weights"] == 2 * 64 * 64 + 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 3 * 64
    (plan,) = found["plans"]
    assert plan["memory"] is plan["kv_tokens"] is plan["fits"] is None  # that machine's is not known
    assert plan["weights"]["FFNs"] == 3 * 64 * 128 * 2 // 2
    assert [(one["kernel"], one["count"]) for one in plan["exchanges"]] == [
        ("all_reduce", 2),
        ("all_gather", 1),
    ]


def test_wrong_input_is_usage(run: Run, config: Path) -> None:
    code, _, err = run("check", config, "--parallel", "ep=two")
    assert code == 2 and "--parallel: expected entries such as ep=8" in err and "'ep=two'" in err
    code, _, err = run("check", "no_such_model")
    assert code == 2 and "got no_such_model" in err


def test_meshes() -> None:
    given = "ep=72,dp=72,redundant_experts=32,wire=nvfp4"
    assert parallel_of(given) == Parallel(ep=72, dp=72, redundant_experts=32, wire="nvfp4")
    assert parallel_of("") == Parallel()
    for wrong in ("ep", "ep=-1", "pp=2", "wire="):
        with pytest.raises(OptionError, match=f"got '{wrong}' in 'tp=2,{wrong}'"):
            parallel_of(f"tp=2,{wrong}")


def test_configurations(tmp_path: Path, config: Path) -> None:
    assert config_of("deepseek_v3").n_routed_experts == 256
    assert config_of(str(config)).vocab_size == config_of(str(tmp_path)).vocab_size == 64
    for text, said in (("{", "expected JSON"), ("[]", "expected the entries of a configuration, got list"),
                       ('{"model_type": "x"}', "of model type 'x'"), ("{}", "of model type None")):  # fmt: skip
        config.write_text(text)
        with pytest.raises(OptionError, match=said):
            config_of(str(config))
