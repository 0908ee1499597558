"""`octavo.check`: what compile would do before kernels, without weights and without an artifact."""

import pytest
import torch
from models import SPELLINGS, TinyLM, llama

import octavo
from octavo.compiler.errors import IllegalGraphError, OptionError


def meta(spelling: str) -> TinyLM:
    with torch.device("meta"):
        return TinyLM(SPELLINGS[spelling])


def test_rows_and_proofs_are_those_of_the_model_with_values() -> None:
    with torch.device("meta"):
        model = llama()
    rows = {}
    for name, one in (("meta", model), ("values", llama())):
        report = octavo.check(one, progress=False)
        assert report.data["num_layers"] == 2
        rows[name] = [(r["pass"], r["matched"], r["proven_sites"]) for r in report.data["passes"]]
    assert rows["meta"] == rows["values"]
    assert ("fuse_rms_norm", 5, 1) in rows["meta"]


def test_its_text_is_the_table_of_passes() -> None:
    text = str(octavo.check(meta("sdpa"), progress=False))
    assert "insert_paged_kv" in text
    assert "kernels" not in text


def test_what_compile_refuses_is_refused() -> None:
    with pytest.raises(
        IllegalGraphError, match=r"layers.0.attention, models.py:\d+: attention is not causal"
    ):
        octavo.check(meta("bidirectional"), progress=False)


def test_compile_sends_a_model_without_values_here() -> None:
    with pytest.raises(OptionError, match=r"no values \(meta device\).*octavo\.check\(model\)"):
        octavo.compile(meta("sdpa"), progress=False)
