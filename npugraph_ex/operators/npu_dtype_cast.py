"""Conversion of a tensor to another dtype.

Floating to floating rounds half to even; floating to integer truncates towards zero, as ``Tensor.to`` does.
``hifloat8``, which no torch dtype holds, lies in uint8; only ``input_dtype`` tells such bytes from whole numbers.
Not covered: packed 4-bit types.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._hifloat8 import HIFLOAT8, decode, encode
from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of


@Operator(
    name="npu::npu_dtype_cast",
    source="operator documentation of torch_npu.npu_dtype_cast",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.int32, torch.complex64),
    examples=(lambda: call(torch.randn(3, 4), torch.float16),),
)
def npu_dtype_cast(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dtype: int,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """``input`` as ``dtype`` (a ScalarType code, or torch_npu's), contiguous, same shape."""
    if input_dtype == HIFLOAT8:
        input, input_dtype = decode(input), None  # noqa: A001 - as above
    if dtype == HIFLOAT8:
        return encode(input, saturate=False).contiguous()
    if input_dtype is not None and dtype_of(input_dtype, "npu_dtype_cast", "input_dtype") != input.dtype:
        raise unsupported("npu_dtype_cast", "input_dtype", input_dtype, f"None and {input.dtype}, the dtype of input")
    return _npu_dtype_cast(input, dtype_of(dtype, "npu_dtype_cast", "dtype"))


@Operator(
    name="npu::_npu_dtype_cast",
    source="operator documentation of torch_npu.npu_dtype_cast",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.int32, torch.complex64),
    examples=(lambda: call(torch.randn(3, 4), torch.float16),),
)
def _npu_dtype_cast(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dtype: torch.dtype,
) -> torch.Tensor:
    """``input`` as ``dtype``, contiguous, same shape."""
    return torch.empty(input.shape, dtype=dtype, device=input.device).copy_(input)


@Operator(
    name="npu::npu_dtype_cast_",
    source="operator documentation of torch_npu.npu_dtype_cast",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(3, 4).half(), torch.randn(3, 4)),),
)
def npu_dtype_cast_(input: torch.Tensor, src: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """``input`` itself, with the elements of ``src`` in its own dtype."""
    return input.copy_(src)


@Operator(
    name="npu::npu_dtype_cast_backward",
    source="operator documentation of torch_npu.npu_dtype_cast",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(3, 4), torch.float16),),
)
def npu_dtype_cast_backward(
    grad: torch.Tensor, dtype: torch.dtype, grad_dtype: int | None = None, input_dtype: int | None = None
) -> torch.Tensor:
    """``grad`` in ``dtype``, from which the forward operator cast."""
    for name, code, known in (("grad_dtype", grad_dtype, grad.dtype), ("input_dtype", input_dtype, dtype)):
        if code is not None and dtype_of(code, "npu_dtype_cast_backward", name) != known:
            raise unsupported("npu_dtype_cast_backward", name, code, f"None and {known}")
    return _npu_dtype_cast(grad, dtype)


@Operator(
    name="npu::_npu_dtype_cast_backward",
    source="operator documentation of torch_npu.npu_dtype_cast",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(3, 4), torch.float16),),
)
def _npu_dtype_cast_backward(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``grad`` in ``dtype``, from which the forward operator cast."""
    return _npu_dtype_cast(grad, dtype)
