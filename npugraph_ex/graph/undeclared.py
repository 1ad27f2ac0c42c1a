"""What schemas leave out: arguments that an operator writes, and returns, without saying so.

Those of torch_npu are in the operators' records (``Operator.writes``), with their source. Those of other libraries are found
out while a graph is captured, or first runs, and remembered for the process.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex.operators import OPERATORS, record_of

__all__ = ["is_undeclared_out", "keep_writers", "remember", "writes_undeclared"]

_FOUND: dict[OpOverload, frozenset[str]] = {}
"""The arguments that operators of other libraries were seen to write or to return."""


def writes_undeclared(overload: OpOverload, argument: torch.Argument) -> bool:
    """Whether an operator writes an argument that its schema does not mark."""
    record = record_of(overload)
    known = record is not None and argument.name in record.writes
    return known or argument.name in _FOUND.get(overload, ()) or is_undeclared_out(overload, argument)


def is_undeclared_out(overload: OpOverload, argument: torch.Argument) -> bool:
    """Whether an argument is the ``Tensor[] out`` of an operator with several results, which no such schema marks."""
    of_npu = overload.namespace == "npu" and torch.Tag.out in overload.tags
    return of_npu and argument.name == "out" and argument.alias_info is None


def remember(overload: OpOverload, arguments: frozenset[str]) -> bool:
    """Take an operator's arguments for written and returned from now on.

    Returns:
        Whether that was not known before.
    """
    known = _FOUND.get(overload, frozenset())
    _FOUND[overload] = known | arguments
    fx.has_side_effect(overload)
    return not arguments <= known


def was_found(target: object) -> bool:
    """Whether an operator was seen to write or return arguments that its schema says nothing of."""
    return target in _FOUND


def found_in(graph: fx.Graph) -> dict[str, list[str]]:
    """What was remembered of the operators of a graph: arguments by operator."""
    return {str(node.target): sorted(_FOUND[node.target]) for node in graph.nodes if node.target in _FOUND}


def keep_writers() -> None:
    """Tell torch that these operators do something where nobody uses their results; AOT would drop the calls."""
    for record in OPERATORS.values():
        overload = record.overload if record.writes else None
        if overload is not None:
            fx.has_side_effect(overload)
