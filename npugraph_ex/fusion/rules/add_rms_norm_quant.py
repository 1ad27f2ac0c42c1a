"""``npu_add_rms_norm`` then ``npu_quantize`` => ``npu_add_rms_norm_quant``.

With and without zero points, dividing or multiplying by the scales, along the last axis, to int8. The norm itself and its
``rstd`` disappear. Not in mode "max-autotune" (specification 003).

Constraints: x1's last dimension is 32-byte aligned (specification 003); the rest from the CANN operator documentation,
aclnnAddRmsNormQuantV2: x1 and x2 have one shape of 1 to 8 dimensions; gamma, scales and zero points are vectors of its
last size; the dtypes of x1, scales and zero points are one of the rows of ``DTYPES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch._inductor.pattern_matcher import Match

from npugraph_ex.fusion.conditions import first_of, value_of
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules._built_in_rule import BuiltInRule, Operands
from npugraph_ex.fusion.rules._norm_operands import EPSILON, NormOperands, examples, not_a_vector

NAME = "add_rms_norm_quant"
DTYPES: Mapping[torch.dtype, tuple[torch.dtype, torch.dtype]] = MappingProxyType(
    {torch.float16: (torch.float32, torch.int32), torch.bfloat16: (torch.bfloat16, torch.bfloat16)}
)
"""dtype of x1, x2 and gamma: (dtype of the scales, dtype of the zero points)."""
GENERATED = Operands(
    dependent={dtype: {"scales": scales, "zero_points": points} for dtype, (scales, points) in DTYPES.items()},
    refused_sizes=({16: 24}, {16: 40}),
    small_integers=True,
)
OPERANDS = NormOperands(tuple(DTYPES), range(1, 9), vectors=("gamma",), last_bytes=32)

_TwoTensors = tuple[Tensor, Tensor]


def quantisation(match: Match) -> str | None:
    """Check that scales and zero points fit x1."""
    x1 = value_of(match, "x1")
    assert x1 is not None  # noqa: S101 - OPERANDS was asked before
    reasons = (
        not_a_vector(match, name, x1, dtype)
        for name, dtype in zip(("scales", "zero_points"), DTYPES[x1.dtype], strict=True)
    )
    return next((reason for reason in reasons if reason), None)


def _rule(*, div_mode: bool, with_zero_points: bool) -> FusionRule:
    def search(
        x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, zero_points: Tensor, epsilon: float
    ) -> _TwoTensors:
        y, _, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
        return torch.ops.npu.npu_quantize(y, scales, zero_points, torch.int8, -1, div_mode), x_out

    def replace(
        x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, zero_points: Tensor, epsilon: float
    ) -> _TwoTensors:
        quantised, _, x_out = torch.ops.npu.npu_add_rms_norm_quant(
            x1, x2, gamma, scales, zero_points, epsilon=epsilon, div_mode=div_mode
        )
        return quantised, x_out

    def search_without(x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, epsilon: float) -> _TwoTensors:
        y, _, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
        return torch.ops.npu.npu_quantize(y, scales, None, torch.int8, -1, div_mode), x_out

    def replace_without(x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, epsilon: float) -> _TwoTensors:
        quantised, _, x_out = torch.ops.npu.npu_add_rms_norm_quant(
            x1, x2, gamma, scales, None, epsilon=epsilon, div_mode=div_mode
        )
        return quantised, x_out

    functions: tuple[Callable[..., _TwoTensors], Callable[..., _TwoTensors]] = (
        (search, replace) if with_zero_points else (search_without, replace_without)
    )
    # A division may have zero points of integers; in a multiplication they have the dtype of the scales.
    zero_points = (torch.int32 if div_mode else torch.float32,) if with_zero_points else ()
    return FusionRule(
        NAME, *functions, lambda: examples(torch.float32, *zero_points), first_of(OPERANDS, quantisation), EPSILON,
        not_in_modes=("max-autotune",),
    )  # fmt: skip


RULE = BuiltInRule(
    variants=tuple(_rule(div_mode=div, with_zero_points=offset) for div in (True, False) for offset in (True, False)),
    default=True,
    order=20,
    anchors=("npu::npu_add_rms_norm",),
    operands=GENERATED,
)
