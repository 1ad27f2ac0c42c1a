"""What the schemas of torch_npu leave out: arguments that an operator writes, and returns, without saying so.

The arguments are in the operators' records (``Operator.writes``), with their source.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex.operators import OPERATORS, record_of

__all__ = ["is_undeclared_out", "keep_writers", "writes_undeclared"]


def writes_undeclared(overload: OpOverload, argument: torch.Argument) -> bool:
    """Whether an operator writes an argument that its schema does not mark."""
    record = record_of(overload)
    return (record is not None and argument.name in record.writes) or is_undeclared_out(overload, argument)


def is_undeclared_out(overload: OpOverload, argument: torch.Argument) -> bool:
    """Whether an argument is the ``Tensor[] out`` of an operator with several results, which no such schema marks."""
    of_npu = overload.namespace == "npu" and torch.Tag.out in overload.tags
    return of_npu and argument.name == "out" and argument.alias_info is None


def keep_writers() -> None:
    """Tell torch that these operators do something where nobody uses their results; AOT would drop the calls."""
    for record in OPERATORS.values():
        overload = record.overload if record.writes else None
        if overload is not None:
            fx.has_side_effect(overload)
