"""Convolutions and transposed convolutions under the names that torch_npu gives them, and their gradients.

Formula: that of ``torch.nn.functional.conv2d``, ``conv3d`` and ``conv_transpose2d`` (operator documentation of
``torch_npu.npu_conv2d``, ``npu_conv3d``, ``npu_conv_transpose2d``, ``npu_convolution`` and ``npu_convolution_transpose``), computed
in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_DTYPES = (torch.float16, torch.float32)
_ALL = [True, True, True]
_Gradients = tuple[torch.Tensor | None, ...]


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    output_padding: list[int] | None = None,
) -> torch.Tensor:
    """The convolution, or with ``output_padding`` the transposed one, in x's dtype, contiguous."""
    dtype = compute_dtype(x, weight, bias)
    out = torch.convolution(
        x.to(dtype),
        weight.to(dtype),
        None if bias is None else bias.to(dtype),
        stride,
        padding,
        dilation,
        output_padding is not None,
        output_padding or [0],
        groups,
    )
    return out.to(x.dtype).contiguous()


def _differentiated(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    mask: Sequence[bool],
    output_padding: list[int] | None = None,
) -> _Gradients:
    """The gradients of input, weight and bias in the dtypes of input, weight and input; None where ``mask`` wants none."""
    dtype = compute_dtype(grad, x, weight)
    transposed = output_padding is not None
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    found = torch.ops.aten.convolution_backward(
        grad.to(dtype),
        x.to(dtype),
        weight.to(dtype),
        [channels],
        stride,
        padding,
        dilation,
        transposed,
        output_padding or [0],
        groups,
        [*mask, False][:3],
    )
    kinds = (x.dtype, weight.dtype, x.dtype)
    return tuple(
        None if value is None else value.to(kind).contiguous() for value, kind in zip(found, kinds, strict=True)
    )


def _random(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape).half() for shape in shapes)


