"""Whole numbers scaled back to floating point.

Formula (operator documentation of ``torch_npu.npu_anti_quant``)::

    output = (x + offset) * scale                   x * scale where there is no offset

An int32 ``x`` holds eight int4 values an element, the first in its lowest bits. The sum is rounded only in the output. Not covered:
hifloat8 inputs and int4 inputs of their own type.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._int4 import INT4, unpack
from npugraph_ex.operators._precision import (
    HALVES,
    RefusedArgumentError,
    compute_dtype,
    refused,
    stored_like,
    unsupported,
)
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_anti_quant"
_INPUTS = (torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


def _target(x: torch.Tensor, dst_dtype: int | None, src_dtype: int | None) -> torch.dtype:
    """The dtype of the output; raises for what the device refuses or the formula does not cover."""
    if x.dtype not in _INPUTS:
        raise unsupported(_NAME, "x", x.dtype, ", ".join(map(str, _INPUTS)))
    if src_dtype is not None and (src_dtype in INT4) != (x.dtype == torch.int32):
        raise refused(_NAME, "src_dtype", src_dtype, "torch.quint4x2 for an int32 x, and the dtype of x for others")
    if isinstance(dst_dtype, int) and dst_dtype < 0:
        raise RefusedArgumentError(
            f"{_NAME}: Input dst_type must be valid, but got UNKNOWN_SCALAR: dst_dtype={dst_dtype} is the code of no dtype."
        )
    target = torch.float16 if dst_dtype is None else dtype_of(dst_dtype, _NAME, "dst_dtype")
    if target not in HALVES:
        raise refused(_NAME, "dst_dtype", dst_dtype, "torch.float16 or torch.bfloat16")
    return target


@Operator(
    name="npu::npu_anti_quant",
    source="operator documentation of torch_npu.npu_anti_quant",
    synonyms={"dst_dtype": {5: None}},
    dtypes=(torch.int8, torch.int32),
    alike=Alike(shape=("scale", "offset"), dtype=("scale", "offset")),
    examples=(
        lambda: call(torch.randint(-128, 128, (3, 8), dtype=torch.int8), torch.rand(8), offset=torch.randn(8)),
        lambda: call(
            torch.randint(-(2**31), 2**31, (3, 2), dtype=torch.int32), torch.rand(16), dst_dtype=15, src_dtype=16
        ),
    ),
)
def npu_anti_quant(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    dst_dtype: int | None = None,
    src_dtype: int | None = None,
) -> torch.Tensor:
    """Float16, or bfloat16, of the shape of ``x``, eight times as wide for int32; scale and offset [1] or of the last dimension."""
    target = _target(x, dst_dtype, src_dtype)
    values = unpack(x) if x.dtype == torch.int32 else x
    dtype = compute_dtype(scale, offset)
    wide = values.to(dtype) if offset is None else values.to(dtype) + offset.to(dtype)
    return stored_like(values, wide * scale.to(dtype), target)
