"""Rotary position embedding.

Formula (operator documentation of ``torch_npu.npu_rotary_mul``)::

    output = r1 * input + r2 * rotated

where ``rotated`` is, for ``half``, ``cat(-second_half, first_half)`` of the last dimension; for ``interleave``,
each pair ``(a, b)`` of it turned into ``(-b, a)``; for ``quarter``, as ``half`` does in each half (Ascend950); and, when the
matrix ``rotate`` is given, ``input @ rotate``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, refused, stored_like, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_TILING_ERROR = 561002
"""ACLNN_ERR_INNER_TILING_ERROR."""


def rotated(x: torch.Tensor, rotary_mode: str) -> torch.Tensor:
    """The last dimension of ``x`` turned by a quarter, pair by pair."""
    if x.shape[-1] % 2:
        raise ValueError(f"npu_rotary_mul: the last dimension must be even; the input has shape {tuple(x.shape)}.")
    if rotary_mode == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    if rotary_mode == "interleave":
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    if rotary_mode == "quarter":
        return torch.cat([rotated(half, "half") for half in x.chunk(2, dim=-1)], dim=-1)
    raise unsupported("npu_rotary_mul", "rotary_mode", rotary_mode, "'half', 'interleave' and 'quarter'")


def _example() -> Call:
    angle = torch.rand(1, 3, 1, 16)
    return call(torch.randn(2, 3, 4, 16).half(), angle.cos().half(), angle.sin().half())


def _matrix_example() -> Call:
    operands, _ = _example()
    return call(*operands, rotate=rotated(torch.eye(16), "half").half())


def along_one_dimension(x: Sequence[Any], table: Sequence[Any], same: Callable[[Any, Any], bool] = operator.eq) -> bool:
    """Whether a table [., ., ., D] for ``x`` of four dimensions has one of the first three, the others being 1."""
    return any(
        all(same(size, x[axis] if axis == own else 1) for axis, size in enumerate(table[:3])) for own in range(3)
    )


def _refuse_tables(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> None:
    """What the operator of the mode ``interleave`` does not take (ops-transformer, rope_interleaved_tiling.cpp)."""
    del r2
    pairs = rotary_mode == "interleave" and rotate is None and input.dim() == r1.dim() == 4
    if pairs and not along_one_dimension(input.shape, r1.shape):
        expected = f"1 in all dimensions before the last but one, where it is as input, {tuple(input.shape)}"
        raise refused("npu_rotary_mul", "r1's shape", r1.shape, expected, code=_TILING_ERROR)


@Operator(
    name="npu::npu_rotary_mul",
    source="operator documentation of torch_npu.npu_rotary_mul; CANN operator documentation, aclnnRotaryPositionEmbedding",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    floats_only=True,
    alike=Alike(shape=("r1", "r2")),
    constraints=_refuse_tables,
    examples=(_example, _matrix_example),
)
def npu_rotary_mul(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Contiguous, shape and dtype of ``input`` (4-D); ``r1`` (cosine) and ``r2`` (sine) broadcast to it."""
    dtype = compute_dtype(input, r1, r2, rotate)
    wide = input.to(dtype)
    turned = rotated(wide, rotary_mode) if rotate is None else wide @ rotate.to(dtype)
    cosine, sine = (factor.to(input.dtype).to(dtype) for factor in (r1, r2))
    return (cosine * wide + sine * turned).to(input.dtype).contiguous()


def _backward_example() -> Call:
    x, r1, r2 = _example().args
    return call(torch.randn_like(x), x, r1, r2)


@Operator(
    name="npu::npu_rotary_mul_backward",
    source="operator documentation of torch_npu.npu_rotary_mul; CANN operator documentation, aclnnRotaryPositionEmbeddingGrad",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    floats_only=True,
    alike=Alike(shape=("r1", "r2")),
    examples=(_backward_example,),
)
def npu_rotary_mul_backward(
    grad: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of input, r1, r2: ``r1 g - rotated(r2 g)``; ``g input`` and ``g rotated(input)``, summed where they broadcast."""
    dtype = compute_dtype(grad, input, r1, r2)
    wide, slope = input.to(dtype), grad.to(dtype)
    cosine, sine = (factor.to(input.dtype).to(dtype) for factor in (r1, r2))
    of_input = cosine * slope - rotated(sine * slope, rotary_mode)
    of_r1, of_r2 = (slope * wide).sum_to_size(r1.shape), (slope * rotated(wide, rotary_mode)).sum_to_size(r2.shape)
    return (
        stored_like(input, of_input, input.dtype),
        stored_like(r1, of_r1, input.dtype),
        stored_like(r2, of_r2, input.dtype),
    )
