"""What an artifact says of its formats: rows, the quality of all together, tables and the picture."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrated import lowered, observed, quantizer, sequences
from stages import SETTINGS

from octavo.compiler.errors import OptionError
from octavo.compiler.options import QuantConfig
from octavo.compiler.precision import PrecisionPlan
from octavo.compiler.precision_plot import draw_precision
from octavo.compiler.precision_report import PrecisionReport, Remembering
from octavo.compiler.precision_table import precision_tables, shared_prefix, summary_line
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.compiler.report import as_text
from octavo.compiler.sensitivity import measure
from octavo.passes.assign_precision import Choice, assign_precision


@cache
def report_of(config: QuantConfig, most_kl: float = 0.0, has_text: bool = True) -> dict[str, Any]:
    """Of the tiny Llama. "auto": every other product in FP8."""
    graph_module, plan, rows, choices = lowered(), PrecisionPlan(), None, None
    if config.mode == "auto":
        rows = measure(graph_module, config, observed(), quantizer, sequences(), SETTINGS.page_size)
        choices = {row.name: Choice("fp8" if i % 2 else "nvfp4", "by turns") for i, row in enumerate(rows)}
    assign_precision(graph_module, config, observed(), plan, choices)
    given = (observed(), sequences()) if has_text else (None, None)
    report = PrecisionReport(graph_module, given[0], plan, quantizer, given[1], SETTINGS.page_size, rows)
    quantize(graph_module, QuantSettings(plan, report.quantizer, "linear", config=config, choices=choices))
    found: dict[str, Any] = json.loads(json.dumps(report.finish(graph_module, most_kl), allow_nan=False))
    return found


def test_a_row_for_every_product_in_the_order_of_the_graph() -> None:
    found = report_of(QuantConfig("nvfp4"))
    assert [row["module"] for row in found["products"]][:2] == [
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
        "model.layers.0.self_attn.o_proj",
    ]
    assert [row["format"] for row in found["products"]] == ["nvfp4"] * 8 + ["bf16"]
    assert found["products"][-1]["reason"] == "makes the logits" and not found["products"][-1]["formats"]
    assert found["bits"] == 4.5 and found["elements"] == 2 * (128 * 64 + 64 * 64 + 192 * 64 + 96 * 64)
    assert [page["format"] for page in found["pages"]] == ["bf16", "bf16"]


def test_fixed_formats_have_ratios_of_inputs_and_weights() -> None:
    for row in report_of(QuantConfig("nvfp4"))["products"][:-1]:
        (values,) = row["formats"].values()
        assert 15 < values["sqnr_weight"] < 25 and 15 < values["sqnr_input"] < 25
        assert "kl" not in values
    for row in report_of(QuantConfig("nvfp4_weight_only"))["products"][:-1]:
        assert set(row["formats"]["nvfp4_weight_only"]) == {"sqnr_weight"}


def test_measured_rows_are_taken_over() -> None:
    found = report_of(QuantConfig("auto"))
    rows = measure(lowered(), QuantConfig("auto"), observed(), quantizer, sequences(), SETTINGS.page_size)
    for row, known in zip(found["products"], rows, strict=False):
        assert {format: values["kl"] for format, values in row["formats"].items()} == pytest.approx(known.kl)
        assert row["tail"] == pytest.approx(known.tail)
    assert 4.5 < found["bits"] < 8


def test_quality_is_that_of_the_quantised_graph() -> None:
    coarse, fine = (report_of(QuantConfig(mode))["quality"] for mode in ("nvfp4", "fp8"))
    assert coarse["tokens"] == fine["tokens"] == 20
    assert 0 < 4 * fine["kl"] < coarse["kl"] and 0 < coarse["kl_error"] < coarse["kl"]
    assert 0.5 < coarse["top1"] <= fine["top1"] <= 1


def test_without_calibration_there_is_no_quality() -> None:
    found = report_of(QuantConfig("fp8"), has_text=False)
    assert found["quality"] is None and found["products"][0]["growth"] is None
    assert "sqnr_weight" in found["products"][0]["formats"]["fp8"]


def test_too_large_a_divergence_is_an_error() -> None:
    with pytest.raises(OptionError, match="kl: expected at most 1e-06 nats a token, got 1"):
        report_of(QuantConfig("nvfp4"), most_kl=1e-6)


def test_weights_of_nvfp4_are_made_once() -> None:
    made = []

    def counted(*args: Any) -> Any:
        made.append(args[0])
        return quantizer(*args)

    remembering = Remembering(counted)
    weight = torch.eye(16)
    for format in ("nvfp4", "nvfp4_weight_only", "fp8", "nvfp4", "fp8"):
        remembering("w", weight, format)
    assert len(made) == 3


def test_tables_show_every_product_and_why_others_stayed() -> None:
    found = report_of(QuantConfig("auto", kv="nvfp4"))
    text = as_text(*precision_tables(found))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "formats of 9 products, all in model.layers" in text
    assert "1.self_attn.q_proj+k_proj+v_proj " in text and "1 in bf16: makes the logits" in text
    assert "formats and multipliers of pages" in text
    assert f"{found['bits']:.2f} bits a weight of 0.1 M; KL " in text
    assert shared_prefix([{"module": "a.bc.d", "formats": 1}, {"module": "a.be.d", "formats": 1}]) == "a."
    assert summary_line({"bits": None, "elements": 0, "quality": None}) == "nothing is quantised"


@pytest.mark.parametrize("mode", ["auto", "nvfp4", "fp8"])
def test_the_picture_is_drawn(mode: Any, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib.image")
    path = tmp_path / "formats.png"
    draw_precision(path, report_of(QuantConfig(mode)), "tiny")
    pixels = matplotlib.imread(path)
    assert pixels.shape[1] > 600 and len(np.unique(pixels.reshape(-1, 4), axis=0)) > 20


def test_pictures_have_names_and_something_to_show(tmp_path: Path) -> None:
    found = report_of(QuantConfig("fp8"), has_text=False)
    with pytest.raises(OptionError, match=r"a name that ends in \.svg or \.png"):
        draw_precision(tmp_path / "formats.pdf", found, "tiny")
    with pytest.raises(OptionError, match="expected products that are quantised"):
        draw_precision(tmp_path / "formats.svg", {**found, "products": found["products"][-1:]}, "tiny")
    draw_precision(tmp_path / "formats.svg", found, "tiny")
    assert "<svg" in (tmp_path / "formats.svg").read_text()
    assert math.isfinite(found["bits"])
