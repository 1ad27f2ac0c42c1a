"""Where operators jump, and which of their arguments eager mode computes without rounding anything: no luck excuses a jump there.

``round(x * 2)`` jumps where ``x * 2`` lies between two whole numbers. A rounding error beside such a tie excuses either of
them. Of ``x = 0.25`` nothing is rounded: there the result is what eager mode says, and half to even is not half up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from npugraph_ex.testing.oracle.formats import FORMATS
from npugraph_ex.testing.rounding import ROUNDING, rounds_to_whole

_COMPARING = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "sign", "sgn", "heaviside"})
_SELECTING = frozenset({"where", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "relu", "abs", "neg"})
_EXACT_IN_FLOAT64 = frozenset({"add", "sub", "rsub", "mul", "div", "reciprocal", "_to_copy"})
"""Of operands in a narrower format float64 has the very result, or its rounding shows that it is none of that format."""
_ELEMENTWISE = ROUNDING | _COMPARING | _SELECTING | _EXACT_IN_FLOAT64
_DIVIDING = frozenset({"div", "reciprocal"})
_COMPUTING = _EXACT_IN_FLOAT64 - {"_to_copy"}


MOVES_DATA = (
    "view", "transpose", "permute", "slice", "select", "expand", "squeeze", "unsqueeze", "clone", "alias", "t",
)  # fmt: skip
REINTERPRETS = torch.ops.aten.view.dtype
"""It reads the bits of a number as those of another one."""


def only_moves(target: torch._ops.OpOverload) -> bool:
    """Whether an operator rounds nothing, because it only views or copies."""
    moves = target.is_view or target._schema.name.split("::")[1] in MOVES_DATA
    return moves and target is not REINTERPRETS


def _name(target: Any) -> str:
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else ""


def rounds_numbers(node: fx.Node) -> bool:
    """Whether an elementwise operator computes with a number that float32 has not: with the nearest one that it has."""
    return _name(node.target) in _COMPUTING and not _has_exact_numbers(node)


def jumps(node: fx.Node) -> bool:
    """Whether the result of an operator may be another one where its argument is hardly another one."""
    return _name(node.target) in _COMPARING or rounds_to_whole(_name(node.target), node.kwargs)


def only_selects(node: fx.Node) -> bool:
    """Whether each element of a result is one of an argument's, or its negative, or a number that the dtype has."""
    result = node.meta.get("val")
    if _name(node.target) not in _SELECTING or not isinstance(result, torch.Tensor) or result.dtype not in FORMATS:
        return False
    dtypes = {source.meta["val"].dtype for source in node.all_input_nodes} - {torch.bool}
    return dtypes == {result.dtype} and _has_exact_numbers(node, result.dtype)


class ExactElements:
    """Which elements of each value of one run in float64 eager mode computes without rounding anything on the way.

    Args:
        given: the values before the first call, of which nothing is rounded.
        divides: whether a quotient may be exact, as by luck one is.
    """

    def __init__(self, given: Mapping[fx.Node, Any], *, divides: bool = True) -> None:
        self._values: dict[fx.Node, torch.Tensor] = {}
        self._exact: dict[fx.Node, torch.Tensor] = {}
        self._elementwise = _ELEMENTWISE if divides else _ELEMENTWISE - _DIVIDING
        for node, value in given.items():
            self.take(node, value)

    def take(self, node: fx.Node, value: Any) -> None:
        """Say that nothing of a value was rounded."""
        if isinstance(value, torch.Tensor):
            self._keep(node, value, torch.ones(value.shape, dtype=torch.bool))

    def follow(self, node: fx.Node, value: Any, moved: Callable[[Mapping[fx.Node, Any]], Any] | None) -> None:
        """Go on with what an operator computed.

        Args:
            node: the operator.
            value: its result.
            moved: applies it to other values, where it only moves data; None otherwise.
        """
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            self._forget(node)
        elif isinstance(value, torch.Tensor) and all(source in self._exact for source in node.all_input_nodes):
            if moved is not None:
                self._keep(node, value, moved(self._exact))
            elif _name(target) in self._elementwise and _has_exact_numbers(node):
                exact = torch.ones(value.shape, dtype=torch.bool)
                for source in node.all_input_nodes:
                    exact = exact & self._exact[source].expand(value.shape)
                self._keep(node, value, exact & _is_of_format(value, node))

    def of(self, node: fx.Node) -> dict[fx.Node, tuple[torch.Tensor, torch.Tensor]]:
        """For the arguments of an operator: where they are exact, and a copy of their values."""
        return {
            source: (exact, self._values[source].clone())
            for source in node.all_input_nodes
            if (exact := self._exact.get(source)) is not None and self._values[source].is_floating_point()
        }

    def where(self) -> Mapping[fx.Node, torch.Tensor]:
        """Of each floating-point value of which there is something to say: which elements are exact."""
        return {node: exact for node, exact in self._exact.items() if self._values[node].is_floating_point()}

    def _keep(self, node: fx.Node, value: torch.Tensor, exact: torch.Tensor) -> None:
        self._values[node], self._exact[node] = value, exact

    def _forget(self, node: fx.Node) -> None:
        """Drop all that lies in the memory of an argument of an operator that writes."""
        written = {_memory(self._values[source]) for source in node.all_input_nodes if source in self._values}
        for known in [one for one, value in self._values.items() if _memory(value) in written]:
            del self._values[known], self._exact[known]


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _has_exact_numbers(node: fx.Node, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a dtype has the numbers that an operator is given; float32, in which kernels compute with them at least."""
    numbers = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)]
    return all(float(torch.tensor(number, dtype=dtype)) == number for number in numbers)


def _is_of_format(value: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """Where a float64 value is one of the dtype that the graph gives it."""
    dtype = node.meta["val"].dtype
    if not value.is_floating_point():
        return torch.ones(value.shape, dtype=torch.bool)
    if dtype not in FORMATS:
        return torch.zeros(value.shape, dtype=torch.bool)
    return value.to(dtype).to(value.dtype) == value
