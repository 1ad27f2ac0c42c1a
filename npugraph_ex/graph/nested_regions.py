"""Puts the operators of nested compile regions in place of their calls.

With `torch.compiler.nested_compile_region`, Dynamo and AOT trace equal layers once, and AOT's graph calls one subgraph for
each layer. The passes need the operators themselves: a fusion may cross the border of a region, and what is known about memory
and streams is known for operators. So the graph becomes what it would be without regions; the time of the tracing is saved.

A region that writes its arguments is called by a wrapper of AOT's. It returns the results and the new values of the bases: the
tensors that the written arguments are, or are views of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.errors import CaptureError
from npugraph_ex.graph import metadata
from npugraph_ex.graph.operators import schema_of
from npugraph_ex.graph.source import source_line

_CALL = torch.ops.higher_order.invoke_subgraph
_WRITE = torch.ops.aten.copy_.default
_OF_ONE_CALL = ("val", "tensor_meta", "nn_module_stack")
"""Metadata of a region's operators that is true of its first call only: the module is another layer in the next."""


def all_graphs(graph: fx.Graph) -> Iterator[fx.Graph]:
    """``graph``, and the subgraphs of its operators: nested regions, branches of `torch.cond`."""
    yield graph
    for name in dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr")):
        value = attrgetter(name)(graph.owning_module)
        if isinstance(value, fx.GraphModule):
            yield from all_graphs(value.graph)


def inline(gm: fx.GraphModule) -> None:
    """Inline the nested compile regions of ``gm``, in place, also those that lie in others. New nodes get their metadata.

    A region in which sizes depend on data stays a call: each call has symbols of its own for them, which nobody could make
    anew.

    Raises:
        CaptureError: such a region writes its arguments.
    """
    regions: dict[str, _NestedRegion] = {}
    for node in list(gm.graph.nodes):
        call = _RegionCall.of(node)
        if call is None:
            continue
        name = str(call.subgraph.target)
        if name not in regions:
            regions[name] = _NestedRegion(gm, name)
        if regions[name].is_known:
            regions[name].replace(call)
        elif call.written:
            raise CaptureError(
                f"{source_line(call.node) or call.node.name} calls a nested compile region that writes its arguments and has "
                "sizes that depend on data. Leave torch.compiler.nested_compile_region out for this function"
            )
    used = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    for name in regions.keys() - used:
        gm.delete_submodule(name)
    if regions:
        gm.recompile()


@dataclass(frozen=True)
class _RegionCall:
    """One call of a region.

    Attributes:
        node: the call.
        subgraph: the node that gets the region.
        operands: the region's arguments. Of an argument that is written, its base.
        bases: the tensors that are written, or whose views are.
        written: for each argument that is written, by position, the number of its base and how it is a view of that.
    """

    node: fx.Node
    subgraph: fx.Node
    operands: tuple[Any, ...]
    bases: tuple[fx.Node, ...] = ()
    written: Mapping[int, tuple[int, _WrittenPart]] = field(default_factory=dict)

    @classmethod
    def of(cls, node: fx.Node) -> _RegionCall | None:
        """The call that ``node`` is; None if it is none."""
        if node.target is _CALL:
            return cls(node, node.args[0], node.args[2:])  # type: ignore[arg-type]
        if node.target not in _torch_private.auto_functionalized_operators() or _CALL not in node.args:
            return None
        given: dict[str, Any] = dict(node.kwargs)
        bases, operands, written = tuple(given["_all_bases"]), list[Any](), dict[int, tuple[int, _WrittenPart]]()
        while (name := f"arg{len(operands)}") in given or f"_{name}_base_index" in given:
            base = given.get(f"_{name}_base_index")
            if base is not None:
                begin = node.meta["val"][base - len(bases)].storage_offset()  # the new bases are the last results
                written[len(operands)] = base, _WrittenPart.of(given, name, begin)
            operands.append(given.get(name) if base is None else bases[base])
        return cls(node, given["subgraph"], tuple(operands), bases, written)


@dataclass(frozen=True)
class _WrittenPart:
    """How a written argument is a view of its base: the arguments of `aten.slice`, those of `aten.as_strided`, or all of it.

    Attributes:
        begin: where the base begins in its storage, as AOT sees it; `aten.as_strided` counts from the storage's first element.
    """

    arguments: tuple[Any, ...] = ()
    taken_by: Callable[..., Any] | None = None
    put_by: Callable[..., Any] | None = None
    begin: Any = 0

    @classmethod
    def of(cls, given: Mapping[str, Any], name: str, begin: Any) -> _WrittenPart:
        """The view that AOT's wrapper describes for one argument, whose base begins at ``begin``."""
        if f"_{name}_slice_dim" in given:
            arguments = tuple(given[f"_{name}_slice_{part}"] for part in ("dim", "start", "end"))
            return cls(arguments, torch.ops.aten.slice.Tensor, torch.ops.aten.slice_scatter.default)
        if f"_{name}_size" in given:
            arguments = tuple(given[f"_{name}_{part}"] for part in ("size", "stride", "storage_offset"))
            return cls(arguments, torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default, begin)
        return cls()

    def within(self, base: fx.Node) -> tuple[Any, ...]:
        """The arguments for a base that perhaps begins elsewhere: in AOT's graph a new base begins where the old one did.

        Raises:
            CaptureError: only a symbol says where the view begins.
        """
        now = base.meta["val"].storage_offset()
        if self.taken_by is not torch.ops.aten.as_strided.default or metadata.same_numbers([now], [self.begin]):
            return self.arguments
        size, stride, offset = self.arguments
        there = offset.meta["val"] if isinstance(offset, fx.Node) else offset
        if metadata.same_numbers([there], [self.begin]):
            return size, stride  # by default the view begins where the base does
        if all(isinstance(number, int) for number in (there, self.begin, now)):
            return size, stride, there - self.begin + now
        raise CaptureError(
            f"a nested compile region writes {base.name}, and then a view of it that begins at {there}. "
            "Leave torch.compiler.nested_compile_region out for this function"
        )