@Operator(
    name="npu::npu_conv2d",
    source="operator documentation of torch_npu.npu_conv2d",
    dtypes=_DTYPES,
    examples=(lambda: call(*_random((2, 4, 5, 6), (6, 2, 3, 3), (6,)), [1, 2], [1, 0], [1, 1], 2),),
)
def npu_conv2d(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """The convolution of ``input`` [N, C, H, W], weight [O, C / groups, h, w], bias [O]; one number for each spatial dimension."""
    return _convolved(input, weight, bias, stride, padding, dilation, groups)


@Operator(
    name="npu::npu_conv3d",
    source="operator documentation of torch_npu.npu_conv3d",
    dtypes=_DTYPES,
    examples=(lambda: call(*_random((1, 2, 4, 5, 6), (3, 2, 2, 3, 3), (3,)), [1, 1, 2], [0, 1, 1], [1, 1, 1], 1),),
)
def npu_conv3d(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """The convolution of ``input`` [N, C, D, H, W], weight [O, C / groups, d, h, w]; one number for each spatial dimension."""
    return _convolved(input, weight, bias, stride, padding, dilation, groups)


@Operator(
    name="npu::npu_convolution",
    source="operator documentation of torch_npu.npu_convolution",
    dtypes=_DTYPES,
    examples=(lambda: call(*_random((2, 4, 5, 6), (6, 4, 3, 3)), None, [1, 1], [0, 1], [2, 1], 1),),
)
def npu_convolution(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """The convolution of ``input`` with two or three spatial dimensions."""
    return _convolved(input, weight, bias, stride, padding, dilation, groups)


@Operator(
    name="npu::npu_conv_transpose2d",
    source="operator documentation of torch_npu.npu_conv_transpose2d",
    dtypes=_DTYPES,
    examples=(lambda: call(*_random((2, 4, 3, 3), (4, 3, 3, 3), (6,)), [1, 1], [1, 0], [2, 2], [1, 1], 2),),
)
def npu_conv_transpose2d(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """The transposed convolution of ``input`` [N, C, H, W], weight [C, O / groups, h, w], bias [O]."""
    return _convolved(input, weight, bias, stride, padding, dilation, groups, output_padding)


@Operator(
    name="npu::npu_convolution_transpose",
    source="operator documentation of torch_npu.npu_convolution_transpose",
    dtypes=_DTYPES,
    examples=(lambda: call(*_random((2, 4, 3, 3), (4, 3, 3, 3)), None, [1, 0], [0, 0], [2, 1], [1, 2], 1),),
)
def npu_convolution_transpose(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """The transposed convolution of ``input`` [N, C, H, W], weight [C, O / groups, h, w], bias [O]."""
    return _convolved(input, weight, bias, stride, padding, dilation, groups, output_padding)


@Operator(
    name="npu::npu_conv2d_backward",
    source="operator documentation of torch_npu.npu_conv2d",
    dtypes=_DTYPES,
    examples=(lambda: call(*_random((2, 4, 5, 6), (2, 6, 5, 2), (6, 2, 3, 3)), [1, 2], [1, 0], [1, 1], 2, _ALL),),
)
def npu_conv2d_backward(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    output_mask: list[bool],
) -> _Gradients:
    """The gradients of input, weight and bias; the last is None where the mask does not want it. The first two always are."""
    mask = [True, True, output_mask[2]]
    return _differentiated(grad_output, input, weight, stride, padding, dilation, groups, mask)


@Operator(
    name="npu::npu_conv3d_backward",
    source="operator documentation of torch_npu.npu_conv3d",
    dtypes=_DTYPES,
    examples=(
        lambda: call(
            *_random((1, 2, 4, 5, 6), (1, 3, 3, 5, 3), (3, 2, 2, 3, 3)), [1, 1, 2], [0, 1, 1], [1, 1, 1], 1, _ALL
        ),
    ),
)
def npu_conv3d_backward(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    grad: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    output_mask: list[bool],
) -> _Gradients:
    """The gradients of input, weight and bias; None where the mask wants none."""
    return _differentiated(grad, input, weight, stride, padding, dilation, groups, output_mask)


@Operator(
    name="npu::npu_convolution_backward",
    source="operator documentation of torch_npu.npu_convolution",
    dtypes=_DTYPES,
    examples=(lambda: call(*_random((2, 4, 5, 6), (2, 6, 1, 6), (6, 4, 3, 3)), [1, 1], [0, 1], [2, 1], 1, _ALL),),
)
def npu_convolution_backward(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    output_mask: list[bool],
) -> _Gradients:
    """The gradients of input, weight and bias; None where the mask wants none."""
    return _differentiated(grad_output, input, weight, stride, padding, dilation, groups, output_mask)


@Operator(
    name="npu::npu_conv_transpose2d_backward",
    source="operator documentation of torch_npu.npu_conv_transpose2d",
    dtypes=_DTYPES,
    examples=(
        lambda: call(*_random((2, 4, 3, 3), (2, 6, 6, 5), (4, 3, 3, 3)), [1, 1], [1, 0], [2, 2], [1, 1], 2, _ALL),
    ),
)
def npu_conv_transpose2d_backward(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    output_mask: list[bool],
) -> _Gradients:
    """The gradients of input, weight and bias; None where the mask wants none."""
    return _differentiated(grad_output, input, weight, stride, padding, dilation, groups, output_mask, output_padding)


@Operator(
    name="npu::npu_conv_transpose3d_backward",
    source="operator documentation of torch_npu.npu_convolution_transpose",
    dtypes=_DTYPES,
    examples=(
        lambda: call(
            *_random((1, 2, 2, 3, 3), (1, 3, 2, 5, 3), (2, 3, 1, 3, 1)),
            [0, 1, 0],
            [0, 0, 0],
            [1, 2, 1],
            [1, 1, 1],
            1,
            _ALL,
        ),
    ),
)
def npu_conv_transpose3d_backward(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    output_mask: list[bool],
) -> _Gradients:
    """The gradients of input, weight and bias; None where the mask wants none."""
    return _differentiated(grad_output, input, weight, stride, padding, dilation, groups, output_mask, output_padding)


@Operator(
    name="npu::npu_convolution_transpose_backward",
    source="operator documentation of torch_npu.npu_convolution_transpose",
    dtypes=_DTYPES,
    examples=(
        lambda: call(*_random((2, 4, 3, 3), (2, 3, 5, 7), (4, 3, 3, 3)), [1, 0], [0, 0], [2, 1], [1, 2], 1, _ALL),
    ),
)
def npu_convolution_transpose_backward(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    grad: torch.Tensor,
    weight: torch.Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    grad_input_mask: list[bool],
) -> _Gradients:
    """The gradients of input, weight and bias; None where the mask wants none."""
    return _differentiated(grad, input, weight, stride, padding, dilation, groups, grad_input_mask, output_padding)


@Operator(
    name="npu::_conv_depthwise2d_backward",
    source="operator documentation of torch_npu.npu_conv2d",
    dtypes=_DTYPES,
    examples=(
        lambda: call(*_random((2, 8, 3, 4), (2, 4, 5, 6), (8, 1, 3, 3)), [3, 3], [1, 1], [0, 0], [1, 1], [True, True]),
    ),
)
def _conv_depthwise2d_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_mask: list[bool],
) -> _Gradients:
    """The gradients of input and weight of the convolution of each channel alone; None where the mask wants none."""
    groups = input.shape[1]
    return _differentiated(grad_output, input, weight, stride, padding, dilation, groups, output_mask)[:2]


@Operator(
    name="npu::slow_conv_dilated2d_backward",
    source="operator documentation of torch_npu.npu_conv2d",
    dtypes=_DTYPES,
    examples=(lambda: call(*_random((2, 6, 1, 6), (2, 4, 5, 6), (6, 4, 3, 3)), [3, 3], [1, 1], [0, 1], [2, 1], _ALL),),
)
def slow_conv_dilated2d_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_mask: list[bool],
) -> _Gradients:
    """The gradients of input, weight and bias; None where the mask wants none."""
    return _differentiated(grad_output, input, weight, stride, padding, dilation, 1, output_mask)


@Operator(
    name="npu::slow_conv_transpose2d_backward",
    source="operator documentation of torch_npu.npu_conv_transpose2d",
    dtypes=_DTYPES,
    examples=(
        lambda: call(*_random((2, 3, 6, 5), (2, 4, 3, 3), (4, 3, 3, 3)), [3, 3], [2, 2], [1, 1], [1, 0], [1, 1], _ALL),
    ),
)
def slow_conv_transpose2d_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    dilation: list[int],
    output_mask: list[bool],
) -> _Gradients:
    """The gradients of input, weight and bias; None where the mask wants none."""
    return _differentiated(grad_output, input, weight, stride, padding, dilation, 1, output_mask, output_padding)
