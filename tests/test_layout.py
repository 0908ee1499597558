"""The shape of the repository: layers, import names, sizes, light imports, and that nothing lies unused."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from layers import LAYERS

import octavo

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compiler", "passes", "codegen", "runtime")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


# An artifact is served without the compiler, so the runtime may use these leaves and nothing else.
RUNTIME_MAY_IMPORT = {
    "octavo.compiler.version",
    "octavo.compiler.errors",
    "octavo.compiler.expert_placement",
    "octavo.compiler.expression",
    "octavo.compiler.host",
    "octavo.compiler.mesh",
    "octavo.compiler.program",
    "octavo.compiler.artifact",
    "octavo.compiler.nvfp4",
}
# What ranks say to each other goes through torch.distributed. One rank alone loads none of it.
TORCH_IN_RUNTIME = {
    f"octavo.runtime.{name}" for name in ("collectives", "dispatchers", "plugins", "process_group", "wire")
}
NOT_IN_RUNTIME = ("torch", "jinja2", "triton", "sympy", "transformers", "octavo.passes", "octavo.codegen")

# Imports inside functions hide cycles. The few that stay are of optional extras or heavy and rarely needed.
LAZY_IMPORTS = {
    "compiler/huggingface.py": "transformers and gguf are the hf extra",
    "compiler/model_call.py": "transformers' registries are patched only if the model comes from there",
    "compiler/cli.py": "help and inspect must not wait for torch; each command imports its work",
    "compiler/cli_app.py": "bars are drawn by rich, which help does not wait for either",
    "compiler/cli_check.py": "as compiler/cli.py",
    "compiler/cli_kernels.py": "as compiler/cli.py",
    "compiler/cli_quantize.py": "as compiler/cli.py",
    "compiler/cli_train.py": "as compiler/cli.py",
    "compiler/figure.py": "matplotlib is the plot extra",
    "compiler/cli_balance.py": "as compiler/cli.py",
    "runtime/tokenizer.py": "tokenizers is the hf extra; token ids in and out need none",
}


def modules() -> dict[str, Path]:
    """Every module of the package by its import name, found in the real folders."""
    found = {"octavo": ROOT / "src/octavo/__init__.py"}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("octavo", *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(tree: ast.AST, known: set[str]) -> Iterator[tuple[str, int]]:
    """(module of ours, line) of each import below `tree`; a relative import yields its dots.

    `from octavo.x import y` is octavo.x.y if that is a module, else octavo.x.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names if a.name.split(".")[0] == "octavo")
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or ""), node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "octavo":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module or "", node.lineno


def layer(module: str) -> int | None:
    """The layer that the table gives a module; None if it has no place there."""
    if module in LAYERS:
        return LAYERS[module]
    while "." in module:
        module = module.rpartition(".")[0]
        if f"{module}.*" in LAYERS:
            return LAYERS[f"{module}.*"]
    return None


def edges(sources: dict[str, ast.Module]) -> Iterator[tuple[str, str, int]]:
    """(importing module, imported module, line)."""
    for module, tree in sources.items():
        yield from ((module, target, line) for target, line in imported(tree, set(sources)))


def layer_violations(sources: dict[str, ast.Module]) -> list[str]:
    found = [f"{m}: give it a place in LAYERS" for m in sources if layer(m) is None]
    for module, target, line in edges(sources):
        here, there = layer(module), layer(target)
        where = f"{module}:{line}: imports {target}"
        if target.startswith("."):
            found.append(f"{where}; write it absolute")
        elif here is None or there is None:
            continue  # said above, or no module of ours: python itself will complain
        elif there > here:
            found.append(f"{where} of layer {there} from layer {here}")
        elif here == LAYERS["octavo.runtime"] > there and target not in RUNTIME_MAY_IMPORT:
            found.append(f"{where}; the runtime may import {', '.join(sorted(RUNTIME_MAY_IMPORT))}")
    return found


def cycle(sources: dict[str, ast.Module]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for module, target, _ in edges(sources):
        graph.setdefault(module, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def parsed(**text: str) -> dict[str, ast.Module]:
    """Made-up modules for the tests of the checks; `__` in a name stands for a dot."""
    return {f"octavo.{name.replace('__', '.')}": ast.parse(source) for name, source in text.items()}


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.Module]:
    return {module: parse(path) for module, path in MODULES.items()}


def test_imports_go_down(sources: dict[str, ast.Module]) -> None:
    assert all(any(m.startswith(f"octavo.{folder}") for m in sources) for folder in FOLDERS)
    assert layer_violations(sources) == []


def test_no_import_cycle(sources: dict[str, ast.Module]) -> None:
    assert cycle(sources) == []


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        ("compiler__errors", "from octavo.compiler import options, verify", "layer 6 from layer 1"),
        ("passes__rule", "from octavo.passes.fuse_rope import fuse_rope", "layer 4 from layer 3"),
        ("passes__fuse_rope", "import octavo.codegen.kernel", "layer 5 from layer 4"),
        ("passes__fuse_rope", "def f():\n    from octavo.codegen import kernel", "layer 5 from layer 4"),
        ("runtime__engine", "from octavo.compiler.dump import show", "the runtime may import"),
        ("codegen__emit", "from octavo import compile", "imports octavo of layer 8"),
        ("codegen__emit", "from .kernel import Kernel", "write it absolute"),
        ("compiler__misc", "", "give it a place in LAYERS"),
    ],
)
def test_layer_check_sees(module: str, line: str, said: str) -> None:
    others = dict.fromkeys(("compiler__options", "compiler__verify", "compiler__dump", "codegen__kernel"), "")
    violations = layer_violations(parsed(**others, **{module: line}))
    assert len(violations) == 1 and said in violations[0]


