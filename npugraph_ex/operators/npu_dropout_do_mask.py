"""Dropout: its masks, as bits and as bytes, their use, and the gradient.

Formula (CANN operator documentation, aclnnDropoutGenMask and aclnnDropoutDoMask)::

    output = input / (1 - p) where the mask is 1, else 0

A mask's elements are 1 with probability ``1 - p``. Numbers come from torch's generator of the device, or from the seed and offset
that an operator is given; which ones, no document says, so a mask differs from hardware's and its statistics do not. A mask has a
bit for each element, in bytes, rounded up to 128 bits; those ``_with_byte_mask`` have a byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._dropout import drawn, dropped, generator_at, packed
from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call

_SOURCE = "CANN operator documentation, aclnnDropoutGenMask and aclnnDropoutDoMask"


def _always(*_args: object, **_kwargs: object) -> bool:
    """These operators draw in every call."""
    return True


@Operator(
    name="npu::npu_dropout_do_mask",
    source=_SOURCE,
    dtypes=FLOATS,
    examples=(lambda: call(torch.randn(3, 8).half(), torch.randint(256, (16,), dtype=torch.uint8), 0.5),),
)
def npu_dropout_do_mask(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    mask: torch.Tensor,
    p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, mask)``: output like ``input``; the mask of bits as it came."""
    return npu_dropout_backward(input, mask, p), mask.clone()


@Operator(
    name="npu::npu_dropout_backward",
    source=_SOURCE,
    dtypes=FLOATS,
    examples=(lambda: call(torch.randn(3, 8).half(), torch.randint(256, (16,), dtype=torch.uint8), 0.5),),
)
def npu_dropout_backward(grad_output: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Like ``grad_output``; the mask of bits is that of the forward."""
    return stored_like(grad_output, dropped(grad_output.to(compute_dtype(grad_output)), mask, p), grad_output.dtype)


@Operator(
    name="npu::_npu_dropout",
    source=_SOURCE,
    dtypes=FLOATS,
    draws_random_numbers=_always,
    examples=(lambda: call(torch.randn(3, 8).half(), 0.5),),
)
def _npu_dropout(input: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002 - the schema's name
    """``(output, mask)``: output like ``input``; a mask of bits."""
    mask = packed(drawn(input.shape, p, device=input.device))
    return npu_dropout_backward(input, mask, p), mask


@Operator(
    name="npu::_npu_dropout_gen_mask.Tensor",
    source=_SOURCE,
    examples=(lambda: call(torch.randn(3, 50), [3, 50], 0.5, 1, 0),),
)
def _npu_dropout_gen_mask(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    size: Sequence[int],
    p: float,
    seed: int,
    offset: int,
    *,
    parallel: bool | None = True,
    sync: bool | None = None,
) -> torch.Tensor:
    """A mask of bits for ``size`` elements, uint8, the same one for the same seed and offset."""
    return packed(drawn(list(size), p, generator=generator_at(seed, offset)).to(input.device))


@Operator(
    name="npu::_dropout_with_byte_mask",
    source="op-plugin, aclops/DropoutWithByteMaskKernelNpu.cpp",
    dtypes=FLOATS,
    draws_random_numbers=_always,
    examples=(lambda: call(torch.randn(3, 8).half(), 0.5),),
)
def _dropout_with_byte_mask(input: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002 - the schema's name
    """``(output, mask)``: output like ``input``; mask uint8 of its shape, 1 or 0."""
    mask = drawn(input.shape, p, device=input.device).to(torch.uint8)
    return _dropout_with_byte_mask_backward(input, mask, p), mask


@Operator(
    name="npu::_dropout_with_byte_mask_backward",
    source="op-plugin, aclops/DropoutWithByteMaskKernelNpu.cpp",
    dtypes=FLOATS,
    examples=(lambda: call(torch.randn(3, 8).half(), torch.randint(2, (3, 8), dtype=torch.uint8), 0.5),),
)
def _dropout_with_byte_mask_backward(grad_output: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Like ``grad_output``; mask uint8 of its shape."""
    wide = grad_output.to(compute_dtype(grad_output))
    return stored_like(
        grad_output, torch.where(mask.bool(), wide / (1 - p) if p < 1.0 else 0.0, 0.0), grad_output.dtype
    )


@Operator(
    name="npu::dropout_with_byte_mask",
    source="op-plugin, aclops/DropoutWithByteMaskKernelNpu.cpp",
    dtypes=FLOATS,
    draws_random_numbers=lambda _, p, train: bool(train) and p != 0.0,
    examples=(lambda: call(torch.randn(3, 8).half(), 0.5, True),),
)
def dropout_with_byte_mask(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    p: float,
    train: bool,
) -> torch.Tensor:
    """Like ``input``; a copy of it where nothing is dropped."""
    return _dropout_with_byte_mask(input, p)[0] if train and p else torch.empty_like(input).copy_(input)
