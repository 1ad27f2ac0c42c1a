"""The operators for scopes, streams and events in a graph.

They exist under `torch.ops.npugraph_ex` and, for passes written for TorchAir, under `torch.ops.air`:

* `scope_enter(keys, values)` and `scope_exit()` enclose the nodes between them;
* `record() -> Tensor` records an event on its stream; the result is a token, not data;
* `wait(tensors)` makes its stream wait for records, or for the producers of other tensors;
* `record_stream(tensor, stream)` declares that a stream uses a tensor, whose memory must not be freed before that work is over;
* `keep_alive(tensors)` only uses the tensors, so that their memory is not freed before it;
* `tagged_event_record(tag, event)` and `tagged_event_wait(tag, event)` are traced from `npugraph_ex.ops`: the event's tag,
  and a name that no other living event has. `passes.events` turns them into `record` and `wait`.

They have no tensor edges that would keep their order, so they are registered with torch as having side effects.
`npugraph_ex.aclgraph.scopes` registers their implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

NAMESPACES = ("npugraph_ex", "air")


def _no_result(*args: object) -> None:
    del args


def _token() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


_SCHEMAS: Mapping[str, tuple[str, Callable[..., object]]] = {
    "scope_enter": ("(str[] keys, str[] values) -> ()", _no_result),
    "scope_exit": ("() -> ()", _no_result),
    "record": ("() -> Tensor", _token),
    "wait": ("(Tensor[] tensors) -> ()", _no_result),
    "record_stream": ("(Tensor tensor, str stream) -> ()", _no_result),
    "keep_alive": ("(Tensor[] tensors) -> ()", _no_result),
    "tagged_event_record": ("(str tag, str event='') -> ()", _no_result),
    "tagged_event_wait": ("(str tag, str event='') -> ()", _no_result),
}


def _define(namespace: str) -> dict[str, torch.library.Library]:
    """Define the operators, except those that another library of this process has already defined."""
    defined = {}
    for name, (schema, fake) in _SCHEMAS.items():
        if hasattr(getattr(torch.ops, namespace), name):
            continue
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(f"{name}{schema}")
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        defined[name] = library
    return defined


_libraries = [_define(namespace) for namespace in NAMESPACES]


def _overloads(name: str) -> tuple[OpOverload, ...]:
    return tuple(getattr(getattr(torch.ops, namespace), name).default for namespace in NAMESPACES)


ENTERS = _overloads("scope_enter")
EXITS = _overloads("scope_exit")
RECORDS = _overloads("record")
WAITS = _overloads("wait")
RECORD_STREAMS = _overloads("record_stream")
KEEP_ALIVES = _overloads("keep_alive")
TAGGED_RECORDS = _overloads("tagged_event_record")
TAGGED_WAITS = _overloads("tagged_event_wait")

for _name in _SCHEMAS:
    for _operator in _overloads(_name):
        fx.has_side_effect(_operator)


def implement(functions: Mapping[str, Callable[..., object]]) -> None:
    """Register the implementations of the operators by name. Only the module that may touch the device calls this, once.

    Dynamo must not trace an implementation, even if the frame around it is not compiled.
    """
    for defined in _libraries:
        for name, function in functions.items():
            if name in defined:
                defined[name].impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """One argument of a node, passed by position or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
