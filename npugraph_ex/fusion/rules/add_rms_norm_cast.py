"""``npu_add_rms_norm`` then a cast to float32 => ``npu_add_rms_norm_cast``.

The cast is ``to(torch.float32)``, ``_npu_dtype_cast`` or ``npu_dtype_cast``, of the norm or of its ``view(-1, h)``. The
fused operator also returns the norm in its own dtype, rstd and the residual sum, so a graph may use them.

Constraints (CANN operator documentation, aclnnAddRmsNormCast): x1, x2 and gamma are all float16 or all bfloat16; x1 and
x2 have one shape of 1 to 8 dimensions, of which gamma has the last ones; empty tensors are not supported.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules._built_in_rule import BuiltInRule
from npugraph_ex.fusion.rules._norm_operands import EPSILON, NormOperands, deeper_examples, examples

NAME = "add_rms_norm_cast"
CONSTRAINTS = NormOperands((torch.float16, torch.bfloat16), range(1, 9))

Cast = Callable[[Tensor], Tensor]


def _to(y: Tensor) -> Tensor:
    return y.to(torch.float32)


def _npu_dtype_cast(y: Tensor) -> Tensor:
    wide: Tensor = torch.ops.npu._npu_dtype_cast(y, torch.float32)  # noqa: SLF001 - the operator's name
    return wide


def _npu_dtype_cast_by_code(y: Tensor) -> Tensor:
    wide: Tensor = torch.ops.npu.npu_dtype_cast(y, torch.float32)
    return wide


def _direct(cast: Cast) -> FusionRule:
    """The norm itself is cast."""

    def search(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, ...]:
        y, rstd, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
        return cast(y), y, rstd, x_out

    def replace(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, ...]:
        return tuple(torch.ops.npu.npu_add_rms_norm_cast(x1, x2, gamma, epsilon))

    return FusionRule(NAME, search, replace, examples, CONSTRAINTS, EPSILON)


def _viewed(cast: Cast) -> FusionRule:
    """A view of the norm as rows of its last dimension is cast; the view may have other users."""

    def search(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, ...]:
        y, rstd, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
        rows = y.view(-1, y.size(-1))
        return cast(rows), rows, y, rstd, x_out

    def replace(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, ...]:
        wide, y, rstd, x_out = torch.ops.npu.npu_add_rms_norm_cast(x1, x2, gamma, epsilon)
        return wide.view(-1, y.size(-1)), y.view(-1, y.size(-1)), y, rstd, x_out

    return FusionRule(NAME, search, replace, deeper_examples, CONSTRAINTS, EPSILON)


RULE = BuiltInRule(
    variants=tuple(
        rule(cast) for cast in (_to, _npu_dtype_cast, _npu_dtype_cast_by_code) for rule in (_viewed, _direct)
    ),
    default=True,
    order=30,
    anchors=("npu::npu_add_rms_norm",),
)
