"""The gradient of `matmul`, which torch_npu computes by an operator of its own."""

from __future__ import annotations

import pytest
import torch

SHAPES = [
    ((3, 4), (4, 2)),
    ((4,), (4,)),
    ((4,), (4, 2)),
    ((3, 4), (4,)),
    ((5, 3, 4), (4, 2)),
    ((3, 4), (5, 4, 2)),
    ((5, 3, 4), (5, 4, 2)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_gradients_equal_the_cpus(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Every combination of ranks, batches broadcast, gives the CPU's gradients."""
    given = [torch.randn(*left), torch.randn(*right)]
    found = []
    for device in ("cpu", "npu"):
        inputs = [value.detach().to(device).requires_grad_() for value in given]
        (inputs[0] @ inputs[1]).sin().sum().backward()
        found.append([value.grad.cpu() for value in inputs])
    torch.testing.assert_close(found[1], found[0])
