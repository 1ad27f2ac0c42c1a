"""Traces dropouts that draw nothing as what eager mode computes; AOT makes draws and copies of them.

In eager mode `dropout(x, p, training=False)`, and any dropout with ``p`` of 0 or of no elements, returns `x` itself. What is then
written in place is written into `x`; in AOT's graph it was written into a copy. With ``p`` of 1 eager mode multiplies by 0. AOT's
graph drew random numbers for that, and for no elements, and all later draws differed from those of eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from npugraph_ex import _torch_private
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A dropout that draws nothing in eager mode copies its argument (in eval mode until torch 2.13), or draws.",
    threads=("pytorch#115249", "pytorch#195422"),
    test="tests/frontend/test_idle_dropouts.py",
)

_OPERATOR = torch.ops.aten.dropout.default


def kept() -> AbstractContextManager[None]:
    """Within the block AOT traces the argument of a dropout that drops nothing, and a product for one that drops all."""
    return _torch_private.python_kernels({_OPERATOR: partial(_idle, _torch_private.python_kernel(_OPERATOR))})


def _idle(drawing: Callable[..., torch.Tensor], x: torch.Tensor, p: float, train: object) -> torch.Tensor:
    is_empty = any(isinstance(size, int) and size == 0 for size in x.shape)
    if is_empty or not train or p == 0:
        return x
    return x * 0.0 if p == 1 else drawing(x, p, train)
