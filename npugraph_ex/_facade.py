"""Loads a package's public names on first use. Its `__init__.pyi` is the one list of them, for people, checkers and this.

lazy_loader's `attach_stub` does the same, but imports everything at once where the variable EAGER_IMPORT is set, and a
façade of this library is imported inside `import torch`.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path


class PublicNames:
    """The names that a package's stub re-exports.

    Args:
        package: its `__name__`.
        file: its `__file__`; the stub lies beside it and holds `from module import name as name` and nothing else.
    """

    def __init__(self, package: str, file: str) -> None:
        self._package = package
        stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
        imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
        self.home_of = {alias.name: str(statement.module) for statement in imports for alias in statement.names}
        self.exported = sorted(self.home_of)

    def load(self, name: str) -> object:
        """Give the package a public name from the module that defines it: what `__getattr__` of the package does."""
        home = self.home_of.get(name)
        if home is None:
            known = ", ".join(self.exported)
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}; its public names are {known}")
        if home == self._package:
            return import_module(f"{home}.{name}")
        value: object = getattr(import_module(home), name)
        setattr(sys.modules[self._package], name, value)
        return value

    def listed(self) -> list[str]:
        """List the public names, loaded or not, beside what else the package has: what `__dir__` of the package does."""
        return sorted({*vars(sys.modules[self._package]), *self.home_of})
