"""The gradient of ``torch.repeat_interleave``: the sum over the copies of each element.

Formula: torch's derivative of ``repeat_interleave``, summed in float32 and rounded once. The copies of an element follow each
other; without ``dim`` they are those of the flat input.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, refused
from npugraph_ex.operators._record import Operator, call

_SOURCE = "op-plugin, opapi/RepeatInterLeaveKernelNpuOpApi.cpp; torch's derivative of repeat_interleave"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@Operator(
    name="npu::repeat_interleave_backward_int",
    source=_SOURCE,
    dtypes=_DTYPES,
    examples=(
        lambda: call(torch.randn(2, 6).half(), torch.randn(2, 3).half(), 2, 1),
        lambda: call(torch.randn(12).half(), torch.randn(2, 3).half(), 2),
    ),
)
def repeat_interleave_backward_int(
    grad: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    repeats: int,
    dim: int | None = None,
) -> torch.Tensor:
    """Like ``input``; each element was repeated ``repeats`` times along ``dim``."""
    wide = grad.to(compute_dtype(grad))
    if dim is None:
        total = wide.reshape(input.numel(), repeats).sum(-1)
    else:
        if not -input.dim() <= dim < input.dim():
            raise refused(
                "repeat_interleave_backward_int", "dim", dim, f"a dimension of input, which has {input.dim()}"
            )
        behind = dim % input.dim() + 1
        total = wide.reshape(*input.shape[:behind], repeats, *input.shape[behind:]).sum(behind)
    return torch.empty_like(input).copy_(total.reshape(input.shape))


@Operator(
    name="npu::repeat_interleave_backward_tensor",
    source=_SOURCE,
    dtypes=_DTYPES,
    examples=(lambda: call(torch.randn(2, 6).half(), torch.randn(2, 3).half(), torch.tensor([1, 3, 2]), 1),),
)
def repeat_interleave_backward_tensor(
    grad: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    repeats: torch.Tensor,
    dim: int | None = None,
) -> torch.Tensor:
    """Contiguous; each element along ``dim`` was repeated as often as its place in ``repeats`` [1] or [size] tells."""
    size, place = (input.numel(), 0) if dim is None else (input.shape[dim], dim)
    wide = grad.to(compute_dtype(grad))
    # Copy number c is of the element before which at most c copies lie: this way the shapes depend on no value.
    ends = repeats.expand(size).cumsum(0)
    source = torch.searchsorted(ends, torch.arange(grad.shape[place], device=grad.device), right=True)
    total = wide.new_zeros((size,) if dim is None else input.shape).index_add(place, source, wide)
    return total.reshape(input.shape).to(grad.dtype)
