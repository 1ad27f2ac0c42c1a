"""Imports torch's pattern matcher without Inductor's lowering.

The matcher's module takes one function from ``torch._inductor.lowering``, for passes that generate code. Its import brings all
kernels and templates of Inductor: half of the processor time of a small function's first call. So that function is looked up
when something calls it, which this library's own matching never does.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_MATCHER, _LOWERING = "torch._inductor.pattern_matcher", "torch._inductor.lowering"
_FUNCTION = "fallback_node_due_to_unsupported_type"


def import_matcher() -> None:
    """Import the matcher, unless it or the lowering is there; afterwards the lowering can be imported as ever."""
    if _MATCHER in sys.modules or _LOWERING in sys.modules:
        return
    sys.modules[_LOWERING] = standing_in = _StandIn(_LOWERING)
    try:
        importlib.import_module(_MATCHER)
    finally:
        standing_in.leave()


class _StandIn(ModuleType):
    """Stands for the lowering while the matcher is imported; what else is asked of it brings the real one."""

    def leave(self) -> None:
        """Let the next import find the real one."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        if name == _FUNCTION:
            return _unsupported
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_LOWERING), name)


def _unsupported(*args: Any, **kwargs: Any) -> Any:
    """What torch's function answers; its own passes ask it for each node."""
    return getattr(importlib.import_module(_LOWERING), _FUNCTION)(*args, **kwargs)