def test_cycle_check_sees() -> None:
    a, b = "from octavo.passes import b", "from octavo.passes.a import f"
    assert cycle(parsed(passes__a=a, passes__b="")) == []
    assert set(cycle(parsed(passes__a=a, passes__b=b))) == {"octavo.passes.a", "octavo.passes.b"}


def test_no_imports_inside_functions(sources: dict[str, ast.Module]) -> None:
    found = [
        f"{MODULES[module].relative_to(ROOT)}:{node.lineno}"
        for module, tree in sources.items()
        if str(MODULES[module].relative_to(ROOT)) not in LAZY_IMPORTS
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert found == [], "import at the top, or give the file a reason in LAZY_IMPORTS"


def test_ruff_bans_the_generic_names() -> None:
    planted = (
        "import compiler.errors\nimport runtime\nfrom codegen import kernel\nfrom passes.rule import Rule\n"
    )
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise"]
    result = subprocess.run(
        [*command, "--stdin-filename", "passes/planted.py", "-"],
        input=planted,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    banned = [line for line in result.stdout.splitlines() if "TID251" in line]
    assert len(banned) == 4, result.stdout + result.stderr
    assert all(f"octavo.{name}" in result.stdout for name in FOLDERS)


def functions(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            yield lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def test_files_and_functions_stay_small(print_at_end: Callable[[str, list[str]], None]) -> None:
    folders = (*FOLDERS, "src/octavo", "tests", "examples", "benchmarks")
    python = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts = [*python, *(ROOT / "codegen/templates").rglob("*.jinja")]
    files = sorted(((len(t.read_text().splitlines()), str(t.relative_to(ROOT))) for t in texts), reverse=True)
    longest = sorted((item for path in python for item in functions(path)), reverse=True)
    rows = [f"{count:5}  {name}" for table in (files[:8], longest[:8]) for count, name in table]
    print_at_end(f"largest of {len(files)} files and {len(longest)} functions", rows)
    assert [f for f in files if f[0] > MAX_FILE_LINES] == []
    assert [f for f in longest if f[0] > MAX_FUNCTION_LINES] == []


def loaded_by(statement: str, cwd: Path) -> set[str]:
    """Names in sys.modules after a statement in a new interpreter that sees only src."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=cwd, env=environment
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_import_is_light(tmp_path: Path) -> None:
    loaded = loaded_by("import octavo; octavo.__version__; octavo.errors.OctavoError", tmp_path)
    assert "octavo.compiler.errors" in loaded
    assert loaded.isdisjoint({*NOT_IN_RUNTIME, "numpy", "rich", "octavo.compiler.api"})


def test_runtime_loads_no_compiler(tmp_path: Path) -> None:
    names = [m for m in MODULES if m.startswith("octavo.runtime") and m not in TORCH_IN_RUNTIME]
    assert len(names) > 5
    loaded = loaded_by(f"import {', '.join(names)}", tmp_path)
    assert "octavo.runtime.engine" in loaded
    assert loaded & set(NOT_IN_RUNTIME) == set()


def test_public_names_exist() -> None:
    assert [name for name in octavo.__all__ if getattr(octavo, name, None) is None] == []
    with pytest.raises(AttributeError, match="has no attribute 'complie'; it has CarveConfig, "):
        octavo.complie  # noqa: B018


def test_every_pass_has_its_tests() -> None:
    passes = [m.rpartition(".")[2] for m in MODULES if m.startswith("octavo.passes.")]
    missing = [name for name in passes if not (ROOT / f"tests/passes/test_{name}.py").exists()]
    assert passes
    assert missing == []


def test_every_template_is_used() -> None:
    templates = sorted((ROOT / "codegen/templates").rglob("*.jinja"))
    users = [*(ROOT / "codegen").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *templates]
    unused = []
    for template in templates:
        stem = template.name.split(".")[0]
        named = re.compile(rf"""["'/]{re.escape(stem)}(\.(py|cpp)\.jinja)?["']""")
        if not any(named.search(user.read_text()) for user in users if user != template):
            unused.append(str(template.relative_to(ROOT)))
    assert templates
    assert unused == []


def test_version_is_the_same_everywhere() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert octavo.__version__ == stated
