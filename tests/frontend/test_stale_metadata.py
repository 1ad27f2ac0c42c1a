"""What compiled code reads of a tensor after it was transposed or squeezed in place is what eager mode reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import NPU, compiled

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "t_": torch.Tensor.t_,
    "an operator": torch.ops.aten.t_.default,
    "transpose_": lambda y: y.transpose_(0, 1),
    "swapaxes_": lambda y: y.swapaxes_(0, 1),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "squeeze_": lambda y: y.squeeze_(0),
    "twice": lambda y: y.t_().t_().unsqueeze_(-1),
    "a view": lambda y: y[...].t_(),
    "as_strided_": lambda y: y.as_strided_((2, 2), (1, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_read_after_a_change_in_place(change: Callable[[torch.Tensor], object], *, dynamic: bool) -> None:
    """Sizes, strides, the number of dimensions and contiguity, of the tensor and of another name of it."""

    def program(x: torch.Tensor) -> tuple[Any, ...]:
        y = x * 2
        other = y
        before = y.shape[0], y.dim()
        change(y)
        read = y.size(0), y.stride(0), len(other), y.ndim, other.is_contiguous(), y.numel()
        return y.new_ones(other.shape), y.reshape(other.shape[0], -1), before, read

    run = compiled(program, dynamic=dynamic)
    for shape in ((2, 3), (1, 4), (5, 3)):
        x = torch.arange(float(shape[0] * shape[1]), device=NPU).view(shape)
        (ones, flat, *numbers), (same_ones, same_flat, *same_numbers) = run(x), program(x)
        assert (ones.shape, numbers) == (same_ones.shape, same_numbers)
        assert torch.equal(flat, same_flat)
