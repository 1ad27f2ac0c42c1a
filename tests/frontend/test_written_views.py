"""What is written through views that AOT undoes by arithmetic is what eager mode writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import NPU, check
from torch.nn import functional


def _batch_of_one(x: torch.Tensor) -> torch.Tensor:
    mask = x * 1
    mask[None, None].expand(1, 1, -1, -1).masked_fill_(
        torch.ones(6, 8, dtype=torch.bool, device=NPU).tril(), -torch.inf
    )
    return mask


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    torch.broadcast_to(x, (1, *x.shape)).fill_(3)
    return x * 2


def _windows(x: torch.Tensor) -> torch.Tensor:
    x.unfold(0, 2, 2).add_(1)
    return x * 2


def _windows_with_gaps(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.unfold(1, 2, 3).mul_(2)  # the last gap is not in the tensor
    y.unfold(0, 2, 3).neg_()
    return y


@torch.compiler.nested_compile_region
def _region(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    own = x * 1
    own[None].expand(1, -1, -1).fill_(-torch.inf)
    return own


def _in_a_region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _region(x), _region(x)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [_batch_of_one, _broadcast, _windows, _windows_with_gaps, _in_a_region])
def test_values_are_those_of_eager_mode(program: Callable[..., Any], *, dynamic: bool) -> None:
    """Also where old and new elements are infinite, and between windows; for inputs in the middle of their storage, too."""
    inputs = torch.full((6, 8), -torch.inf), torch.arange(48.0).view(6, 8) / 7, torch.arange(49.0)[1:].view(6, 8)
    check(program, [(value.to(NPU),) for value in inputs], dynamic=dynamic)


def _columns(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x[None].expand(1, -1, -1).add_(1)
    image = x.reshape(1, 1, 6, 8)
    return functional.unfold(image, 3, 1, 1), torch.nn.Unfold(2)(image), functional.unfold(image, kernel_size=(2, 3))


@pytest.mark.slow
def test_a_function_of_the_same_name_stays() -> None:
    """Columns of an image are not windows of a tensor, although torch names both `unfold`."""
    check(_columns, [(torch.arange(48.0, device=NPU).view(6, 8),) for _ in range(2)])
