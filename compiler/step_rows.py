"""What each pass did, as data: full entries for `summary.json`, counts for `report.json` and its tables."""

import re
from collections.abc import Sequence
from typing import Any

from octavo.passes.rule import PassReport, Rejection

MAX_REASONS = 20
_SOURCE = re.compile(r"\S+:\d+")


def step_entry(report: PassReport) -> dict[str, Any]:
    """Everything that a report says; rejected and nearly matched places with their module and source line."""
    return {
        "name": report.name,
        "matched": report.matched,
        "rejected": [_place(r) for r in report.rejected],
        "near_misses": [_place(r) for r in report.near_misses],
        "nodes_before": report.nodes_before,
        "nodes_after": report.nodes_after,
        "ms": round(report.ms, 1),
        "exactness": report.exactness,
        "proof": {
            "sites": report.proof.sites,
            "worst_error": report.proof.worst,
            "error_bound": report.proof.bound,
        },
        "notes": report.notes,
    }


def _place(rejection: Rejection) -> dict[str, str]:
    """`node a, model.layers.0, modeling.py:5` in its parts; "" for a part that is not known."""
    parts = rejection.where.split(", ")[1:]
    source = parts.pop() if parts and _SOURCE.fullmatch(parts[-1]) else ""
    return {
        "node": rejection.node,
        "module": ", ".join(parts),
        "source": source,
        "reason": rejection.reason,
    }


def summary(reports: Sequence[PassReport]) -> list[dict[str, Any]]:
    """One row for each pass, as `report.json` and the tables of the command line hold them."""
    rows = []
    for report in reports:
        entry = step_entry(report)
        proof = entry.pop("proof")
        reasons = [f"{x.where}: {x.reason}" for x in (*report.rejected, *report.near_misses)]
        rows.append(
            {
                **entry,
                "pass": entry.pop("name"),
                "rejected": len(report.rejected),
                "near_misses": len(report.near_misses),
                "proven_sites": proof["sites"],
                "worst_error": proof["worst_error"],
                "error_bound": proof["error_bound"],
                "reasons": reasons[:MAX_REASONS],
            }
        )
    return rows
