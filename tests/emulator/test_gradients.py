"""Gradients that torch_npu computes by operators of its own."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

SHAPES = [
    ((3, 4), (4, 2)),
    ((4,), (4,)),
    ((4,), (4, 2)),
    ((3, 4), (4,)),
    ((5, 3, 4), (4, 2)),
    ((3, 4), (5, 4, 2)),
    ((5, 3, 4), (5, 4, 2)),
    ((4,), (5, 4, 2)),
    ((5, 3, 4), (4,)),
    ((1, 3, 4), (5, 4, 2)),
    ((5, 3, 4), (6, 1, 4, 2)),
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


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_gradients_have_the_metadata_that_the_trace_sees(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """The device's results of `matmul_backward` are as torch_npu's meta function says: compiled graphs are built on that."""
    given = [torch.randn(*left, device="npu"), torch.randn(*right, device="npu")]
    operands = [torch.ones_like(given[0] @ given[1]), *given]
    found = torch.ops.aten.matmul_backward(*operands, [True, True])
    with FakeTensorMode(allow_non_fake_inputs=True):
        expected = torch.ops.aten.matmul_backward(*operands, [True, True])
    assert [(tensor.shape, tensor.stride()) for tensor in found] == [
        (tensor.shape, tensor.stride()) for tensor in expected
    ]


FUNCTIONS = {
    "quantile": lambda x: torch.quantile(x, 0.3, dim=-1),
    "gather": lambda x: x.gather(1, torch.tensor([[0, 0, 2], [1, 1, 1]], device=x.device)),
    "softmax with dtype": lambda x: x.softmax(-1, dtype=torch.float64),
    "cast": lambda x: x.half().sin(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_functions_equal_the_cpus(name: str) -> None:
    """Gathers and casts are differentiated back to the input's shape and dtype."""
    given, found = torch.randn(2, 3), []
    for device in ("cpu", "npu"):
        x = given.to(device).detach().requires_grad_()
        FUNCTIONS[name](x).sin().sum().backward()
        found.append(x.grad.cpu())
    torch.testing.assert_close(found[1], found[0])
