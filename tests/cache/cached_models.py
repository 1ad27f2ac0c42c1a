"""Modules whose methods are compiled and kept; the same in every process."""

from __future__ import annotations

from collections.abc import Callable

import torch

WIDTH = 16
FACTOR = 3.0
NAN = float("nan")


def bounded(x: torch.Tensor) -> torch.Tensor:
    """Uses two globals; what is small becomes NaN."""
    return torch.where(x < -1, NAN, x) * FACTOR


class Model(torch.nn.Module):
    """A parameter, a buffer that each call changes, a number and a function as attributes, a dictionary as result."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.register_buffer("calls", torch.zeros(WIDTH))
        self.gain = 2.0
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.relu

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        """``x``: float32 (batch, WIDTH)."""
        self.calls.add_(1)
        y = self.activation(x @ self.weight) * self.gain
        return {"y": bounded(y - 1) + self.calls, "rows": x.shape[0]}


def model() -> Model:
    """The same module in every process."""
    return Model().npu().requires_grad_(requires_grad=False)


def batch(rows: int, seed: int = 0) -> torch.Tensor:
    """An input, the same in every process."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).npu()


def check(compiled: Callable[..., dict[str, object]], mine: Model, *rows: int) -> None:
    """Call the compiled method of ``mine``, and the method of an equal module eagerly: results and buffers must agree."""
    eager = model()
    eager.load_state_dict(mine.state_dict())
    eager.gain, eager.activation = mine.gain, mine.activation
    for number in rows:
        want, have = eager(batch(number)), compiled(batch(number))
        assert have["rows"] == want["rows"] == number
        assert have["y"].stride() == want["y"].stride()
        torch.testing.assert_close(have["y"].cpu(), want["y"].cpu(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.calls.cpu(), eager.calls.cpu())
