"""`octavo check`: capture, rewrite and prove a model by its configuration alone, and plan its ranks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.compiler.check import check
from octavo.compiler.errors import OptionError
from octavo.compiler.options import Parallel, QuantConfig
from octavo.compiler.plan_plot import draw_plans
from octavo.compiler.report import mesh_text, plan_table, seconds_line


@dataclass(frozen=True)
class Choices:
    """What the user chose; the names are those of `octavo.check`. model: a configuration, see config_of."""

    model: str
    target: str
    page_size: int | None
    max_model_len: int | None
    max_batch_tokens: int
    quantize: QuantConfig | None
    parallel: tuple[Parallel, ...]


def run(choices: Choices, as_json: bool, plot: Path | None) -> None:
    """Tables of passes and plans; --json prints all of the report's data."""
    config = config_of(choices.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    report = check(
        model, choices.target, page_size=choices.page_size, max_model_len=choices.max_model_len,
        max_batch_tokens=choices.max_batch_tokens, quantize=choices.quantize, parallel=choices.parallel,
    )  # fmt: skip
    plans = report.data["plans"]
    if plot is not None:
        title = f"{config.model_type}, {count / 1e9:.1f} billion weights, {choices.target}"
        draw_plans(plot, plans, [mesh_text(row["parallel"]) for row in plans], title)
    if as_json:
        print(json.dumps({"weights": count, **report.data}))
        return
    console = Console(highlight=False)
    console.print(report.pass_table())
    if plans:
        console.print(plan_table(plans))
    print(
        f"{config.model_type}: {report.data['num_layers']} layers, {count / 1e9:.1f} billion weights; "
        f"{seconds_line(report.data['seconds'])}, of these proofs {report.data['proof_s']:.1f} s"
    )


def config_of(model: str) -> PretrainedConfig:
    """A configuration by its file, its directory, or a model type, which then has its default sizes.

    Raises OptionError for anything else.
    """
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        given = _read(path)
        kind = given.pop("model_type", None)
    else:
        given, kind = {}, model
    if kind not in CONFIG_MAPPING:
        raise OptionError(
            f"CONFIG: expected a config.json of Hugging Face, its directory, or a model type that transformers knows, "
            f"got {model}" + (f" of model type {kind!r}" if path.is_file() else "")
        )
    return CONFIG_MAPPING[kind](**given)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: expected JSON, got: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(f"{path}: expected the entries of a configuration, got {type(found).__name__}")
    # The meta device has no codes to decode: what is planned is quantised by --quantize.
    return {name: value for name, value in found.items() if name != "quantization_config"}
