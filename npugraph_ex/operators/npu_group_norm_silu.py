"""Group normalisation followed by a SiLU or Swish activation, and the gradients of the latter.

Formula (CANN operator documentation, aclnnGroupNormSilu, aclnnGroupNormSwish and aclnnGroupNormSwishGrad)::

    rstd = 1 / sqrt(var(x) + eps)                   mean and variance over a group of channels and all positions
    n    = (x - mean) * rstd * weight + bias        weight and bias by channel
    y    = n * sigmoid(scale * n)                   scale is 1 for SiLU
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call


def _by_group(operator: str, x: torch.Tensor, groups: int) -> torch.Tensor:
    """``x`` [N, C, ...] as [N, groups, the elements of a group]."""
    if x.dim() < 2 or groups <= 0 or x.shape[1] % groups:
        raise ValueError(
            f"{operator}: input must be [N, C, ...] with C a multiple of {groups}, the number of groups; its shape is "
            f"{tuple(x.shape)}."
        )
    return x.reshape(x.shape[0], groups, -1)


def _by_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``values`` [C] so that they broadcast to ``x`` [N, C, ...]."""
    return values.to(x.dtype).reshape(1, -1, *(1 for _ in x.shape[2:]))


def _affine(normal: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """``normal * weight + bias`` by channel; a factor or term that is not given is left out."""
    if weight is not None:
        normal = normal * _by_channel(weight, normal)
    return normal if bias is None else normal + _by_channel(bias, normal)


def _normalised(
    operator: str, x: torch.Tensor, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x^, mean, rstd)`` in the dtype of ``x``: x^ of its shape, the others [N, groups]."""
    rows = _by_group(operator, x, groups)
    mean = rows.mean(-1, keepdim=True)
    rstd = torch.rsqrt((rows - mean).square().mean(-1, keepdim=True) + eps)
    return ((rows - mean) * rstd).reshape(x.shape), mean.squeeze(-1), rstd.squeeze(-1)


@Operator(
    name="npu::npu_group_norm_silu",
    dtypes=FLOATS,
    floats_only=True,
    source="operator documentation of torch_npu.npu_group_norm_silu; CANN operator documentation, aclnnGroupNormSilu",
    alike=Alike(dtype=("input", "weight", "bias"), besides={"weight": (torch.float32,), "bias": (torch.float32,)}),
    examples=(
        lambda: call(torch.randn(2, 4, 3).half(), torch.randn(4), torch.randn(4), 2),
        lambda: call(torch.randn(2, 4, 3, 5).bfloat16(), None, None, 4, 1e-3),
    ),
)
def npu_group_norm_silu(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, mean, rstd)``: y like ``input``; the others [N, group] of weight's dtype, of input's where one is missing."""
    x = input.to(compute_dtype(input, weight, bias))
    normal, mean, rstd = _normalised("npu_group_norm_silu", x, group, eps)
    y = torch.nn.functional.silu(_affine(normal, weight, bias))
    like = input.dtype if weight is None or bias is None else weight.dtype
    return stored_like(input, y, input.dtype), mean.to(like), rstd.to(like)


@Operator(
    name="npu::npu_group_norm_swish",
    dtypes=FLOATS,
    floats_only=True,
    source="operator documentation of torch_npu.npu_group_norm_swish; CANN operator documentation, aclnnGroupNormSwish",
    alike=Alike(dtype=("input", "weight", "bias"), besides={"weight": (torch.float32,), "bias": (torch.float32,)}),
    examples=(lambda: call(torch.randn(2, 4, 3).half(), 2, torch.randn(4).half(), torch.randn(4).half()),),
)
def npu_group_norm_swish(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    num_groups: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float | None = 1e-5,
    swish_scale: float | None = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, mean, rstd)``: y like ``input``; the others [N, num_groups] of its dtype."""
    x = input.to(compute_dtype(input, weight, bias))
    normal, mean, rstd = _normalised("npu_group_norm_swish", x, num_groups, 1e-5 if eps is None else eps)
    n = _affine(normal, weight, bias)
    y = n * torch.sigmoid((1.0 if swish_scale is None else swish_scale) * n)
    return stored_like(input, y, input.dtype), mean.to(input.dtype), rstd.to(input.dtype)


@Operator(
    name="npu::npu_group_norm_swish_grad",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnGroupNormSwishGrad",
    alike=Alike(shape=("input", "grad"), dtype=("input", "grad", "weight", "bias", "mean", "rstd")),
    examples=(
        lambda: call(
            *(torch.randn(2, 4, 3) for _ in range(2)),
            2,
            *(torch.randn(4) for _ in range(2)),
            torch.zeros(2, 2),
            torch.ones(2, 2),
            [True, True, True],
        ),
    ),
)
def npu_group_norm_swish_grad(
    grad: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    num_groups: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    grad_input_mask: Sequence[bool],
    swish_scale: float | None = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of input, weight and bias, each like its tensor; one that the mask leaves out is computed all the same."""
    dtype = compute_dtype(grad, input, weight, bias)
    scale = 1.0 if swish_scale is None else swish_scale
    x = input.to(dtype)
    average, root = (part.to(dtype).unsqueeze(-1) for part in (mean, rstd))
    normal = ((_by_group("npu_group_norm_swish_grad", x, num_groups) - average) * root).reshape(x.shape)
    n = _affine(normal, weight, bias)
    s = torch.sigmoid(scale * n)
    to_norm = grad.to(dtype) * (s + scale * n * s * (1 - s))
    others = [0, *range(2, x.dim())]
    rows, scaled = (part.reshape(*x.shape[:1], num_groups, -1) for part in (normal, to_norm * _by_channel(weight, x)))
    to_x = root * (scaled - scaled.mean(-1, keepdim=True) - rows * (scaled * rows).mean(-1, keepdim=True))
    return (
        stored_like(input, to_x.reshape(x.shape), input.dtype),
        stored_like(weight, (to_norm * normal).sum(others), weight.dtype),
        stored_like(bias, to_norm.sum(others), bias.dtype),
    )
