"""`summary.json` of a dump: what the other files are, and what every step did. Read without torch."""

import json
from pathlib import Path
from typing import Any

from octavo.compiler.errors import OptionError

SUMMARY = "summary.json"
FORMAT_VERSION = 1
_KEYS = {"start", "steps", "error", "weights", "target", "model"}


def read_summary(directory: Path) -> dict[str, Any]:
    """Raises OptionError for a directory that holds no dump."""
    path = directory / SUMMARY
    advice = "`octavo compile MODEL --dump DIR` writes one"
    if not path.is_file():
        got = f"no {SUMMARY} in it" if directory.is_dir() else "no such directory"
        raise OptionError(f"{directory}: expected a dump, got {got}; {advice}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: expected JSON, got: {error}; {advice}") from None
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise OptionError(f"{path}: expected format_version {FORMAT_VERSION}, got {version}; {advice}")
    missing = sorted(_KEYS - set(data))
    if missing:
        raise OptionError(f"{path}: expected {', '.join(sorted(_KEYS))}, got no {missing[0]}; {advice}")
    return dict(data)
