"""The overflow status of the cores: its memory, its value, and clearing it.

In the mode INF_NAN (the only one of the 950 and the default since the 910B), an overflow gives inf or NaN in the result and sets
no status, so the status that is read is 0 (operator documentation of ``torch_npu.npu_alloc_float_status``,
``npu_get_float_status`` and ``npu_clear_float_status``). On a chip that saturates, the emulated device writes its own status.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call

_SIZE = 8


@Operator(
    name="npu::npu_alloc_float_status",
    source="operator documentation of torch_npu.npu_alloc_float_status",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(1, 2, 3)),),
)
def npu_alloc_float_status(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Eight zeros of float32; ``input`` tells the device."""
    return torch.zeros(_SIZE, device=input.device)


@Operator(
    name="npu::npu_get_float_status",
    source="operator documentation of torch_npu.npu_get_float_status",
    dtypes=(torch.float32,),
    examples=(lambda: call(torch.zeros(_SIZE)),),
)
def npu_get_float_status(input: torch.Tensor, mode: int = 0) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Eight numbers of int32, 0 without an overflow; ``mode`` is 0, or 1 for the status that debugging keeps."""
    _check(mode)
    return torch.zeros(_SIZE, dtype=torch.int32, device=input.device)


@Operator(
    name="npu::npu_clear_float_status",
    source="operator documentation of torch_npu.npu_clear_float_status",
    dtypes=(torch.float32,),
    examples=(lambda: call(torch.zeros(_SIZE)),),
)
def npu_clear_float_status(input: torch.Tensor, mode: int = 0) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Eight zeros in input's dtype; ``mode`` as in ``npu_get_float_status``."""
    _check(mode)
    return torch.zeros(_SIZE, dtype=input.dtype, device=input.device)


def _check(mode: int) -> None:
    if mode not in {0, 1}:
        raise ValueError(f"mode must be 0 or 1; it is {mode}.")
