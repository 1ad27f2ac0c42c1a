"""Runs a graph on the CPU many times, quickly: what each node calls is settled once, and a run is a loop over calls.

ATen operators run by their CPU kernels, npu operators by ``npugraph_ex.operators``. This is eager mode without a device:
each result is rounded to the dtype that the graph gives it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.errors import AddressedError
from npugraph_ex.graph.streams.ops import ENTERS, EXITS, KEEP_ALIVES, RECORD_STREAMS, RECORDS, WAITS
from npugraph_ex.operators import formula_of, on_host

Argument = Callable[[Any], Any]

_ORDERING = frozenset((*ENTERS, *EXITS, *RECORDS, *WAITS, *RECORD_STREAMS, *KEEP_ALIVES))


_READS_CONTIGUOUS = frozenset({
    torch.ops.aten._embedding_bag.default,  # noqa: SLF001 - an operator's name
    torch.ops.aten._embedding_bag_forward_only.default,  # noqa: SLF001
})  # fmt: skip
"""Their kernels read indices and offsets as if these were contiguous; the functions of torch that call them make them so."""


class ReferenceUnavailableError(AddressedError, NotImplementedError):
    """An operator of the graph cannot run on the CPU."""


def _in_order(*args: Any, **kwargs: Any) -> None:
    """What scopes, records and waits do on the CPU, which runs everything in the order in which it is written."""
    del args, kwargs


@functools.cache
def callable_of(target: Any) -> Callable[..., Any]:
    """What computes ``target`` on the CPU."""
    if target in _ORDERING:
        return _in_order
    kernel = formula_of(target)
    if target in _READS_CONTIGUOUS:
        return _with_contiguous(target)
    if kernel is None and getattr(target, "namespace", "") != "npu":
        return target  # type: ignore[no-any-return]
    if kernel is None:
        raise ReferenceUnavailableError(
            f"there is no formula for {target._schema.name}; give it a record (npugraph_ex.operators.Operator)."
        )
    return kernel


def _with_contiguous(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
        return kernel(*given[0], **given[1])

    return run


def _laid_out_as(node: fx.Node, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` with results that lie in memory as the device's operator says; a formula does not care."""
    wanted = [_strides(fake) for fake in pytree.tree_leaves(node.meta.get("val"))]

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten(kernel(*args, **kwargs))
        return pytree.tree_unflatten(list(map(_relaid, leaves, wanted)), spec)

    return run


def _strides(fake: Any) -> tuple[int, ...] | None:
    """The strides of a fake tensor; None where they are symbolic, and then dense."""
    known = isinstance(fake, torch.Tensor) and all(isinstance(stride, int) for stride in fake.stride())
    return tuple(fake.stride()) if known else None


def _relaid(value: Any, strides: tuple[int, ...] | None) -> Any:
    if not isinstance(value, torch.Tensor) or value.stride() == strides:
        return value
    if strides and len(strides) != value.dim() and not value.numel():
        return value  # an absent result; torch_npu 2.10 describes it as if it were there
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value) if strides else value.contiguous()


class HostGraph:
    """A graph prepared for the CPU. Do not edit the graph afterwards.

    Args:
        gm: of ATen and npu operators.
        argument: what becomes of arguments that are no nodes.
        call: what computes an operator.

    Raises:
        ReferenceUnavailableError: the graph has an operator that cannot run on the CPU.
    """

    def __init__(
        self, gm: fx.GraphModule, argument: Argument = on_host, call: Callable[[Any], Any] | None = None
    ) -> None:
        self.placeholders = gm.graph.find_nodes(op="placeholder")
        self.calls = [
            (node, call(node.target) if call else _on_host(node), *_changed(node, argument))
            for node in gm.graph.nodes
            if node.op == "call_function"
        ]
        self.constants = {node: _constant(gm, node) for node in gm.graph.find_nodes(op="get_attr")}
        (output,) = gm.graph.find_nodes(op="output")
        self.outputs = pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)

    def run(self, inputs: Sequence[Any], *, keep: dict[fx.Node, Any] | None = None) -> list[Any]:
        """The outputs for ``inputs``, which the graph may write.

        Args:
            inputs: tensors on the CPU.
            keep: gets a copy, as it was then, of what each of its nodes computed.
        """
        values = self.start(inputs)
        with torch.no_grad():
            for node, function, args, kwargs in self.calls:
                values[node] = self.call(function, args, kwargs, values)
                if keep is not None and node in keep:
                    keep[node] = pytree.tree_map(copied, values[node])
        return self.results(values)

    def start(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        """The values that are there before the first call."""
        return {**dict(zip(self.placeholders, inputs, strict=True)), **self.constants}

    @staticmethod
    def call(function: Callable[..., Any], args: Any, kwargs: Any, values: Mapping[fx.Node, Any]) -> Any:
        """One call with nodes replaced by their values."""
        given, named = fx.map_arg((args, kwargs), values.__getitem__)
        try:
            return function(*given, **named)
        except NotImplementedError as error:
            raise ReferenceUnavailableError(f"{function} cannot run on the CPU: {error}") from error

    def results(self, values: Mapping[fx.Node, Any]) -> list[Any]:
        """The outputs, flat."""
        return [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in self.outputs]


def _on_host(node: fx.Node) -> Callable[..., Any]:
    function = callable_of(node.target)
    if function is node.target or node.target._schema.is_mutable:  # type: ignore[union-attr]
        return function
    return _laid_out_as(node, function)


class DeviceGraph(HostGraph):
    """The same loop on the device: every operator as the graph has it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, _as_it_is, _as_it_is)


def _as_it_is(value: Any) -> Any:
    return value


def copied(value: Any) -> Any:
    """A copy of a tensor, on the CPU; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.device.type == "cpu" else value.cpu()


def _changed(node: fx.Node, argument: Argument) -> tuple[Any, Any]:
    if node.target is operator.getitem:
        return node.args, node.kwargs
    kwargs = {name: _argument(value, argument) for name, value in node.kwargs.items()}
    return tuple(_argument(value, argument) for value in node.args), kwargs


def _argument(value: Any, change: Argument) -> Any:
    """An operator's argument, which is no deeper than a list, with ``change`` made to what is no node."""
    if isinstance(value, (list, tuple)):
        return [_argument(item, change) for item in value]
    return value if isinstance(value, fx.Node) else change(value)


def _constant(gm: fx.GraphModule, node: fx.Node) -> Any:
    value = operator.attrgetter(str(node.target))(gm)
    return value.cpu() if isinstance(value, torch.Tensor) else value
