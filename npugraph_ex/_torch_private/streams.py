"""The streams and events that Dynamo knows by numbers."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from npugraph_ex.versions.import_sources import torch_source


def traced_object(number: int) -> Any:
    """The stream or event object of a Dynamo number, during a compilation and at the start of each call."""
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    return get_external_object_by_index(number)


def was_made_while_tracing(number: int) -> bool:
    """Whether the compiled function makes the object itself, instead of getting it from the caller."""
    from torch._dynamo import graph_bytecode_inputs as table

    thing = table.get_external_object_by_index(number)
    return any(thing is made for made in table.keep_alive)


class _ObjectsByThread(dict[int, Any]):
    """A thread's own objects by number; those of the last call in any thread where it has none, such as in a backward."""

    def __init__(self, objects: Mapping[int, Any]) -> None:
        super().__init__(objects)
        self._own = threading.local()
        self._own.objects = dict(objects)

    def _here(self) -> dict[int, Any]:
        found: dict[int, Any] = self._own.__dict__.setdefault("objects", {})
        return found

    def clear(self) -> None:
        self._here().clear()
        super().clear()

    def update(self, objects: Mapping[int, Any]) -> None:  # type: ignore[override]
        self._here().update(objects)
        super().update(objects)

    def __setitem__(self, number: int, value: Any) -> None:
        self._here()[number] = value
        super().__setitem__(number, value)

    def __contains__(self, number: object) -> bool:
        return number in self._here() or super().__contains__(number)

    def __getitem__(self, number: int) -> Any:
        here = self._here()
        return here[number] if number in here else super().__getitem__(number)


class _KeptByThread(list[Any]):
    """What a thread keeps alive until it compiles again."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._own = threading.local()
        self._own.kept = kept

    def _here(self) -> list[Any]:
        found: list[Any] = self._own.__dict__.setdefault("kept", [])
        return found

    def append(self, thing: Any) -> None:
        self._here().append(thing)

    def clear(self) -> None:
        self._here().clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._here())


def traced_objects_by_thread() -> None:
    """Let each thread have its own table of these objects, and keep its own alive. Done once.

    The code that Dynamo puts around a graph writes a call's objects into one table of the process, and the graph reads them there.
    A call in another thread in between gave this call the other's streams, and a compilation there left it none.
    """
    from torch._dynamo import graph_bytecode_inputs as table

    if type(table.index_to_external_object_weakref) is dict:
        table.index_to_external_object_weakref = _ObjectsByThread(table.index_to_external_object_weakref)
        table.keep_alive = _KeptByThread(table.keep_alive)


def fetches_traced_object(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph only fetches a stream or event object."""
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    return node.target is get_external_object_by_index


def trace_as_constant_call(module: str, name: str) -> None:
    """Make Dynamo trace ``torch.<module>.<name>()`` as an object that the code around the graph fetches at each call.

    torch_npu does so for `current_stream` but not for `default_stream`. An existing registration stays.
    """
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    function = getattr(getattr(torch, module), name)

    def handle(self: object, tx: Any, *args: Any, **kwargs: Any) -> Any:
        del self, args, kwargs
        source = CallFunctionNoArgsSource(AttrSource(AttrSource(torch_source(), module), name))
        return VariableTracker.build(tx, function(), source)

    TorchInGraphFunctionVariable._get_handlers().setdefault(function, handle)
