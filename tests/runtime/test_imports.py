"""An artifact is served without the compiler: what importing the runtime loads."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "jinja2", "triton", "sympy", "transformers", "tokenizers", "safetensors", "scipy")
OURS = (
    "octavo.passes",
    "octavo.codegen",
    "octavo.compiler.ops",
    "octavo.compiler.pipeline",
    "octavo.compiler.api",
)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    paths = [path for path in sys.path if path]
    code = f"import sys; sys.path[:] = {paths!r}; {code}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["octavo.runtime", "octavo.runtime.engine", "octavo.runtime.tokenizer"])
def test_the_runtime_loads_no_compiler(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert not [name for name in (*HEAVY, *OURS) if name in loaded]


def test_the_check_sees_what_is_loaded() -> None:
    assert {"octavo.runtime.engine", "jinja2"} <= loaded_by("import octavo.runtime.engine; import jinja2")
