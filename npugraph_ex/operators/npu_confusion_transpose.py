"""Permutation and reshape in one operator, in either order, and the gradient.

Formula (operator documentation of ``torch_npu.npu_confusion_transpose``): ``input.permute(perm).reshape(shape)`` with
``transpose_first``, else ``input.reshape(shape).permute(perm)``.
"""

from __future__ import annotations

import math

import torch

from npugraph_ex.operators._record import Operator, call

_SOURCE = "operator documentation of torch_npu.npu_confusion_transpose"


@Operator(
    name="npu::npu_confusion_transpose",
    source=_SOURCE,
    dtypes=(torch.float16, torch.float32, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    examples=(
        lambda: call(torch.randn(2, 3, 4, 6), [0, 2, 1, 3], [2, 4, 18], True),
        lambda: call(torch.randn(2, 3, 4, 6).half(), [0, 2, 1], [2, 12, 6], False),
    ),
)
def npu_confusion_transpose(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    perm: list[int],
    shape: list[int],
    transpose_first: bool,
) -> torch.Tensor:
    """Contiguous, in input's dtype."""
    out = input.permute(perm).reshape(shape) if transpose_first else input.reshape(shape).permute(perm)
    return out.clone(memory_format=torch.contiguous_format)


@Operator(
    name="npu::npu_confusion_transpose_backward",
    source=_SOURCE,
    dtypes=(torch.float16, torch.float32),
    examples=(
        lambda: call(torch.randn(2, 4, 18), [0, 2, 1, 3], [2, 3, 4, 6], False),
        lambda: call(torch.randn(2, 6, 12).half(), [0, 2, 1], [2, 3, 4, 6], True),
    ),
)
def npu_confusion_transpose_backward(
    grad: torch.Tensor, perm: list[int], shape: list[int], transpose_first: bool
) -> torch.Tensor:
    """The gradient of the input, whose shape is ``shape``; ``transpose_first`` is the opposite of the forward operator's."""
    if math.prod(shape) != grad.numel():
        raise ValueError(f"shape must hold {grad.numel()} elements, as grad does; it is {tuple(shape)}.")
    back = [perm.index(dim) for dim in range(len(perm))]
    if transpose_first:
        return grad.permute(back).reshape(shape).clone(memory_format=torch.contiguous_format)
    return grad.reshape([shape[dim] for dim in perm]).permute(back).clone(memory_format=torch.contiguous_format)
