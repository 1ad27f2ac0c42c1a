"""Undeclared effects: arguments that an operator writes and returns although its schema does not say so.

For torch_npu they stand in the operators' records (``Operator.writes``), with their source. For other libraries they are
found during a capture or the first run of a graph, and kept for the process.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.operators import OPERATORS, record_of
from npugraph_ex.versions.out_tag import has_out_tag

__all__ = [
    "ANY_EFFECT",
    "RELIES_ON_SCHEMAS",
    "arguments_found",
    "is_foreign",
    "is_undeclared_out",
    "keep_writers",
    "names_of_effects",
    "remember",
    "writes_undeclared",
]

_SHIPPED = frozenset(
    {"aten", "prims", "prim", "npu", "atb", "npugraph_ex", "air", "_c10d_functional", "c10d_functional"}
)
"""Operators of torch, of torch_npu and of this library are not checked, because users cannot change them.

`graph.collectives` knows what the schemas of torch.distributed's collectives leave out.
"""

_STATISTICS = frozenset({"running_mean", "running_var"})
_OF_TORCH = dict.fromkeys(
    (
        torch.ops.aten.native_batch_norm,
        torch.ops.aten.batch_norm_update_stats,
        torch.ops.aten.batch_norm_gather_stats,
        torch.ops.aten.batch_norm_gather_stats_with_counts,
    ),
    _STATISTICS,
)
"""Torch's operators that write running statistics; AOT has a form of the first that returns them, and none of the others."""

_FOUND: dict[OpOverload, frozenset[str]] = {}
"""The arguments that operators of other libraries wrote or returned."""


def is_foreign(target: object) -> bool:
    """Whether ``target`` is an operator that a user or another library registered."""
    return isinstance(target, OpOverload) and target.namespace not in _SHIPPED


RELIES_ON_SCHEMAS = "npugraph_ex relies on schemas"
"""In the metadata of a graph: a function that gives the effects with which the graph would lack a write of the program."""
ANY_EFFECT = "any"


def names_of_effects(overload: OpOverload, arguments: Iterable[str]) -> frozenset[str]:
    """An operator's undeclared effects on arguments, each as a name that a saved graph can hold."""
    return frozenset(f"{overload} {argument}" for argument in arguments)


def writes_undeclared(overload: OpOverload, argument: torch.Argument) -> bool:
    """Whether an operator writes an argument that its schema does not mark."""
    record = record_of(overload)
    known = record is not None and argument.name in record.writes
    known = known or argument.name in _OF_TORCH.get(overload.overloadpacket, ())
    return known or argument.name in _FOUND.get(overload, ()) or is_undeclared_out(overload, argument)


def is_undeclared_out(overload: OpOverload, argument: torch.Argument) -> bool:
    """Whether an argument is the ``Tensor[] out`` of an operator with several results, which schemas never mark."""
    of_npu = overload.namespace == "npu" and has_out_tag(overload, _torch_private.schema(overload))
    return of_npu and argument.name == "out" and argument.alias_info is None


def remember(overload: OpOverload, arguments: frozenset[str]) -> bool:
    """Treat an operator's arguments as written and returned from now on.

    Returns:
        Whether that was not known before.
    """
    known = _FOUND.get(overload, frozenset())
    _FOUND[overload] = known | arguments
    fx.has_side_effect(overload)
    return not arguments <= known


def was_found(target: object) -> bool:
    """Whether an undeclared effect of an operator was found."""
    return target in _FOUND


def arguments_found(target: object) -> frozenset[str]:
    """The arguments that an operator was found to write or return undeclared, by name."""
    return _FOUND.get(target, frozenset()) if isinstance(target, OpOverload) else frozenset()


def found_in(graph: fx.Graph) -> dict[str, list[str]]:
    """The undeclared effects found for the operators of a graph: arguments by operator."""
    return {str(node.target): sorted(_FOUND[node.target]) for node in graph.nodes if node.target in _FOUND}


def keep_writers() -> None:
    """Register with torch that these operators have effects; otherwise AOT would drop calls with unused results."""
    for record in OPERATORS.values():
        overload = record.overload if record.writes else None
        if overload is not None:
            fx.has_side_effect(overload)
