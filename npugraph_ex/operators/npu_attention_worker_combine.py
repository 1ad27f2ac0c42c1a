"""Workers of attention and of experts that run apart: tokens sorted by expert, and what came back added up.

Formula (op-plugin's tests of both operators), with the buffers that ``_schedule_context`` describes::

    npu_ffn_worker_batching:       rows of the next micro batch, from all sessions, in the order of their experts
    npu_attention_worker_combine:  y = sum_k(expert_scales[k] * token[k]) + token[K];  next layer = layer_id + 1

The emulated device does not wait: a micro batch whose tokens have not come is an error. Not covered: schedules of
``npu_attention_worker_combine``, and experts that the host chose (``need_schedule`` 0 of ``npu_ffn_worker_batching``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import refused, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._schedule_context import SIZE, ScheduleContext

_COMBINE, _BATCH = "npu_attention_worker_combine", "npu_ffn_worker_batching"
_ALIGNMENT = 512
_SHAPE = (2, 1, 3, 2, 256)
"""The examples' sessions, micro batches, tokens, choices and elements of a row."""
_EXPERTS = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0, 1, 1]], dtype=torch.int32)
_ROWS = torch.arange(2 * 6 * 256, dtype=torch.float16).reshape(2, 1, 3, 2, 256) % 97
"""The examples' buffers: the structure knows their addresses, so they live as long as this module."""


def _context() -> torch.Tensor:
    context = bytearray(SIZE)
    struct.pack_into("<6I", context, 0, *_SHAPE[:4], 2, _SHAPE[4] * 2)
    struct.pack_into("<4Q", context, 256, 0, 0, _ROWS.data_ptr(), _ROWS.numel() * 2)
    struct.pack_into(
        "<5Q", context, 384, _EXPERTS.data_ptr(), _EXPERTS.numel() * 4, _ROWS.data_ptr(), _ROWS.numel() * 2, 0
    )
    return torch.frombuffer(context, dtype=torch.int8).clone()


def _combine_example() -> Call:
    return call(_context(), torch.tensor([[0.5], [0.25], [2.0]]), torch.tensor([3], dtype=torch.int32), 256)


def _batch_example() -> Call:
    return call(_context(), 2, [2, 3, 2, 256], need_schedule=1)


@Operator(
    name=f"npu::{_COMBINE}",
    covers={
        "token_dtype": (0, 1, 5)
    },  # op-plugin's test names float16 by torch's code; but for 1, op-plugin gives float16
    source="op-plugin, opapi/AttentionWorkerCombineOpApi.cpp, and its test",
    examples=(_combine_example,),
)
def npu_attention_worker_combine(
    schedule_context: torch.Tensor,
    expert_scales: torch.Tensor,
    layer_id: torch.Tensor,
    hidden_size: int,
    *,
    token_dtype: int = 0,
    need_schedule: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, next layer)``: [BS, hidden_size] of float16, or bfloat16 with ``token_dtype`` 1, and int32 [1].

    expert_scales [BS, K] of float32.
    """
    if need_schedule:
        raise unsupported(_COMBINE, "need_schedule", need_schedule, "0")
    if hidden_size * 2 % _ALIGNMENT:
        raise unsupported(_COMBINE, "hidden_size", hidden_size, f"multiples of {_ALIGNMENT // 2}")
    dtype = torch.bfloat16 if token_dtype == 1 else torch.float16
    context = ScheduleContext(_COMBINE, schedule_context, need_schedule)
    if tuple(expert_scales.shape) != (context.tokens, context.choices - 1):
        raise refused(_COMBINE, "expert_scales", expert_scales.shape, f"{(context.tokens, context.choices - 1)}")
    token = context.returned(hidden_size, dtype)[context.returned_micro_batch].float()
    y = (token[:, :-1] * expert_scales.unsqueeze(-1)).sum(1) + token[:, -1]
    return y.to(dtype), layer_id + 1


@Operator(
    name=f"npu::{_BATCH}",
    source="op-plugin, opapi/FfnWorkerBatchingKernelNpuOpApi.cpp, and its test",
    examples=(_batch_example,),
)
def npu_ffn_worker_batching(
    schedule_context: torch.Tensor,
    expert_num: int,
    max_out_shape: Sequence[int],
    *,
    token_dtype: int = 0,
    need_schedule: int = 0,
    layer_num: int = 0,
) -> tuple[torch.Tensor, ...]:
    """``(y, groups, sessions, micro batches, tokens, choices, scales, count)``, each with a row for each of A * BS * (K + 1).

    y is of float16, of bfloat16 with ``token_dtype`` 1, of int8 with 2, whose scales are float32; groups [expert_num, 2] are the
    experts that have rows and how many. Rows behind ``count``, those of no expert, are 0; the device writes none there.
    """
    if need_schedule != 1:
        raise unsupported(_BATCH, "need_schedule", need_schedule, "1")
    if layer_num:
        raise unsupported(_BATCH, "layer_num", layer_num, "0")
    if token_dtype not in {0, 1, 2}:
        raise refused(_BATCH, "token_dtype", token_dtype, "0, 1 or 2")
    context = ScheduleContext(_BATCH, schedule_context, need_schedule)
    sessions, _, choices, width = max_out_shape
    if (sessions, *max_out_shape[1:3]) != (context.sessions, context.tokens, context.choices):
        raise refused(
            _BATCH, "max_out_shape", list(max_out_shape), f"{[context.sessions, context.tokens, context.choices]} first"
        )
    context.refuse_waiting()
    now = context.next_micro_batch
    experts = context.sent()[:, now, 2:].reshape(-1)
    order = experts.argsort(stable=True)
    order = order[(experts[order] >= 0) & (experts[order] < expert_num)]
    total, count = len(experts), len(order)
    rows = context.rows()[:, now].reshape(total, -1)[order]
    dtype = (torch.float16, torch.bfloat16, torch.int8)[token_dtype]
    y = torch.zeros(total, width, dtype=dtype)
    y[:count] = rows[:, : width * dtype.itemsize].contiguous().view(dtype)
    scales = torch.zeros(total)
    if token_dtype == 2:
        scales[:count] = rows[:, width : width + 4].contiguous().view(torch.float32).squeeze(-1)
    groups = torch.zeros(expert_num, 2, dtype=torch.int64)
    found, counts = experts[order].unique_consecutive(return_counts=True)
    groups[: len(found)] = torch.stack((found.long(), counts), -1)
    places = torch.zeros(4, total, dtype=torch.int32)
    inside = order % (context.tokens * choices)
    places[:, :count] = torch.stack(
        (order // (context.tokens * choices), torch.full_like(order, now), inside // choices, inside % choices)
    ).int()
    return y, groups, *places.unbind(), scales, torch.tensor([count])
