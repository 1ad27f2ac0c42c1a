"""What is written into an argument, before the program gives it other memory, is there for all that share its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_helpers import NPU, compiled
from torch._dynamo.exc import BackendCompilerFailed


def _through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.view(-1)[1:].mul_(3)
    x.data = y
    return x + 1


def _into_itself(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    x.data = x.data * 2
    x.sub_(1)
    return x + 1


def _written_afterwards(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    own = y * 1
    own.add_(1)
    x.data = y
    x.mul_(3)
    return x + own


PROGRAMS = (_through_a_view, _into_itself, _written_afterwards)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_earlier_memory_is_written(program: Callable[..., torch.Tensor]) -> None:
    """Another tensor of the same memory sees it; so does who holds the new memory."""

    def seen(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for call in range(3):
            x, y = (torch.arange(4.0, device=NPU) + call + number for number in range(2))
            shares = x.view(2, 2)
            with torch.no_grad():
                found += [function(x, y), x, y, shares]
        return found

    assert all(map(torch.equal, seen(compiled(program)), seen(program)))


def test_what_must_be_captured_is_refused() -> None:
    """The reason names the argument."""
    x, y = torch.ones(4, device=NPU), torch.ones(4, device=NPU)
    with pytest.raises(BackendCompilerFailed, match=r"CaptureError.*it writes L\['x'\] and then gives it other memory"):
        compiled(_through_a_view, require_capture=True)(x, y)
