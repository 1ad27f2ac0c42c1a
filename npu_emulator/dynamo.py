"""Keeps torch.compile out of the emulator: kernels are the device's inside, not part of the user's program.

A compiled frame that breaks runs operators between its parts, and Dynamo would trace the Python of their kernels as if the
user had written it. It asks `torch._dynamo.trace_rules` which packages to leave alone; importing that costs most of a second,
so programs that never compile do not pay for it: the rule is added when Dynamo is first imported.
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
    """Add this package to those that Dynamo does not trace, now or as soon as Dynamo is there."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        rules.add("npu_emulator")
    elif not any(isinstance(finder, _RulesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RulesFinder())


class _RulesFinder(MetaPathFinder):
    """Finds nothing itself: it lets the others find Dynamo's rules and adds one when they have been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Wrap the loader of the one module that matters, and go."""
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
