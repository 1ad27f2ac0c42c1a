"""Keeps torch.compile out of the emulator: kernels belong to the device and not to the user's program.

A compiled frame with a graph break runs operators between its parts, and Dynamo would trace the Python code of their kernels.
`torch._dynamo.trace_rules` lists the packages that Dynamo does not trace. Its import takes most of a second, so this module
adds its rule only when Dynamo is first imported.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["leave_us_alone"]

_RULES = "torch._dynamo.trace_rules"


def leave_us_alone() -> None:
    """Add this package to those that Dynamo does not trace, now or at Dynamo's import."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        rules.add("npu_emulator")
    elif not any(isinstance(finder, _RulesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RulesFinder())


class _RulesFinder(MetaPathFinder):
    """Adds a rule when Dynamo's rules have been loaded; other finders find the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Wrap the loader of Dynamo's rules, and remove this finder."""
        del path, target
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RulesLoader(spec.loader)
        return spec


class _RulesLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.add("npu_emulator")
