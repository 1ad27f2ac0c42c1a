"""Pads of channels_last images: strides, and what is written through a view, are those of eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from device_helpers import NPU, check

PADS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "a module": torch.nn.ReflectionPad2d(1),
    "the operator": lambda x: torch.ops.aten.replication_pad2d.default(x, (1, 1, 1, 1)),
    "constant": lambda x: F.pad(x, (1, 1, 1, 1)),
    "circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_write_through_a_view_of_a_pad(*, dynamic: bool) -> None:
    """In eager mode `reshape` of a contiguous result is a view, and the write reaches the result."""

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        padded = [pad(x) for pad in PADS.values()]
        for value in padded:
            value.reshape(-1).add_(1)
        return padded

    images = [torch.randn(2, 3, size, 4, device=NPU) for size in (4, 4, 5)]
    check(program, [(image.to(memory_format=torch.channels_last),) for image in images], dynamic=dynamic)
    check(program, [(image,) for image in images], dynamic=dynamic)
