"""`octavo bisect`: which pass, and which of its rewrites, changes what a model computes."""

from pathlib import Path

from rich.console import Console

from octavo.compiler import bisect
from octavo.compiler.models import load_model
from octavo.compiler.options import DType
from octavo.compiler.progress import progress_bars


def run(
    model: str, output: Path, dtype: DType | None, page_size: int | None, max_model_len: int | None
) -> bool:
    """Print the table and the verdict; whether every pass is right."""
    with progress_bars() as bars:
        loaded = load_model(model, bars("load"))
        verdict = bisect.bisect(
            loaded.model,
            dtype=dtype,
            page_size=page_size,
            max_model_len=max_model_len,
            output=output,
            progress=bars("bisect"),
        )
    console = Console(highlight=False)
    console.print(verdict.table())
    console.print(verdict.text(), soft_wrap=True)
    return verdict.is_clean
