"""Records the operators that a function calls as an ATen graph: no Dynamo, no AOT, no dispatch but to fake tensors.

The function is called with stand-ins for tensors. A stand-in has no methods: a program calls ``torch.ops`` and nothing
else, so the calls are the graph. ``Functionalizer`` records in-place operators as AOT would leave them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from npugraph_ex import _torch_private


class _Calls(TorchFunctionMode):
    """Records calls that are given no stand-in, such as those that enter a scope or record an event."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        return self._recorder.call(_operator(func), args, kwargs or {})


def _operator(func: Callable[..., Any]) -> OpOverload:
    if not isinstance(func, OpOverload):
        raise TypeError(f"a program may call operators of torch.ops only; it calls {func}.")
    return func


@dataclass(eq=False)
class Base:
    """Memory that values may be views of. ``node`` computes its present contents; each write makes a new version."""

    node: fx.Node
    version: int = 0


@dataclass(frozen=True, eq=False)
class Value:
    """A stand-in for a tensor.

    Attributes:
        recorder: who records what is called with it.
        node: what computed it.
        base: the memory that it is a view of, or its own.
        views: the view operators from ``base`` to it, each with its arguments after the first.
        version: of ``base`` when ``node`` was recorded.
    """

    recorder: Recorder
    node: fx.Node
    base: Base
    views: tuple[tuple[OpOverload, tuple[Any, ...], dict[str, Any]], ...] = ()
    version: int = 0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch calls instead of an operator that is given a stand-in."""
        del types
        recorder = next(value.recorder for value in _values((*args, *(kwargs or {}).values())))
        return recorder.call(_operator(func), args, kwargs or {})


def _values(arguments: Iterable[Any]) -> list[Value]:
    return [
        leaf
        for argument in arguments
        for leaf in (argument if isinstance(argument, (list, tuple)) else (argument,))
        if isinstance(leaf, Value)
    ]


@dataclass
class Recorder:
    """Records calls as they are, in-place operators included.

    ``run`` computes what an operator returns for fake tensors; by default the fake mode that is in force.
    """

    run: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any] = lambda func, args, kwargs: func(*args, **kwargs)
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[Value] = field(default_factory=list)

    def record(self, function: Callable[..., Any], fakes: Sequence[torch.Tensor]) -> fx.Graph:
        """The graph of ``function``; call it under the fake mode of ``fakes``, which stand for its arguments."""
        for position, fake in enumerate(fakes):
            node = self.graph.placeholder(f"x{position}_1")
            node.meta["val"] = fake
            self.inputs.append(Value(self, node, Base(node)))
        with _Calls(self):
            results = function(*self.inputs)
        outputs = results if isinstance(results, (tuple, list)) else (results,)
        nodes = tuple(self.read(value) if isinstance(value, Value) else value for value in outputs)
        self.finish()
        self.graph.output(nodes)
        return self.graph

    def call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one call; what it returns stands for its results."""
        node = self.emit(func, self._nodes(args), self._nodes(kwargs))
        return self._results(node)

    def read(self, value: Value) -> fx.Node:
        """The node that computes the present contents of a value."""
        return value.node

    def finish(self) -> None:
        """What is still to be recorded after the last call."""

    def emit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A node that calls ``func``, with the fake tensors that it computes."""
        operates = isinstance(func, OpOverload)
        name = func.overloadpacket.__name__ if operates else None  # as AOT names it
        node = self.graph.create_node("call_function", func, args, kwargs or {}, name=name)
        fake_args, fake_kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        node.meta["val"] = self.run(func, fake_args, fake_kwargs) if operates else func(*fake_args)
        return node

    def _nodes(self, value: Any) -> Any:
        """Arguments with nodes in place of stand-ins."""
        if isinstance(value, Value):
            return self.read(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._nodes(item) for item in value)
        return {name: self._nodes(item) for name, item in value.items()} if isinstance(value, dict) else value

    def _results(self, node: fx.Node) -> Any:
        result = node.meta["val"]
        if not isinstance(result, (tuple, list)):
            return Value(self, node, Base(node)) if isinstance(result, torch.Tensor) else result
        items = [self.emit(operator.getitem, (node, position)) for position in range(len(result))]
        return tuple(Value(self, item, Base(item)) for item in items)


class UnknownViewError(NotImplementedError):
    """A write through a view whose effect on the memory behind it is not known here."""


class Functionalizer(Recorder):
    """Records in-place operators as functional ones, with copies into the written inputs at the end, as AOT does.

    A write through a view becomes a scatter into the memory behind it; whoever reads that memory later, through any
    view, reads the new contents. Two inputs that share memory are treated as if they did not, as ``functionalize`` does.

    Raises:
        UnknownViewError: ``torch.func.functionalize`` is needed.
    """

    def call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one call; a write becomes a new version of the memory that is written."""
        schema = _torch_private.schema(func)
        if schema.is_mutable:
            return self._write(func, args, kwargs)
        node = self.emit(func, self._nodes(args), self._nodes(kwargs))
        if func.is_view and isinstance(args[0], Value) and isinstance(node.meta["val"], torch.Tensor):
            source = args[0]
            views = (*source.views, (func, args[1:], kwargs))
            return Value(self, node, source.base, views, source.base.version)
        return self._results(node)

    def read(self, value: Value) -> fx.Node:
        """The node that computes the present contents; views of memory written since are taken anew."""
        if value.version == value.base.version:
            return value.node
        return self._view(value.base.node, value.views)

    def finish(self) -> None:
        """Copy the new contents of every written input into it."""
        for value in self.inputs:
            if value.base.version:
                self.emit(torch.ops.aten.copy_.default, (value.node, value.base.node))

    def _view(self, node: fx.Node, views: Sequence[Any]) -> fx.Node:
        for func, args, kwargs in views:
            node = self.emit(func, (node, *args), kwargs)
        return node

    def _write(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        target = args[0]
        name = func._schema.name.split("::")[1]
        packet = getattr(getattr(torch.ops, func.namespace), name.removesuffix("_"), None)
        functional = getattr(packet, func._overloadname, None)
        if not isinstance(target, Value) or not name.endswith("_") or functional is None:
            raise UnknownViewError(f"{func} has no functional form that is known here")
        new = self.emit(functional, self._nodes(args), self._nodes(kwargs))
        base = target.base
        base.node, base.version = self._scattered(base.node, target.views, new), base.version + 1
        return Value(self, new, base, target.views, base.version)

    def _scattered(self, base: fx.Node, views: Sequence[Any], new: fx.Node) -> fx.Node:
        """The contents of ``base`` after ``new`` was written through ``views``."""
        if not views:
            return new
        func, args, kwargs = views[-1]
        parent = self._view(base, views[:-1])
        return self._scattered(base, views[:-1], self._one_scattered(parent, new, func, args, kwargs))

    def _one_scattered(self, parent: fx.Node, new: fx.Node, func: OpOverload, args: Any, kwargs: Any) -> fx.Node:
        aten = torch.ops.aten
        if func is aten.slice.Tensor:
            return self.emit(aten.slice_scatter.default, (parent, new, *args), kwargs)
        if func is aten.select.int:
            return self.emit(aten.select_scatter.default, (parent, new, *args), kwargs)
        if func is aten.transpose.int:
            return self.emit(func, (new, *args), kwargs)
        if func is aten.unsqueeze.default:
            return self.emit(aten.squeeze.dim, (new, *args), kwargs)
        if func is aten.alias.default:
            return new
        shape = list(parent.meta["val"].shape)
        if func is aten.view.default and all(isinstance(size, int) for size in shape):
            return self.emit(func, (new, shape))
        raise UnknownViewError(f"a write through {func} is not known here")
