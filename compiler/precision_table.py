"""Formats of an artifact as tables: `precision` of report.json, which compiler/precision_report.py writes."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from octavo.compiler.report import plain_table, titled

Row = Mapping[str, Any]
ABOUT = (
    "KL: nats a token, of this product alone; weight, input: dB over quantisation noise; small: % of input blocks with "
    "a subnormal scale; tail: largest input over what 1 % of blocks stay below; growth: of it on held-out tokens"
)


def precision_tables(precision: Row) -> list[RenderableType]:
    """Products, pages that are quantised, and the quality of all together."""
    parts: list[RenderableType] = [_products(precision["products"])]
    quantised = [row for row in precision["pages"] if row["format"] != "bf16"]
    if quantised:
        parts.append(_pages(quantised))
    parts.append(Text(summary_line(precision)))
    if "checkpoint" in precision:
        notes = ("formats, codes and scales are those of its files", *precision["notes"])
        parts += [Text(f"from checkpoint {precision['checkpoint']}: {note}") for note in notes]
    return parts


def summary_line(precision: Row) -> str:
    """`5.39 bits a weight of 106.2 M; KL 0.021 +- 0.002 nats a token, top-1 94.1 % on 256 held-out tokens`."""
    said = []
    if precision["bits"] is not None:
        said.append(f"{precision['bits']:.2f} bits a weight of {precision['elements'] / 1e6:.1f} M")
    quality = precision["quality"]
    if quality is not None:
        said.append(
            f"KL {quality['kl']:.3g} +- {quality['kl_error']:.1g} nats a token, top-1 {100 * quality['top1']:.1f} % on "
            f"{quality['tokens']} held-out tokens"
        )
    return "; ".join(said) or "nothing is quantised"


def _products(rows: Sequence[Row]) -> RenderableType:
    prefix = shared_prefix(rows)
    names = ("module", "bits", "KL", "weight", "input", "small", "tail", "growth")
    table = plain_table(*names, left=("module",))
    kept: dict[str, int] = {}
    for row in rows:
        if row["format"] == "bf16" and not row["formats"]:
            reason = row["reason"]
            kept[reason] = kept.get(reason, 0) + 1
            continue
        own = row["formats"].get(row["format"], {})
        table.add_row(
            row["module"].removeprefix(prefix), f"{row['bits']:g}", _number(own.get("kl"), ".1e"),
            _number(own.get("sqnr_weight"), ".1f"), _number(own.get("sqnr_input"), ".1f"),
            _number(100 * row["subnormal"], ".1f") if own.get("sqnr_input") is not None else "-",
            _number(row["tail"], ".0f"), _number(row["growth"], ".2f"),
        )  # fmt: skip
    below = [Text(f"{count} in bf16: {reason}") for reason, count in kept.items()]
    title = f"formats of {len(rows)} products" + (f", all in {prefix.rstrip('.')}" if prefix else "")
    return titled(title, table, Text(ABOUT, "dim"), *below)


def shared_prefix(rows: Sequence[Row]) -> str:
    """What all modules of quantised products begin with, up to a dot: `model.layers.`."""
    modules = [row["module"] for row in rows if row["formats"]]
    same = itertools.takewhile(
        lambda parts: len(set(parts)) == 1, zip(*(m.split(".")[:-1] for m in modules), strict=False)
    )
    return "".join(f"{parts[0]}." for parts in same)


def _pages(rows: Sequence[Row]) -> RenderableType:
    table = plain_table("pages", "format", "keys", "values", left=("format",))
    for row in rows:
        table.add_row(
            str(row["pages"]), row["format"], f"{row['k_multiplier']:.3g}", f"{row['v_multiplier']:.3g}"
        )
    return titled("formats and multipliers of pages", table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
