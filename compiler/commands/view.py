"""`octavo view`: a dump as one HTML page."""

import sys
import webbrowser
from pathlib import Path

from octavo.compiler.errors import OptionError
from octavo.compiler.report import size_text
from octavo.compiler.view import page


def run(dump: Path, output: Path | None, open_it: bool) -> None:
    """Write the page; its path goes to standard output, its size to standard error."""
    path = dump / "view.html" if output is None else output
    text = page(dump).encode()
    try:
        path.write_bytes(text)
    except OSError as error:
        raise OptionError(f"output: expected to write {path}, got: {error}") from None
    print(f"{size_text(len(text))}, needs no network", file=sys.stderr)
    print(path)
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        print(f"octavo: no browser could be started; open {path} yourself", file=sys.stderr)
