"""``npu_add_rms_norm`` then ``npu_dynamic_quant`` => ``npu_add_rms_norm_dynamic_quant``.

Directly or through ``flatten(0, 1)``, with and without ``smooth_scales``, for any epsilon, with and without users of the
residual sum. The norm's ``rstd`` disappears, so a graph that uses it is not fused. With ``flatten`` the replacement flattens
the results instead; later operators on the scale, such as ``view(-1, 1)``, stay.

vLLM-Ascend's norm ``_C_ascend.npu_add_rms_norm_bias`` without a bias is the same norm and fuses likewise, directly and without
``smooth_scales``, as its models call it.

Constraints (CANN operator documentation, aclnnAddRmsNormDynamicQuantV2): x1, x2, gamma and smoothing vector are all
float16 or all bfloat16; x1 and x2 have one shape of 2 to 8 dimensions; gamma and the smoothing vector are vectors of
its last size; empty tensors are not supported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules._built_in_rule import BuiltInRule
from npugraph_ex.fusion.rules._norm_operands import EPSILON, NormOperands, deeper_examples, examples

NAME = "add_rms_norm_dynamic_quant"
CLIENT = "_C_ascend"
"""The namespace of vLLM-Ascend's operators, which is none of torch's own."""
CONSTRAINTS = NormOperands((torch.float16, torch.bfloat16), range(2, 9), vectors=("gamma", "smooth_scales"))

_ThreeTensors = tuple[Tensor, Tensor, Tensor]


def _search(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> _ThreeTensors:
    y, _, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
    quantised, scale = torch.ops.npu.npu_dynamic_quant(y)
    return quantised, scale, x_out


def _replace(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> _ThreeTensors:
    quantised, _, x_out, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, epsilon=epsilon)
    return quantised, scale, x_out


def _search_smoothed(x1: Tensor, x2: Tensor, gamma: Tensor, smooth_scales: Tensor, epsilon: float) -> _ThreeTensors:
    y, _, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
    quantised, scale = torch.ops.npu.npu_dynamic_quant(y, smooth_scales=smooth_scales)
    return quantised, scale, x_out


def _replace_smoothed(x1: Tensor, x2: Tensor, gamma: Tensor, smooth_scales: Tensor, epsilon: float) -> _ThreeTensors:
    quantised, _, x_out, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
        x1, x2, gamma, smooth_scale1=smooth_scales, epsilon=epsilon
    )
    return quantised, scale, x_out


def _search_flat(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> _ThreeTensors:
    y, _, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
    quantised, scale = torch.ops.npu.npu_dynamic_quant(y.flatten(0, 1))
    return quantised, scale, x_out


def _replace_flat(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> _ThreeTensors:
    quantised, scale, x_out = _replace(x1, x2, gamma, epsilon)
    return quantised.flatten(0, 1), scale.flatten(0, 1), x_out


def _search_flat_smoothed(
    x1: Tensor, x2: Tensor, gamma: Tensor, smooth_scales: Tensor, epsilon: float
) -> _ThreeTensors:
    y, _, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
    quantised, scale = torch.ops.npu.npu_dynamic_quant(y.flatten(0, 1), smooth_scales=smooth_scales)
    return quantised, scale, x_out


def _replace_flat_smoothed(
    x1: Tensor, x2: Tensor, gamma: Tensor, smooth_scales: Tensor, epsilon: float
) -> _ThreeTensors:
    quantised, scale, x_out = _replace_smoothed(x1, x2, gamma, smooth_scales, epsilon)
    return quantised.flatten(0, 1), scale.flatten(0, 1), x_out


def _search_client(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> _ThreeTensors:
    y, _, x_out = getattr(torch.ops, CLIENT).npu_add_rms_norm_bias(x1, x2, gamma, None, epsilon)
    quantised, scale = torch.ops.npu.npu_dynamic_quant(y)
    return quantised, scale, x_out


RULE = BuiltInRule(
    variants=(
        FusionRule(NAME, _search, _replace, examples, CONSTRAINTS, EPSILON),
        FusionRule(NAME, _search_smoothed, _replace_smoothed, lambda: examples(torch.float16), CONSTRAINTS, EPSILON),
        FusionRule(NAME, _search_flat, _replace_flat, deeper_examples, CONSTRAINTS, EPSILON),
        FusionRule(
            NAME,
            _search_flat_smoothed,
            _replace_flat_smoothed,
            lambda: deeper_examples(torch.float16),
            CONSTRAINTS,
            EPSILON,
        ),
        FusionRule(
            NAME, _search_client, _replace, examples, CONSTRAINTS, EPSILON, needs=f"{CLIENT}::npu_add_rms_norm_bias"
        ),
    ),
    default=True,
    order=10,
    anchors=("npu::npu_add_rms_norm", "_C_ascend::npu_add_rms_norm_bias"),
)
