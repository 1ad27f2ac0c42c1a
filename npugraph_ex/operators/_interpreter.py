"""Runs an NPU graph on the CPU: ATen operators by their CPU kernels, npu operators by their formulas.

Slow and independent of any device, emulated or not: for checking a graph, never for serving one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.operators._precision import UnsupportedArgumentError
from npugraph_ex.operators._record import formula_of

_ORDERING = frozenset({"npugraph_ex", "air"})
"""Namespaces of operators that order work on streams and compute nothing."""


class CpuInterpreter(fx.Interpreter):
    """Interprets an FX graph of NPU tensors with CPU tensors in their place.

    Raises:
        UnsupportedArgumentError: an npu operator of the graph has no formula.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one operator on the CPU."""
        args, kwargs = pytree.tree_map(_on_host, (args, kwargs))
        if isinstance(target, torch._ops.OpOverload) and target.namespace in _ORDERING:
            return torch.empty(0, dtype=torch.int64)  # what an event's record gives; the interpreter runs in order
        kernel = formula_of(target)
        if kernel is None and getattr(target, "namespace", "") != "npu":
            return super().call_function(target, args, kwargs)
        if kernel is None:
            raise UnsupportedArgumentError(
                f"there is no formula for {target._schema.name}; give it a record (npugraph_ex.operators.Operator)"
            )
        return kernel(*args, **kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Fetch a constant of the module, on the CPU."""
        value = super().get_attr(target, args, kwargs)
        return value.cpu() if isinstance(value, torch.Tensor) else value


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
