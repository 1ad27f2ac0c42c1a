"""The operators that open and close a scope: how a `with` block of the user's survives tracing.

`scope_enter(keys, values)` and `scope_exit()` take and return no tensor, so nothing but their place in the node list
says what they enclose; torch is told that they have side effects, and keeps place and order. They exist under
`torch.ops.npugraph_ex` and, for passes written for TorchAir, under `torch.ops.air`. What they do when they run is
registered by `npugraph_ex.aclgraph.scopes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

NAMESPACES = ("npugraph_ex", "air")


def _define(namespace: str) -> torch.library.Library | None:
    """Define both operators; None where another library of this process already did."""
    if hasattr(getattr(torch.ops, namespace), "scope_enter"):
        return None
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("scope_enter(str[] keys, str[] values) -> ()")
    library.define("scope_exit() -> ()")
    torch.library.register_fake(f"{namespace}::scope_enter", _fake_enter, lib=library)
    torch.library.register_fake(f"{namespace}::scope_exit", _fake_exit, lib=library)
    return library


def _fake_enter(keys: Sequence[str], values: Sequence[str]) -> None:
    del keys, values


def _fake_exit() -> None:
    return None


_libraries = [library for library in map(_define, NAMESPACES) if library is not None]

ENTERS: tuple[OpOverload, ...] = tuple(getattr(torch.ops, name).scope_enter.default for name in NAMESPACES)
EXITS: tuple[OpOverload, ...] = tuple(getattr(torch.ops, name).scope_exit.default for name in NAMESPACES)

for _operator in (*ENTERS, *EXITS):
    fx.has_side_effect(_operator)


def implement(enter: Callable[[Sequence[str], Sequence[str]], None], leave: Callable[[], None]) -> None:
    """Say what the operators do when they run; called once, by the module that may touch the device."""
    for library in _libraries:
        library.impl("scope_enter", enter, "CompositeExplicitAutograd")
        library.impl("scope_exit", leave, "CompositeExplicitAutograd")
