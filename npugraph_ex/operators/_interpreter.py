"""Runs an NPU graph on the CPU: ATen operators by their CPU kernels, npu operators by their formulas.

Slow and independent of any device, emulated or not: for checking a graph, never for serving one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from npugraph_ex.operators._precision import UnsupportedArgumentError, gelu
from npugraph_ex.operators._record import formula_of
from npugraph_ex.operators._scalar_types import DTYPE_OF_CODE

_ORDERING = frozenset({"npugraph_ex", "air"})
"""Namespaces of operators that order work on streams and compute nothing."""

_ALLOCATIONS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
) | {torch.ops.aten.empty.memory_format}
_UNWRITTEN = 1
_PLAIN = (torch.Tensor, fx.Node, int, float, str, type(None))
"""What an argument is that no device and no dtype is in."""


class CpuInterpreter(fx.Interpreter):
    """Interprets an FX graph of NPU tensors with CPU tensors in their place.

    Memory that nothing wrote reads as one number, so that the same graph computes the same each time.

    Args:
        gm: the module whose constants are used, and whose graph unless another is given.
        graph: another graph of that module.
        wide: compute with float64 in place of every floating-point dtype. Give it inputs of float64 then.

    Attributes:
        running: the node that runs, or that raised.

    Raises:
        UnsupportedArgumentError: an npu operator of the graph has no formula.
    """

    running: fx.Node | None = None

    def __init__(self, gm: torch.nn.Module, *, graph: fx.Graph | None = None, wide: bool = False) -> None:
        super().__init__(gm, graph=graph)
        self._wide = wide

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        self.running = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one operator on the CPU."""
        function, args, kwargs = _on_cpu(target, args, kwargs, wide=self._wide)
        return function(*args, **kwargs)

    def call_python(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of tensors on the CPU; the operators that it calls are computed as those of the graph are."""
        function, args, kwargs = _on_cpu(function, args, kwargs, wide=self._wide)
        with _ByFormula():  # type: ignore[no-untyped-call]  # torch left its constructor untyped
            return function(*args, **kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Fetch a constant of the module, on the CPU."""
        value = super().get_attr(target, args, kwargs)
        value = value.cpu() if isinstance(value, torch.Tensor) else value
        return value.double() if self._wide and isinstance(value, torch.Tensor) and value.is_floating_point() else value


class _ByFormula(TorchDispatchMode):
    """Within the block each operator that has a formula is computed by it, wherever it is called."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute one operator."""
        del types
        return _function_of(func)(*args, **(kwargs or {}))


class PreparedGraph:
    """A graph without constants that is run many times: what each operator calls, and with what numbers, is looked up once.

    It computes what `CpuInterpreter` computes.

    Args:
        graph: is read now, and not again.
        wide: compute with float64 in place of every floating-point dtype. Give it inputs of float64 then.

    Raises:
        UnsupportedArgumentError: an npu operator of the graph has no formula.
    """

    def __init__(self, graph: fx.Graph, *, wide: bool = False) -> None:
        self._placeholders = graph.find_nodes(op="placeholder")
        self._results = graph.output_node().args[0]
        self._calls = [
            (node, *_on_cpu(node.target, node.args, node.kwargs, wide=wide))
            for node in graph.nodes
            if node.op == "call_function"
        ]

    def run(self, *inputs: Any) -> Any:
        """The graph's results for these values of its placeholders."""
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, inputs, strict=True))
        for node, function, args, kwargs in self._calls:
            values[node] = function(
                *fx.map_arg(args, values.__getitem__), **(fx.map_arg(kwargs, values.__getitem__) if kwargs else {})
            )
        return fx.map_arg(self._results, values.__getitem__)


def _on_cpu(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, wide: bool
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What computes an operator on the CPU, and its arguments there, which may be nodes."""
    if not all(isinstance(value, _PLAIN) for value in (*args, *kwargs.values())):
        args, kwargs = pytree.tree_map(on_host_in_float64 if wide else on_host, (tuple(args), dict(kwargs)))
    if wide:
        args, kwargs = cast_to_float64(target, tuple(args), dict(kwargs))
    return _function_of(target), tuple(args), dict(kwargs)


def _function_of(target: Any) -> Callable[..., Any]:
    """What computes an operator on the CPU."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _ORDERING:
        return _ordered
    if target in _ALLOCATIONS:
        return lambda *args, **kwargs: target(*args, **kwargs).fill_(_UNWRITTEN)
    formula = gelu if target is torch.ops.aten.gelu.default else formula_of(target)
    if formula is None and getattr(target, "namespace", "") == "npu":
        raise UnsupportedArgumentError(
            f"there is no formula for {target._schema.name}; give it a record (npugraph_ex.operators.Operator)"
        )
    function: Callable[..., Any] = target if formula is None else formula
    return function


def _ordered(*_: Any, **__: Any) -> torch.Tensor:
    """What an event's record gives; a graph runs in order here."""
    return torch.empty(0, dtype=torch.int64)


def on_host(value: Any) -> Any:
    """An argument for the CPU: another device becomes it."""
    return torch.device("cpu") if isinstance(value, torch.device) else value


def on_host_in_float64(value: Any) -> Any:
    """As ``on_host``, and a floating-point dtype becomes float64."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else on_host(value)


def cast_to_float64(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator; one that casts to a floating-point dtype, written as its code, casts to float64."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.name != "npu::npu_dtype_cast":
        return args, kwargs
    code = args[1] if len(args) > 1 else kwargs["dtype"]
    return (args[0], on_host_in_float64(DTYPE_OF_CODE.get(code, code))), {}
