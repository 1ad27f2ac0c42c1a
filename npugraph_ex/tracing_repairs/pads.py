"""Gives reflecting and replicating pads the strides of the device, contiguous ones; torch's meta functions keep channels_last.

`pad(x, (1, 1, 1, 1), mode="reflect").reshape(-1)` is a view on the device and was a copy in AOT's graph, so a write into it
went elsewhere. A pad of a batch of images is followed by `contiguous()`: it is a copy where the trace sees other strides.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="Reflecting and replicating pads have the strides of torch's CPU kernels in a trace, and others on the device.",
    threads=("pytorch#179366", "pytorch#179837"),
    torch=("2.13", "2.14"),
    test="tests/frontend/test_pads.py",
)

_PADS = (torch.ops.aten.reflection_pad2d.default, torch.ops.aten.replication_pad2d.default)


def kept() -> AbstractContextManager[None]:
    """Within the block AOT traces each such pad with these strides."""
    return _torch_private.python_kernels({operator: partial(_contiguous, operator) for operator in _PADS})


def _contiguous(operator: OpOverload, x: torch.Tensor, *settings: Any) -> torch.Tensor:
    with _torch_private.python_kernels({operator: None}):
        padded: torch.Tensor = operator(x, *settings)
    return padded.contiguous() if x.device.type == "npu" else padded
