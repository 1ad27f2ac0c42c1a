"""Batched matrix product, its gradients, and the second derivative of a matrix product.

Formula (operator documentation of ``torch_npu.npu_bmmV2``; derivatives of a product)::

    npu_bmmV2:                out = input @ mat2, in the shape output_sizes where that is given
    npu_bmm_v2_mat1_backward: grad @ mat2^T;   npu_bmm_v2_mat2_backward: mat1^T @ grad
    matmul_double_backward:   (grad_self @ other + self @ grad_other, grad_out @ grad_other^T, grad_self^T @ grad_out)

A gradient of a factor with a broadcast batch is summed over it. The mask of the last one says which results are wanted; the others
are None, and so are those that no gradient reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    wide = compute_dtype(left, right)
    return torch.matmul(left.to(wide), right.to(wide))


def _halves(*sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(size).half() for size in sizes)


@Operator(
    name="npu::npu_bmmV2",
    source="operator documentation of torch_npu.npu_bmmV2",
    dtypes=(*_DTYPES, torch.int32),
    first_factor=0,
    examples=(lambda: call(*_halves((2, 3, 8), (2, 8, 4)), []),),
)
def npu_bmmV2(  # noqa: N802 - the operator's name
    input: torch.Tensor,  # noqa: A002 - the schema's name
    mat2: torch.Tensor,
    output_sizes: Sequence[int],
) -> torch.Tensor:
    """[b, m, n] like input, or ``output_sizes``. input: [b, m, k]; mat2: [b, k, n]."""
    out = _product(input, mat2).to(input.dtype)
    return out.reshape(list(output_sizes)) if output_sizes else out


@Operator(
    name="npu::npu_bmm_v2_mat1_backward",
    source="derivative of npu_bmmV2",
    dtypes=_DTYPES,
    first_factor=0,
    examples=(lambda: call(*_halves((2, 3, 4), (2, 3, 8), (2, 8, 4)), [2, 3, 8]),),
)
def npu_bmm_v2_mat1_backward(
    grad: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, size: Sequence[int]
) -> torch.Tensor:
    """The gradient of the first factor, of shape ``size``, like grad [b, m, n]."""
    upper = grad.reshape(*mat1.shape[:-1], mat2.shape[-1])
    return _product(upper, mat2.mT).sum_to_size(mat1.shape).reshape(list(size)).to(grad.dtype)


@Operator(
    name="npu::npu_bmm_v2_mat2_backward",
    source="derivative of npu_bmmV2",
    dtypes=_DTYPES,
    examples=(lambda: call(*_halves((2, 3, 4), (2, 3, 8), (2, 8, 4)), [2, 8, 4]),),
)
def npu_bmm_v2_mat2_backward(
    grad: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, size: Sequence[int]
) -> torch.Tensor:
    """The gradient of the second factor, of shape ``size``, like grad [b, m, n]."""
    upper = grad.reshape(*mat1.shape[:-1], mat2.shape[-1])
    return _product(mat1.mT, upper).sum_to_size(mat2.shape).reshape(list(size)).to(grad.dtype)


@Operator(
    name="npu::matmul_double_backward",
    source="derivative of aten::matmul_backward",
    dtypes=_DTYPES,
    examples=(lambda: call(*_halves((3, 8), (8, 4), (3, 4), (3, 8), (8, 4)), [True, True, True]),),
)
def matmul_double_backward(
    grad_self: torch.Tensor | None,
    grad_other: torch.Tensor | None,
    grad_out: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    other: torch.Tensor,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``(grad of grad_out, grad of input, grad of other)`` for factors of two and more dimensions."""
    to_out = to_input = to_other = None
    if mask[0] and (grad_self is not None or grad_other is not None):
        parts = [] if grad_self is None else [_product(grad_self, other)]
        parts += [] if grad_other is None else [_product(input, grad_other)]
        to_out = sum(parts[1:], parts[0]).to(grad_out.dtype)
    if mask[1] and grad_other is not None:
        to_input = _product(grad_out, grad_other.mT).sum_to_size(input.shape).to(input.dtype)
    if mask[2] and grad_self is not None:
        to_other = _product(grad_self.mT, grad_out).sum_to_size(other.shape).to(other.dtype)
    return to_out, to_input, to_other
