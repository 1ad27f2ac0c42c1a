"""All ranks of a group wait for each other; the tensor says only behind what, and before what.

Formula (CANN operator documentation, aclnnDistributeBarrierV2; op-plugin, opapi/DistributeBarrierOpApi.cpp)::

    out = x_ref, once every rank has come this far

On the device the result is ``x_ref`` itself. Here it is a copy, as torch_npu's fake function announces it.

Ranks that wait in vain are an error of the emulated HCCL, at its own timeout: ``time_out`` (microseconds) is not read.

Not covered: ``elastic_info``.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import refused, unsupported
from npugraph_ex.operators._ranks import Exchange, Steps
from npugraph_ex.operators._record import Operator, call

_NAME = "_npu_distribute_barrier"
_RANKS = range(2, 385)


@Operator(
    name="npu::_npu_distribute_barrier",
    source="CANN operator documentation, aclnnDistributeBarrierV2; op-plugin, opapi/DistributeBarrierOpApi.cpp",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    examples=(
        lambda: call(torch.randn(3, 4), "group", 2, time_out=torch.tensor([100_000], dtype=torch.int32)),
        lambda: call(torch.tensor(7), "group", 2),
    ),
)  # fmt: skip
def _npu_distribute_barrier(
    x_ref: torch.Tensor,
    group: str,
    world_size: int,
    *,
    time_out: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
) -> Steps:
    """``x_ref``, of any shape. time_out: int32, one element."""
    if world_size not in _RANKS:
        raise refused(_NAME, "world_size", world_size, f"from {_RANKS.start} to {_RANKS.stop - 1}")
    if elastic_info is not None:
        raise unsupported(_NAME, "elastic_info", "a tensor", "None")
    if time_out is not None and (time_out.dtype != torch.int32 or time_out.dim() > 1):
        raise refused(_NAME, "time_out", (tuple(time_out.shape), time_out.dtype), "[1], int32")
    yield Exchange(group, (torch.zeros(1, dtype=torch.uint8, device=x_ref.device),), ranks=world_size)
    return torch.empty_like(x_ref).copy_(x_ref)
