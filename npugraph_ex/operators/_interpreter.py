"""Runs an NPU graph on the CPU: ATen operators by their CPU kernels, npu operators by their formulas.

Slow and independent of any device, emulated or not: for checking a graph, never for serving one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

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
_PLAIN = (torch.Tensor, int, float, str, type(None))
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

    @classmethod
    def of_graph(cls, graph: fx.Graph, *, wide: bool = False) -> CpuInterpreter:
        """Of a graph without constants. No code is generated for it, which a `GraphModule` has at once."""
        return cls(torch.nn.Module(), graph=graph, wide=wide)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        self.running = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one operator on the CPU."""
        if not all(isinstance(value, _PLAIN) for value in (*args, *kwargs.values())):
            args, kwargs = pytree.tree_map(on_host_in_float64 if self._wide else on_host, (args, kwargs))
        if self._wide:
            args, kwargs = cast_to_float64(target, args, kwargs)
        if isinstance(target, torch._ops.OpOverload) and target.namespace in _ORDERING:
            return torch.empty(0, dtype=torch.int64)  # what an event's record gives; the interpreter runs in order
        kernel = gelu if target is torch.ops.aten.gelu.default else formula_of(target)
        if kernel is None and getattr(target, "namespace", "") != "npu":
            result = super().call_function(target, args, kwargs)
            return result.fill_(_UNWRITTEN) if target in _ALLOCATIONS else result
        if kernel is None:
            raise UnsupportedArgumentError(
                f"there is no formula for {target._schema.name}; give it a record (npugraph_ex.operators.Operator)"
            )
        return kernel(*args, **kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Fetch a constant of the module, on the CPU."""
        value = super().get_attr(target, args, kwargs)
        value = value.cpu() if isinstance(value, torch.Tensor) else value
        return value.double() if self._wide and isinstance(value, torch.Tensor) and value.is_floating_point() else value


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
