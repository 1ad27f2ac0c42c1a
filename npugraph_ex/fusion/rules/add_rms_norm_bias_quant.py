"""``npu_add_rms_norm``, a bias, then ``npu_quantize`` => ``npu_add_rms_norm_quant`` with ``beta``. An extra rule.

Quantised checkpoints with an outlier-suppressing bias after the norm compute this. It divides by the scales and has zero
points, as the fused operator does with ``beta`` (CANN operator documentation, aclnnAddRmsNormQuantV2).

Constraints: those of ``add_rms_norm_quant``; the bias is a vector like gamma.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from npugraph_ex.fusion.conditions import first_of
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules._built_in_rule import BuiltInRule
from npugraph_ex.fusion.rules._norm_operands import EPSILON, examples
from npugraph_ex.fusion.rules.add_rms_norm_quant import GENERATED, OPERANDS, quantisation

NAME = "add_rms_norm_bias_quant"
CONSTRAINTS = first_of(dataclasses.replace(OPERANDS, vectors=("gamma", "beta")), quantisation)


def _search(  # noqa: PLR0913, PLR0917 - the operators' arguments
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, scales: Tensor, zero_points: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    y, _, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
    return torch.ops.npu.npu_quantize(torch.add(y, beta), scales, zero_points, torch.int8, -1, True), x_out  # noqa: FBT003


def _replace(  # noqa: PLR0913, PLR0917 - as above
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, scales: Tensor, zero_points: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    quantised, _, x_out = torch.ops.npu.npu_add_rms_norm_quant(
        x1, x2, gamma, scales, zero_points, beta, epsilon=epsilon
    )
    return quantised, x_out


RULE = BuiltInRule(
    variants=(
        FusionRule(
            NAME,
            _search,
            _replace,
            lambda: examples(torch.float16, torch.float32, torch.int32),
            CONSTRAINTS,
            EPSILON,
            not_in_modes=("max-autotune",),
        ),
    ),
    default=False,
    order=10,
    anchors=("npu::npu_add_rms_norm",),
    operands=GENERATED,
)
