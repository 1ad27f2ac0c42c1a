"""What a module of torch keeps to itself."""

from __future__ import annotations

from typing import Any

from torch import nn

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of(module: nn.Module) -> list[Any]:
    """The functions that a module calls before and after itself, forward and backward, in the order of their registration."""
    return [hook for table in _TABLES for hook in getattr(module, table).values()]
