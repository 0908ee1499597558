"""Every error that a user can meet is one of ours, says what it is for, and is raised somewhere."""

import inspect
from pathlib import Path

import pytest

from octavo.compiler import errors
from octavo.compiler.errors import CodegenError, OctavoError, ToolchainError

ROOT = Path(__file__).resolve().parents[2]
CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("error", CLASSES)
def test_has_a_base_a_sentence_and_a_use(error: type[Exception]) -> None:
    assert issubclass(error, OctavoError)
    assert error.__doc__ and error.__doc__.endswith(".")
    if error is not OctavoError:
        folders = ("compiler", "passes", "codegen", "runtime")
        sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
        assert any(f"raise {error.__name__}(" in text for text in sources)


def test_a_missing_toolchain_is_a_failure_of_code_generation() -> None:
    assert issubclass(ToolchainError, CodegenError)
    assert len(CLASSES) > 10


def test_imports_nothing_of_ours() -> None:
    assert "import" not in inspect.getsource(errors).replace("imports nothing of ours", "")
