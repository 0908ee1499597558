"""The public surface of Octavo. Names load on first use, so `import octavo` costs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.compiler.version import VERSION

if TYPE_CHECKING:
    from octavo.compiler import errors as errors
    from octavo.compiler.api import compile as compile
    from octavo.compiler.backend_report import backend_report as backend_report
    from octavo.compiler.check import check as check
    from octavo.compiler.compiled import Compiled as Compiled
    from octavo.compiler.compiled import load as load
    from octavo.compiler.models import load_model as load_model
    from octavo.compiler.options import CarveConfig as CarveConfig
    from octavo.compiler.options import CompileOptions as CompileOptions
    from octavo.compiler.options import Parallel as Parallel
    from octavo.compiler.options import QuantConfig as QuantConfig
    from octavo.compiler.resume import resume as resume
    from octavo.runtime.sampling_params import SamplingParams as SamplingParams
    from octavo.runtime.sampling_params import Structured as Structured
    from octavo.runtime.speculative.options import Speculate as Speculate

# public name -> the module that defines it; `errors` is the module itself
_HOME = {
    "Compiled": "octavo.compiler.compiled",
    "backend_report": "octavo.compiler.backend_report",
    "check": "octavo.compiler.check",
    "compile": "octavo.compiler.api",
    "load": "octavo.compiler.compiled",
    "load_model": "octavo.compiler.models",
    "resume": "octavo.compiler.resume",
    "CarveConfig": "octavo.compiler.options",
    "CompileOptions": "octavo.compiler.options",
    "Parallel": "octavo.compiler.options",
    "QuantConfig": "octavo.compiler.options",
    "SamplingParams": "octavo.runtime.sampling_params",
    "Speculate": "octavo.runtime.speculative.options",
    "Structured": "octavo.runtime.sampling_params",
    "errors": "octavo.compiler.errors",
}

__all__ = [
    "CarveConfig", "CompileOptions", "Compiled", "Parallel", "QuantConfig", "SamplingParams", "Speculate",
    "Structured",
    "__version__", "backend_report", "check", "compile", "errors", "load", "load_model", "resume",
]  # fmt: skip

__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = import_module(_HOME[name])
    value = module if name == "errors" else getattr(module, name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