class _NestedRegion:
    """One subgraph that ``gm`` calls, with its metadata for the first call."""

    def __init__(self, gm: fx.GraphModule, name: str) -> None:
        self._gm = gm
        self._name = name
        self._module = cast("fx.GraphModule", gm.get_submodule(name))
        inline(self._module)
        self._first: tuple[tuple[Any, ...], Mapping[fx.Node, Any]] | None = None
        self._mode = metadata.fake_mode_of(gm.graph)

    @property
    def is_known(self) -> bool:
        """Whether the metadata of its operators can be derived for another call."""
        return not any("unbacked_bindings" in node.meta for node in self._module.graph.nodes)

    def replace(self, call: _RegionCall) -> None:
        """Put copies of the region's operators in place of ``call``."""
        with self._gm.graph.inserting_before(call.node):
            operands = list(call.operands)
            for position, (_, view) in call.written.items():
                if view.taken_by is not None:
                    operands[position] = self._new(
                        view.taken_by, (operands[position], *view.within(operands[position]))
                    )
            results, writes = self._copied(tuple(operands))
            bases = list(call.bases)
            for position, value in writes.items():
                base, view = call.written[position]
                bases[base] = self._after_write(bases[base], view, value)
        values = (*results, *bases)
        for user in list(call.node.users):
            user.replace_all_uses_with(values[user.args[1]])  # type: ignore[index]  # a number
            self._gm.graph.erase_node(user)
        arguments = call.node.all_input_nodes
        self._gm.graph.erase_node(call.node)
        for node in arguments:
            if node.op == "get_attr" and not node.users:
                self._gm.graph.erase_node(node)

    def _copied(self, operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[int, fx.Node]]:
        """Copies of the operators for these arguments: the results, and what is written into arguments, by position."""
        placeholders = self._module.graph.find_nodes(op="placeholder")
        twins: dict[fx.Node, Any] = dict(zip(placeholders, operands, strict=True))
        known = self._first[1] if self._first and all(map(metadata.alike, self._first[0], operands)) else {}
        writes: dict[int, fx.Node] = {}
        for node in self._module.graph.nodes:
            if node.op == "get_attr":
                twins[node] = self._constant(node)
            elif node.target is _WRITE and node.args[0] in placeholders:
                writes[placeholders.index(node.args[0])] = twins[node.args[1]]
            elif node.op == "call_function":
                twin = twins[node] = self._gm.graph.node_copy(node, twins.__getitem__)
                outdated = _OF_ONE_CALL if self._first else ("val", "tensor_meta")
                twin.meta = {key: value for key, value in node.meta.items() if key not in outdated}
                twin.meta["val"] = _value(twin, known.get(node, node), self._mode, known=node in known)
        self._first = self._first or (operands, twins)
        results: Any = fx.map_arg(self._module.graph.output_node().args[0], twins.__getitem__)
        return tuple(results), writes

    def _after_write(self, base: fx.Node, view: _WrittenPart, value: fx.Node) -> fx.Node:
        """The base after ``value`` was written into its view; its metadata stays."""
        if view.put_by is not None:
            return self._new(view.put_by, (base, value, *view.within(base)))
        if metadata.alike(base, value):
            return value
        return self._new(torch.ops.aten.copy.default, (base, value))

    def _new(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        node = self._gm.graph.call_function(target, args)
        node.meta["val"] = metadata.derive(node, self._mode)
        return node

    def _constant(self, node: fx.Node) -> fx.Node:
        """A constant of the region, or a subgraph of one of its operators, as one of ``gm``, which all calls share."""
        name = f"{self._name}_{node.target}".replace(".", "_")
        if not hasattr(self._gm, name):
            value = attrgetter(str(node.target))(self._module)
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self._gm.register_buffer(name, value)
            else:
                setattr(self._gm, name, value)
        twin = self._gm.graph.get_attr(name)
        twin.meta = dict(node.meta)
        return twin


def _value(node: fx.Node, like: fx.Node, mode: FakeTensorMode | None, *, known: bool) -> Any:
    """The metadata of ``node``, in memory of its own where the operator makes new memory.

    Args:
        node: a copy of a region's operator.
        like: the same operator for a call whose arguments have the same metadata, or that of the region.
        mode: the graph's fake mode.
        known: whether ``like`` is of such a call.
    """
    new_memory = schema_of(node) is not None and not metadata.shares_memory(like)
    if mode is None or not ((known and new_memory) or isinstance(node.target, HigherOrderOperator)):
        return metadata.derive(node, mode)
    return pytree.tree_map_only(torch.Tensor, lambda value: _torch_private.fresh_fake(mode, value), like.meta["val"])
