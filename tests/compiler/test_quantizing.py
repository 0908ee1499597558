"""The steps that quantise write what they made: graphs that load again, their types, and the plan."""

import json
from pathlib import Path

import pytest
import torch
from quantized_sites import graph_of, plan_of, quantized
from stages import logits, tokens

from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.dump_load import load_graph
from octavo.compiler.dump_summary import read_summary
from octavo.compiler.dump_weights import DumpedWeights
from octavo.compiler.errors import OptionError, PassError
from octavo.compiler.precision import PagePrecision, PrecisionPlan, plan_from_json, plan_to_json
from octavo.compiler.quantizing import BEFORE, PRECISION, QUANTIZE, QuantSettings, quantize
from octavo.compiler.view import page_data

FIRST = BEFORE + 1
FACTS = {"target": "cpu", "model": {"name": "tiny"}}


def dumped(folder: Path, start: int = 0, source: Path | None = None) -> tuple[torch.Tensor, DumpWriter]:
    """Logits after all steps, from the lowered graph or from a file of a dump."""
    dumps = DumpWriter(folder, facts=FACTS)
    if source is None:
        graph_module = graph_of("llama")
        plan = plan_of(graph_module, "nvfp4", 0.01, 99)
        plan.pages[0] = PagePrecision("fp8", 0.01, 0.02)
        dumps.write_start("00_capture", graph_module, "lowered")
    else:
        weights = DumpedWeights(source.parent, read_summary(source.parent)["weights"])
        graph_module = load_graph(source.read_text(), weights, str(source))
        plan = plan_from_json((source.parent / PRECISION).read_text(), PRECISION)
        dumps.write_start(source.stem, graph_module, "resumed")
    reports = quantize(graph_module, QuantSettings(plan, quantized, "linear"), QUANTIZE, dumps, start)
    assert len(reports) == len(QUANTIZE) - start
    dumps.write_summary([])
    return logits(graph_module, tokens(7)), dumps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("dump")
    return folder, dumped(folder)[0]


def test_each_step_is_dumped_behind_those_of_the_pipeline(whole: tuple[Path, torch.Tensor]) -> None:
    folder, _ = whole
    names = sorted(path.name for path in folder.glob("*.py"))[1:]
    assert names[0] == f"{FIRST + 1}_quantize_linear.py" and f"{FIRST + 3}_quantize_kv.py" in names
    text = (folder / names[0]).read_text()
    assert (
        '_codes": "u8[128, 32]",  # codes of ' in text and "nvfp4[128, 64] octavo-v1 max 256 linear" in text
    )
    entries = json.loads((folder / "summary.json").read_text())["steps"]
    assert [e["index"] for e in entries] == list(range(FIRST, FIRST + len(QUANTIZE)))
    linear = entries[1]
    assert (linear["exactness"], linear["proof"]["sites"]) == ("quantizes", 9)
    assert [step["name"] for step in page_data(folder)["steps"]][2] == "quantize_linear"


def test_going_on_from_a_dump_gives_the_same(whole: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, expected = whole
    for done, name in ((2, "quantize_linear"), (4, "quantize_kv")):
        source = folder / f"{FIRST + done - 1}_{name}.py"
        result, dumps = dumped(tmp_path / name, done, source)
        assert torch.equal(result, expected)
        last = sorted(folder.glob("*.py"))[-1].name
        assert dumps.texts[last].splitlines()[1:] == (folder / last).read_text().splitlines()[1:]


def test_a_step_that_fails_leaves_its_graph(tmp_path: Path) -> None:
    graph_module = graph_of("llama")
    dumps = DumpWriter(tmp_path, facts=FACTS)
    dumps.write_start("00_capture", graph_module, "lowered")

    def fails(*_: object) -> None:
        raise PassError("quantize_linear: no")

    settings = QuantSettings(plan_of(graph_module, "nvfp4", None), quantized, "linear", prove=fails)
    with pytest.raises(PassError, match="quantize_linear: no"):
        quantize(graph_module, settings, dumps=dumps)
    assert (tmp_path / f"{FIRST + 1}_quantize_linear.failed.py").is_file()
    assert read_summary(tmp_path)["error"]["step"] == "quantize_linear"


def test_the_plan_survives_as_text() -> None:
    plan = PrecisionPlan(
        plan_of(graph_of("llama"), "fp8", 0.1).products, {3: PagePrecision("nvfp4", 0.5, 0.25, "why")}
    )
    assert plan_from_json(plan_to_json(plan).decode(), "a.json") == plan
    with pytest.raises(OptionError, match=r"a.json: expected the plan of a dump, got: 'pages'"):
        plan_from_json('{"products": {}}', "a.json")
    with pytest.raises(OptionError, match=r"a.json: products: expected a format of .*, got 'fp7'"):
        plan_from_json(plan_to_json(plan).decode().replace('"fp8"', '"fp7"'), "a.json")


def test_a_plan_in_a_manifest_reads_back_to_the_same_text() -> None:
    """Keys are sorted on both ways, and of 12 caches "10" comes before "2" only where all are text."""
    plan = PrecisionPlan(pages={number: PagePrecision("fp8") for number in range(12)}).as_dict()
    text = json.dumps(plan, sort_keys=True)
    assert json.dumps(json.loads(text), sort_keys=True) == text
