"""Runs a module on a machine where libraries that only draw tables or write dumps are not installed.

    python -m benchmarks.device_bare benchmarks.device_end_to_end --target h100 --output artifact

In place of each that is missing stands a package of empty classes: imports succeed, and whatever would draw fails.
Compiling without bars and dumps needs none of them.
"""

import importlib.abc
import importlib.machinery
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NOT_NEEDED = ("rich", "safetensors")


class Empty(ModuleType):
    """A package whose every name is a class without anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the missing packages and all that is below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: there is no code."""


def main() -> None:
    missing = [name for name in NOT_NEEDED if find_spec(name) is None]
    sys.meta_path.append(Finder(missing))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
