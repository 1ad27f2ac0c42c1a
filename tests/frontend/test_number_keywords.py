"""Sums of a tensor and a number that changes between calls keep `alpha`: what torch makes of the number has it, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

Program = Callable[[torch.Tensor, float], torch.Tensor]


def _added(x: torch.Tensor, number: float) -> torch.Tensor:
    return x.add(number, alpha=2)


def _subtracted(x: torch.Tensor, number: float) -> torch.Tensor:
    return x.sub(number, alpha=-1.5)


def _added_in_place(x: torch.Tensor, number: float) -> torch.Tensor:
    return (x * 3).add_(number, alpha=2.5)


def _subtracted_from(x: torch.Tensor, number: float) -> torch.Tensor:
    return torch.rsub(x, number, alpha=3)


def _computed(x: torch.Tensor, number: float) -> torch.Tensor:
    return torch.add(x, number * 2 + 1, alpha=2) + number


def _two_numbers(x: torch.Tensor, number: float) -> torch.Tensor:
    return x.add(number, alpha=number + 1)


def _divided(x: torch.Tensor, number: float) -> torch.Tensor:
    return torch.div(x, number, rounding_mode="floor")


_PROGRAMS: list[Program] = [
    _added, _subtracted, _added_in_place, _subtracted_from, _computed, _two_numbers, _divided,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda program: program.__name__)
def test_sums_with_a_factor(program: Program, dynamic: bool | None, dtype: torch.dtype) -> None:
    """Each call gives what eager mode gives."""
    if dtype is torch.int32 and program == _added_in_place:
        pytest.skip("eager mode refuses to write what is not whole into whole numbers")
    x = torch.arange(-4, 4, device="npu").to(dtype)
    compiled = torch.compile(program, backend="npugraph_ex", dynamic=dynamic)
    for number in (3.0, 4.0, 0.3, -7.7):
        torch.testing.assert_close(compiled(x, number), program(x, number), rtol=0, atol=0)


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda program: program.__name__)
def test_a_number_of_the_device(program: Program) -> None:
    """The number is an element of a tensor, read within the graph."""

    def read(x: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
        return program(x, element.item())

    x = torch.arange(-4.0, 4.0, device="npu")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(read, backend="npugraph_ex")
        for number in (3.0, 4.0, -7.5):
            element = torch.tensor(number, device="npu")
            torch.testing.assert_close(compiled(x, element), read(x, element), rtol=0, atol=0)


@pytest.mark.slow
def test_gradients_of_a_sum_with_a_factor() -> None:
    """In training the joint graph of forward and backward has the operator."""

    def trained(x: torch.Tensor, number: float) -> torch.Tensor:
        return x.mul(2).add(number, alpha=2).pow(2).sum()

    compiled = torch.compile(trained, backend="npugraph_ex")
    for number in (3.0, 4.0, 5.5):
        grads = []
        for function in (trained, compiled):
            x = torch.arange(4.0, device="npu").requires_grad_()
            with torch.enable_grad():
                loss = function(x, number)
            (grad,) = torch.autograd.grad(loss, x)
            grads.append((loss.detach(), grad))
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)
