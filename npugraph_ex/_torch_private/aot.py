"""What Dynamo and AOT know of a graph that they hand over: its inputs, its results, its two halves."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx

from npugraph_ex._torch_private.tensors import storage_key


def is_of_backward(node: fx.Node) -> bool:
    """Whether AOT traced ``node`` of a joint graph in the backward; its partitioner goes by the same mark."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def static_input_positions() -> tuple[int, ...]:
    """The positions of the inputs of the graph being compiled whose address AOT knows to be stable: parameters, buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return tuple(metadata.static_input_indices) if metadata is not None else ()


_Function = TypeVar("_Function", bound=Callable[..., Any])


def boxed(function: _Function) -> _Function:
    """Mark a function that takes its arguments in one list, so that AOT passes it the list that it has."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


@contextmanager
def sound_aot(inputs: Sequence[object]) -> Iterator[None]:
    """Settings under which AOT's own handling of aliased outputs is right.

    AOT makes an output that views an input anew after each call. With its default, torch 2.13 replays the views on the
    wrong base when inputs alias each other and one of them is written: wrong elements, or a failed assertion. The other
    way, by strides, has no such fault, but cannot tell that a view reinterprets the dtype; so it serves aliased inputs only.
    """
    import torch._functorch.config as settings

    storages = [storage_key(value) for value in inputs if isinstance(value, torch.Tensor)]
    with settings.patch(view_replay_for_aliased_outputs=len(set(storages)) == len(storages)):
        yield


def dynamo_input_names(gm: fx.GraphModule) -> list[str]:
    """What the user calls each input of a Dynamo graph, such as ``L['x']`` or ``L['self'].weight``, by position."""
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", None)
        text = str(name() if callable(name) else name or node.target)
        # Dynamo spells an attribute of a module by the dictionary that holds it.
        names.append(re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", text))
    return names


def aot_input_position(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph a placeholder of the AOT graph is; None where AOT made it up."""
    return getattr(node.meta.get("desc"), "idx", None)


def is_synthetic_base(node: fx.Node) -> bool:
    """Whether a placeholder is a whole storage, which AOT passes in place of the inputs that share it."""
    return type(node.meta.get("desc")).__name__ == "SyntheticBaseAOTInput"


def inputs_written_afterwards(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that AOT writes when the graph has run, with values that the graph returns."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    results = next(iter(graph.find_nodes(op="output"))).meta.get("desc") or ()
    written = [result.mutated_input for result in results if isinstance(result, InputMutationAOTOutput)]
    return [node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in written]


def is_plain_aot_graph(graph: fx.Graph) -> bool:
    """Whether inputs and outputs of an AOT graph are, one by one, those of the function that AOT was given.

    Otherwise AOT's own wrapper takes inputs apart or puts outputs together, and the graph is not all of the function. A
    graph that does not come from AOT has no such wrapper.
    """
    from torch._functorch._aot_autograd import descriptors

    inputs = [node.meta.get("desc") for node in graph.find_nodes(op="placeholder")]
    outputs = next(iter(graph.find_nodes(op="output"))).meta.get("desc")
    if outputs is None and not any(inputs):
        return True
    return all(
        isinstance(found, descriptors.PlainAOTInput) and found.idx == position for position, found in enumerate(inputs)
    ) and all(
        isinstance(found, descriptors.PlainAOTOutput) and found.idx == position
        for position, found in enumerate(outputs or ())
    )
