"""The sums of batch normalisation over several devices: each device's own, and the statistics from all of them.

Formula (operator documentation of ``torch_npu.batch_norm_reduce``; op-plugin: the references of its tests), for each channel::

    batch_norm_reduce: sum(x), sum(x^2)
    batch_norm_gather_stats_update: mean = sum(sums) / n;  var = sum(squares) / n - mean^2;  invstd = 1 / sqrt(var + eps)

with n the sum of ``counts``; the running statistics move by ``momentum`` towards mean and var.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, refused
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::batch_norm_reduce",
    source="operator documentation of torch_npu.batch_norm_reduce",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(2, 3, 4, 4).half(), 1e-5),),
)
def batch_norm_reduce(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002 - the schema's name; the document gives eps no effect
    """``(sums, sums of squares)`` [C], float32 (float64 for float64), of ``input`` [N, C, ...]."""
    if input.dim() < 2:
        raise refused("batch_norm_reduce", "the dim input tensor has", input.dim(), "2, it must more than 1")
    wide = input.to(compute_dtype(input)).transpose(0, 1).flatten(1)
    return wide.sum(-1), wide.square().sum(-1)


@Operator(
    name="npu::batch_norm_gather_stats_update",
    source="op-plugin, opapi/BatchNormGatherStatsUpdateKernelNpuOpApi.cpp",
    dtypes=(torch.float16, torch.float32),
    writes=("running_mean", "running_var"),
    examples=(
        lambda: call(
            torch.randn(2, 3, 4, 4),
            torch.randn(4, 3),
            torch.rand(4, 3) * 99 + 99,
            torch.zeros(3),
            torch.ones(3),
            0.1,
            1e-5,
            torch.tensor([4.0, 5, 6, 4]),
        ),
    ),
)
def batch_norm_gather_stats_update(
    input: torch.Tensor,  # noqa: A002 - the schema's name; it tells the device the dtype alone
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(mean, invstd)`` [C] in mean's dtype, of all devices; ``mean`` and ``invstd`` hold sums and squares [devices, C]."""
    dtype = compute_dtype(mean, invstd, counts)
    count = counts.to(dtype).sum()
    center = mean.to(dtype).sum(0) / count
    variance = invstd.to(dtype).sum(0) / count - center.square()
    for running, value in ((running_mean, center), (running_var, variance)):
        if running is not None:
            running.copy_(momentum * value + (1 - momentum) * running.to(dtype))
    return center.to(mean.dtype), torch.rsqrt(variance + eps).to(mean.dtype)
