"""The model of the tests of sessions, and how its results are compared."""

from __future__ import annotations

from typing import Any

import torch
from device_helpers import NPU
from torch import nn


class Model(nn.Module):
    """Two projections, a buffer that is read, and one that each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act: nn.Module = nn.SiLU()
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("total", torch.zeros(8))
        self.dropped = nn.Dropout(1.0)  # nothing in one mode, and zeros in the other

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, *, twice: bool = False) -> torch.Tensor:
        """Map (n, 8) to the same shape."""
        y = self.dropped(self.down(self.act(self.up(x)))) * self.scale
        y = y if other is None else y + other
        self.total.add_(x.sum(0))
        if self.training:
            y = y - 1
        return y * 2 + self.total if twice else y + self.total


def twins() -> tuple[Model, Model]:
    """Two equal models on the device: one for the session, one for eager mode."""
    one, other = Model().eval().to(NPU), Model().eval().to(NPU)
    other.load_state_dict(one.state_dict())
    return one, other


def equal(have: Any, want: Any) -> None:
    """Compare what two calls gave, structure and all."""
    torch.testing.assert_close(have, want, rtol=0, atol=0)
    leaves = [torch.utils._pytree.tree_leaves(value) for value in (have, want)]
    for one, other in zip(*leaves, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert (one.stride(), one.requires_grad, one.is_inference()) == (
                other.stride(), other.requires_grad, other.is_inference(),
            )  # fmt: skip
