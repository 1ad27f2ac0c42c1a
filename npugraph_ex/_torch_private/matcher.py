"""Imports torch's pattern matcher without Inductor's lowering and decompositions.

The matcher's module takes one function from each of them, which this library's matching never calls. Their imports bring all
kernels and templates of Inductor: more than half of the processor time of a small function's first call. So these functions
are looked up when something calls them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import MappingProxyType, ModuleType
from typing import Any

_MATCHER = "torch._inductor.pattern_matcher"
_FUNCTIONS = MappingProxyType(
    {
        "torch._inductor.lowering": "fallback_node_due_to_unsupported_type",
        "torch._inductor.decomposition": "select_decomp_table",
    }
)
"""What the matcher takes, by the module that has it."""


def import_matcher() -> None:
    """Import the matcher if it is not there; afterwards the two modules can be imported as ever."""
    if _MATCHER in sys.modules:
        return
    standing_in = [_StandIn(name) for name in _FUNCTIONS if name not in sys.modules]
    sys.modules.update({one.__name__: one for one in standing_in})
    try:
        importlib.import_module(_MATCHER)
    finally:
        for one in standing_in:
            one.leave()


class _StandIn(ModuleType):
    """Stands for a module while the matcher is imported; what else is asked of it brings the real one."""

    def leave(self) -> None:
        """Let the next import find the real module."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        if name == _FUNCTIONS[self.__name__]:
            return _later(self.__name__, name)
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)


def _later(module: str, name: str) -> Callable[..., Any]:
    """The function of the module, which its first call imports."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call
