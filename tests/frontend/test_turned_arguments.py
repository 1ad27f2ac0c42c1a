"""An argument that is written and turned in place under another name keeps its place in its storage, its sizes and its strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_helpers import NPU, compiled
from torch._dynamo.exc import BackendCompilerFailed

ARGUMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base.view(3, 4),
    "a part": lambda base: base[4:10].view(2, 3),
    "with gaps": lambda base: base.view(3, 4)[:, 1:3],
}


def _turned(x: torch.Tensor) -> torch.Tensor:
    y = x.to(x.dtype)
    y.t_()
    y.mul_(2)
    return y + 1


def _turned_back(x: torch.Tensor) -> torch.Tensor:
    y = x.to(x.dtype)
    y.t_()
    y.mul_(2)
    y.t_()
    return y.sum(0)


def _written_first(x: torch.Tensor) -> torch.Tensor:
    x[0].add_(1)
    y = x.contiguous() if x.is_contiguous() else x.to(x.dtype)
    torch.ops.aten.transpose_(y, -1, -2)
    return y * 3


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("program", [_turned, _turned_back, _written_first], ids=lambda program: program.__name__)
def test_the_argument_stays_in_its_place(program: Callable[[torch.Tensor], torch.Tensor], argument: str) -> None:
    """Results, the whole storage, and what the argument is afterwards; a later call may begin elsewhere in its storage."""

    def seen(function: Callable[[torch.Tensor], torch.Tensor]) -> list[object]:
        found: list[object] = []
        for call in range(2):
            storage = torch.arange(24.0, device=NPU) + call
            x = ARGUMENTS[argument](storage[12 * call :][:12])
            with torch.no_grad():
                result = function(x)
            found += [result.tolist(), storage.tolist(), x.storage_offset(), x.size(), x.stride()]
        return found

    torch.compiler.reset()
    assert seen(compiled(program)) == seen(program)


def test_gradients_pass_through_what_was_turned() -> None:
    """A trained program is one of these, too."""

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (_turned(x) * weight).sum()

    def gradient(function: Callable[..., torch.Tensor]) -> tuple[list[float], list[float]]:
        storage, weight = torch.arange(12.0, device=NPU), torch.full((2, 2), 3.0, device=NPU, requires_grad=True)
        with torch.enable_grad():
            function(storage[4:8].view(2, 2), weight).backward()
        assert weight.grad is not None
        return weight.grad.tolist(), storage.tolist()

    assert gradient(compiled(program)) == gradient(program)


def test_what_must_be_captured_is_refused() -> None:
    """The reason names the argument. A program that turns a view of it is captured."""
    with pytest.raises(
        BackendCompilerFailed, match=r"CaptureError.*it writes L\['x'\] and changes its strides in place"
    ):
        compiled(_turned, require_capture=True)(torch.ones(2, 3, device=NPU))
    x = torch.arange(6.0, device=NPU).view(2, 3)
    assert compiled(lambda x: x.t().mul_(2), require_capture=True)(x).tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
    assert x.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
