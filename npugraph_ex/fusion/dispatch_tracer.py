"""Traces a function to an ATen graph by recording the operators that it dispatches: the graph of make_fx, many times faster.

make_fx follows every tensor and every symbolic number with a proxy. Most functions of rules only call operators on their
arguments, and need no proxies. make_fx traces all other functions: those with writes, tensors from outside or arithmetic on
symbolic sizes.
"""

from __future__ import annotations

import importlib
import operator
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import fwd_only
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from npugraph_ex import _torch_private
from npugraph_ex.graph.sizes import has_symbols

_Run = Callable[[FakeTensorMode, OpOverload, Sequence[Any], Mapping[str, Any]], Any]
"""What gives the results of an operator for fake tensors of a mode."""


class _UnrecordableError(Exception):
    """The function does something that only make_fx can follow."""


def forward(
    function: Callable[..., Any], args: Sequence[Any], *, get_decomp_fn: Callable[[], Mapping[Any, Any]] = dict
) -> fx.GraphModule:
    """The graph of ``function(*args)``, equal to that of ``fwd_only`` of torch's pattern matcher; for the built-in rules.

    Args:
        function: takes tensors, numbers, and lists and dictionaries of them, and calls operators.
        args: fake tensors of one mode, which is active; a symbolic number becomes an input of the graph.
        get_decomp_fn: makes a table of decompositions.
    """
    symbolic = has_symbols(args)
    return _recorded_or_traced(function, args, get_decomp_fn(), _torch_private.run_meta_kernel, symbolic=symbolic)


def inference(
    function: Callable[..., Any], args: Sequence[Any], *, get_decomp_fn: Callable[[], Mapping[Any, Any]] = dict
) -> fx.GraphModule:
    """As ``forward``, for any function: torch may compose what it calls of operators, and the fake mode decides about these."""
    return _recorded_or_traced(function, args, get_decomp_fn(), _run_fake, symbolic=True)


def _recorded_or_traced(
    function: Callable[..., Any], args: Sequence[Any], decompositions: Mapping[Any, Any], run: _Run, *, symbolic: bool
) -> fx.GraphModule:
    """``symbolic``: whether the Python dispatcher is in force, as in ``fwd_only``."""
    if not decompositions:
        try:
            with _torch_private.fake_execution(None, symbolic=symbolic):
                return _torch_private.lazy_graph_module(torch.nn.Module(), recorded(function, args, run))
        except Exception:  # noqa: BLE001 - make_fx gives the answer, and the error if it is one
            ...
    import_quietly()
    return fwd_only(function, args, run_functional_passes=False, get_decomp_fn=lambda: decompositions)


def _run_fake(_: FakeTensorMode, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of an operator as its fake mode, which is active, gives them."""
    return operator(*args, **kwargs)


def import_quietly() -> None:
    """Import what torch's tracers import when they are called: its own code warns there, and a strict filter would raise that."""
    late = "torch._inductor.fx_passes.post_grad"
    if late not in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(late)


def recorded(function: Callable[..., Any], args: Sequence[Any], run: _Run = _run_fake) -> fx.Graph:
    """The graph of ``function(*args)``; its dead code and what does nothing are still there.

    Args:
        function: as in ``forward``.
        args: as in ``forward``.
        run: gives the results of an operator.

    Raises:
        Exception: whatever the function raises, or that it does something which only make_fx can follow.
    """
    mode = _torch_private.active_fake_mode()
    if mode is None:
        raise _UnrecordableError
    recorder = _NodeTracer(mode, run)
    for leaf in pytree.tree_leaves(list(args)):
        recorder.add_input(leaf)
    with recorder:
        results = function(*args)
    recorder.graph.output(recorder.nodes(results))
    return recorder.graph


class _NodeTracer(TorchDispatchMode):
    """Makes a node of every operator that is dispatched."""

    def __init__(self, mode: FakeTensorMode, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self._mode, self._run = mode, run
        self._nodes: dict[int, fx.Node] = {}
        self._symbols: dict[str, fx.Node] = {}
        self._sizes: dict[str, tuple[fx.Node, int]] = {}
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets the id of one with a node

    def add_input(self, value: Any) -> None:
        """A new input with its value."""
        node = self.graph.placeholder(f"arg{len(self.graph.nodes)}_1")
        if isinstance(value, (torch.Tensor, torch.SymInt)):
            node.meta["val"] = value
        if isinstance(value, torch.SymInt):
            self._symbols.setdefault(str(value), node)
        elif isinstance(value, torch.Tensor):
            self._of_tensor(value, node)
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._sizes.setdefault(str(size), (node, dim))

    def nodes(self, value: Any) -> Any:
        """Arguments or results with nodes instead of tensors and symbolic numbers."""
        return pytree.tree_map(self._node_of, value)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and record it."""
        del types
        if func is torch.ops.prim.device.default:
            return func(*args)
        if not isinstance(func, OpOverload) or _torch_private.schema(func).is_mutable:
            raise _UnrecordableError
        name = func.overloadpacket.__name__
        node = self.graph.create_node("call_function", func, self.nodes(args), self.nodes(kwargs or {}), name=name)
        result = self._run(self._mode, func, args, kwargs or {})
        self._of_result(result, node)
        return result

    def _of_result(self, result: Any, node: fx.Node) -> None:
        node.meta["val"] = result
        if isinstance(result, torch.Tensor):
            self._of_tensor(result, node)
        elif isinstance(result, (tuple, list)):
            for position, item in enumerate(result):
                self._of_result(item, self.graph.call_function(operator.getitem, (node, position)))
        elif result is not None:
            raise _UnrecordableError

    def _of_tensor(self, tensor: torch.Tensor, node: fx.Node) -> None:
        if id(tensor) in self._nodes:
            raise _UnrecordableError
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def _node_of(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            node = self._nodes.get(id(leaf))
        elif isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            node = self._size(str(leaf))
        else:
            return leaf
        if node is None:
            raise _UnrecordableError
        return node

    def _size(self, symbol: str) -> fx.Node | None:
        if symbol not in self._symbols and symbol in self._sizes:
            source, dim = self._sizes[symbol]
            node = self._symbols[symbol] = self.graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
            node.meta["val"] = source.meta["val"].shape[dim]
        return self._symbols.get(symbol)
