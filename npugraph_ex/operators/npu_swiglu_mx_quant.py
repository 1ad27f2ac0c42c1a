"""SwiGLU activation and quantisation to an MX format in one operator, along one axis or along both.

Formula (CANN operator documentation, aclnnSwigluMxQuant and aclnnSwigluMxQuantWithDualAxis), a and b being halves of x::

    swiglu_mode 0:  s = a * sigmoid(a) * b           a is the first half with activate_left, else the second
    swiglu_mode 1:  s = a * sigmoid(glu_alpha * a) * (b + glu_bias)
                    a is every second element of x, at most clamp_limit; b the others, between -clamp_limit and clamp_limit
    y, scale = s quantised as by npu_dynamic_mx_quant; with two axes as by npu_dynamic_mx_quant_with_dual_axis

and of the gradient of mode 0, quantised along both axes, g being the gradient of s::

    x_grad = (g * b * silu'(a), g * silu(a))         in the order of a and b in x

Not covered: groups of rows (``group_index``), an activation along another dimension than the last.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._microscaling import block_quantisation, quantised, quantised_groups
from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_swiglu_mx_quant"
_DUAL = f"{_NAME}_with_dual_axis"
_BACKWARD = "_npu_swiglu_backward_mx_quant_with_dual_axis"


def _activated(operator: str, x: torch.Tensor, *, left: bool) -> torch.Tensor:
    if x.shape[-1] % 2:
        raise refused(operator, "the last dimension of x", x.shape[-1], "even")
    halves = x.to(compute_dtype(x)).chunk(2, -1)
    a, b = halves if left else halves[::-1]
    return torch.nn.functional.silu(a) * b


def _like(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """What the result is laid out as."""
    return x.new_empty(s.shape)


@Operator(
    name=f"npu::{_NAME}",
    source="CANN operator documentation, aclnnSwigluMxQuant",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    examples=(
        lambda: call(torch.randn(3, 160).half(), activate_left=True, dst_type=24),
        lambda: call(torch.randn(3, 128).half(), swiglu_mode=1, round_mode="round"),
    ),
)
def npu_swiglu_mx_quant(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    activate_dim: int = -1,
    activate_left: bool = False,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
    group_mode: int = 0,
    axis: int = -1,
    dst_type: int = 296,
    round_mode: str = "rint",
    scale_alg: int = 0,
    max_dtype_value: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)`` of x [..., 2 H]: y [..., H], or uint8 [..., H / 2]; scale uint8, the pairs of blocks along ``axis``."""
    if group_index is not None:
        raise unsupported(_NAME, "group_index", "a tensor", "None")
    if activate_dim not in {-1, x.dim() - 1}:
        raise unsupported(_NAME, "activate_dim", activate_dim, "-1, the last dimension")
    how = block_quantisation(_NAME, dst_type, round_mode=round_mode, scale_alg=scale_alg, dst_type_max=max_dtype_value)
    if swiglu_mode == 0:
        s = _activated(_NAME, x, left=activate_left)
    elif swiglu_mode == 1:
        wide = x.to(compute_dtype(x))
        a, b = wide[..., 0::2].clamp(max=clamp_limit), wide[..., 1::2].clamp(-clamp_limit, clamp_limit)
        s = a * torch.sigmoid(glu_alpha * a) * (b + glu_bias)
    else:
        raise refused(_NAME, "swiglu_mode", swiglu_mode, "0 or 1")
    return quantised(_like(x, s), s, axis, how, _NAME)


@Operator(
    name=f"npu::{_DUAL}",
    source="CANN operator documentation, aclnnSwigluMxQuantWithDualAxis",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    examples=(lambda: call(torch.randn(40, 160).half()),),
)
def npu_swiglu_mx_quant_with_dual_axis(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    round_mode: str = "rint",
    scale_alg: int = 1,
    dst_type: int = 24,
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y1, scale1, y2, scale2)`` of x [M, 2 N], along the axes -1 and -2.

    With ``group_index`` [G], the groups' ends, blocks along -2 begin anew with each group, and scale2 is [M / 64 + G, N, 2].
    """
    how = block_quantisation(_DUAL, dst_type, round_mode=round_mode, scale_alg=scale_alg, dst_type_max=dst_type_max)
    s = _activated(_DUAL, x, left=activate_left)
    like = _like(x, s)
    first = quantised(like, s, -1, how, _DUAL)
    if group_index is None:
        return (*first, *quantised(like, s, -2, how, _DUAL))
    return (*first, *quantised_groups(like, s, group_index, how, _DUAL))


@Operator(
    name=f"npu::{_BACKWARD}",
    source="op-plugin, opapi/SwigluBackwardMxQuantWithDualAxisOpApi.cpp, and its test; aclnnSwigluBackwardMxQuantWithDualAxis",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    alike=Alike(dtype=("x", "y_grad")),
    examples=(
        lambda: call(torch.randn(40, 128).half(), torch.randn(40, 64).half()),
        lambda: call(
            torch.randn(70, 64).bfloat16(), torch.randn(70, 32).bfloat16(), group_index=torch.tensor([33, 70])
        ),
    ),
)
def _npu_swiglu_backward_mx_quant_with_dual_axis(
    x: torch.Tensor,
    y_grad: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    round_mode: str = "rint",
    scale_alg: int = 1,
    dst_type: int = 24,
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y1, scale1, y2, scale2)`` of the gradient of x [M, 2 N], along the axes -1 and -2; ``y_grad`` [M, N].

    ``group_index`` as in the forward. Rows behind the last group have a y2 of zeros; the device writes none there.
    """
    if x.dim() < 2 or x.shape[-1] % 64 or not x.shape[-1]:
        raise refused(_BACKWARD, "x", x.shape, "of two dimensions or more, the last a multiple of 64")
    how = block_quantisation(_BACKWARD, dst_type, round_mode=round_mode, scale_alg=scale_alg, dst_type_max=dst_type_max)
    dtype = compute_dtype(x, y_grad)
    halves, slope = x.to(dtype).chunk(2, -1), y_grad.to(dtype)
    a, b = halves if activate_left else halves[::-1]
    of_halves = torch.ops.aten.silu_backward(slope * b, a), slope * torch.nn.functional.silu(a)
    gradient = torch.cat(of_halves if activate_left else of_halves[::-1], -1)
    like = x.new_empty(x.shape)
    first = quantised(like, gradient, -1, how, _BACKWARD)
    if group_index is None:
        return (*first, *quantised(like, gradient, -2, how, _BACKWARD))
    return (*first, *quantised_groups(like, gradient, group_index, how, _BACKWARD, some_rows=True))
