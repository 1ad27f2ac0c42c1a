"""The streams and events that Dynamo knows by numbers."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

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
