"""A random operator whose result nobody uses advances the generator, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from device_helpers import NPU, compiled

DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    "like": torch.rand_like,
    "sizes": lambda x: torch.randn(3, device=x.device),
    "in place": lambda x: torch.empty_like(x).uniform_(),
    "two results": lambda x: F.dropout(x, 0.5),
    "no size": lambda x: torch.randperm(x.shape[0], device=x.device),
    "shape alone": lambda x: torch.bernoulli(x).shape,
}


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "trained"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_next_draw_is_that_of_eager_mode(draw: Callable[[torch.Tensor], object], *, trained: bool) -> None:
    """Results, gradients and what is drawn after the call, backward included, are those of eager mode."""

    def program(x: torch.Tensor) -> torch.Tensor:
        draw(x)
        return x * x + torch.rand_like(x)

    def drawn(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.npu.manual_seed(1)  # type: ignore[attr-defined]
        found = []
        for _ in range(2):
            x = torch.full((4, 6), 0.5, device=NPU, requires_grad=trained)
            y = function(x)
            found += [y.detach(), *(torch.autograd.grad(y.sum(), x) if trained else ()), torch.rand(3, device=NPU)]
        return found

    with torch.set_grad_enabled(trained):
        assert all(map(torch.equal, drawn(compiled(program)), drawn(program)))
