"""A model whose FFNs are cut into experts: what is told of it, what it is in the end, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
import torch
from models import VOCAB
from stages import before, calls

import octavo
from octavo import CarveConfig
from octavo.compiler import carve_model as carve_model_module
from octavo.compiler.carve_model import carve_model, kept
from octavo.compiler.carving import Carving, carve
from octavo.compiler.commands.inspect import artifact_facts
from octavo.compiler.errors import OptionError, PassError
from octavo.compiler.progress import progress_bars
from octavo.compiler.quality import perplexity
from octavo.compiler.report import Report
from octavo.passes import carve_moe

PAGE_SIZE = 4
PROMPTS = [[3, 7, 9, 50, 60], [5, 6]]


def sequences(vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in (40, 48, 30)]


def test_what_is_told() -> None:
    graph_module = before("")
    with progress_bars(False) as bars:
        (report,), found = carve_model(graph_module, CarveConfig(4, 1, 1), sequences(), PAGE_SIZE, bars)
    assert (report.name, report.matched, report.proof.sites) == ("carve_moe", 2, 2)
    assert report.notes["active"] == "1 shared + 1 of 3 experts"
    assert found["config"]["num_experts"] == 4 and found["calibration"]["tokens"] == 118
    assert found["quality"]["kl"] > 0.01 and found["quality"]["tokens"] == 16
    for layer in found["layers"]:
        shared, width = layer["widths"]
        assert (shared, width) == (48, 16)  # of 96
        assert (
            sum(layer["loads"]) == sum(layer["balanced"]) == 118 - 118 // 10
        )  # one for each token that was seen
    assert len(calls(graph_module, torch.ops.octavo.moe.default)) == 2
    again = before("")
    with progress_bars(False) as bars:
        told = carve_model(again, CarveConfig(4, 1, 1), sequences(), PAGE_SIZE, bars)[1]
    assert told == found


def test_a_later_layer_sees_what_the_carved_ones_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all experts active, layers see what the dense model computes; with one, only the first does."""
    seen: dict[int, list[torch.Tensor]] = {}

    def watched(x: torch.Tensor, *given: Any) -> Carving:
        seen.setdefault(given[-1].top_k, []).append(x)
        return carve(x, *given)

    monkeypatch.setattr(carve_model_module, "carve", watched)
    for top_k in (3, 1):
        with progress_bars(False) as bars:
            carve_model(before(""), CarveConfig(4, 1, top_k), sequences(), PAGE_SIZE, bars, False)
    assert torch.equal(seen[3][0], seen[1][0])
    assert not torch.allclose(seen[3][1], seen[1][1], atol=0.1)


def test_held_out_tokens_are_left_out() -> None:
    assert [len(one) for one in kept(sequences())] == [40, 48, 30 - 11]
    assert [len(one) for one in kept([[1] * 5, [2] * 5])] == [5, 4]
    many = kept([[i] * 512 for i in range(64)])
    assert 4096 <= sum(map(len, many)) <= 8192 and many[0][0] == 0 and many[-1][0] > 50


def test_perplexity_is_of_tokens_behind_others() -> None:
    probabilities = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.1, 0.9], [0.125, 0.875]])
    # 1 behind 0, 0 behind 1; in the second piece 1 behind 1.
    expected = math.exp(-(math.log(0.5) + math.log(0.25)) / 2)
    assert perplexity(probabilities.log(), [[0, 1, 0], [1]]) == pytest.approx(expected)
    assert perplexity(probabilities.log(), [[0, 1], [1, 1]]) == pytest.approx(1 / math.sqrt(0.5 * 0.9))


def test_a_model_without_a_dense_ffn_is_refused() -> None:
    with progress_bars(False) as bars, pytest.raises(OptionError, match="carve: expected a dense gated FFN"):
        carve_model(before(""), CarveConfig(200, 1, 1), sequences(), PAGE_SIZE, bars)


def test_a_form_that_is_not_what_it_claims_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carve_moe, "_owners", lambda *given: carve_moe._weights(*given)["bias"])
    with progress_bars(False) as bars, pytest.raises(PassError, match="carve_moe"):
        carve_model(before(""), CarveConfig(4, 1, 1), sequences(), PAGE_SIZE, bars)


def test_the_whole_model_generates_the_same_tokens_and_composes(tmp_path: Path) -> None:
    model, params = tiny_llama.build(), octavo.SamplingParams(max_tokens=16)
    given = sequences(tiny_llama.VOCAB)
    dense = octavo.compile(model, progress=False, verify="off")
    wanted = [one.token_ids for one in dense.generate(PROMPTS, params)]
    whole = octavo.compile(
        model, progress=False, carve=CarveConfig(4, 1, 3), calibration=given, dump=tmp_path / "dump"
    )
    assert [one.token_ids for one in whole.generate(PROMPTS, params)] == wanted
    carving = Report.of(whole.artifact).data["carving"]
    assert carving["quality"]["kl"] < 1e-6 and carving["config"]["top_k"] == 3
    assert whole.artifact.manifest["provenance"]["carving"]["calibration"]["tokens"] == 118
    assert artifact_facts(whole.artifact)["carving"]["top_k"] == 3
    # From the dump of carve_moe, with the same weights, the same artifact.
    (path,) = (tmp_path / "dump").glob("*_carve_moe.py")
    resumed = octavo.resume(path, progress=False, verify="off")
    assert resumed.artifact.program == whole.artifact.program
    assert [one.token_ids for one in resumed.generate(PROMPTS, params)] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [octavo.Parallel(ep=3), octavo.Parallel(ep=2, dp=2)], ids=str)
def test_a_dense_model_is_served_by_ranks_of_experts(parallel: octavo.Parallel) -> None:
    model, params = tiny_llama.build(), octavo.SamplingParams(max_tokens=16)
    given = sequences(tiny_llama.VOCAB)
    dense = octavo.compile(model, progress=False, verify="off")
    spread = octavo.compile(
        model, progress=False, carve=CarveConfig(4, 1, 3), calibration=given, parallel=parallel
    )
    assert spread.artifact.program.mesh.world == parallel.world
    wanted, got = (one.generate(PROMPTS, params) for one in (dense, spread))
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]


def test_some_experts_in_four_bits() -> None:
    """Judged against the graph that is carved and quantised, as the model itself it is not."""
    config, given = CarveConfig(3, 1, 1), sequences(tiny_llama.VOCAB)  # widths of 16
    compiled = octavo.compile(
        tiny_llama.build(), progress=False, carve=config, calibration=given, quantize="nvfp4"
    )
    types = compiled.artifact.types()
    assert any("experts" in name and "nvfp4[2, " in text for name, text in types.items()), types
    assert not any("router" in name for name in types)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CarveConfig(1, 0, 1), "carve: expected num_experts of 2 to 4096, got 1"),
        (CarveConfig(4, 4, 1), "carve: expected num_shared of 0 to 3, got 4"),
        (CarveConfig(4, 1, 4), "carve: expected top_k of 1 to 3, got 4"),
        (CarveConfig(4, 1, 0), "carve: expected top_k of 1 to 3, got 0"),
        (CarveConfig(4, True, 1), "carve: expected num_shared of 0 to 3, got True"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(config: CarveConfig, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        octavo.compile(tiny_llama.build(), carve=config, calibration=[[1, 2, 3]])


def test_it_needs_calibration() -> None:
    with pytest.raises(OptionError, match=r"calibration: expected token ids.*carve chooses experts"):
        octavo.compile(tiny_llama.build(), progress=False, carve=CarveConfig(4, 1, 1))
