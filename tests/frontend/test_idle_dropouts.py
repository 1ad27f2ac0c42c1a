"""A dropout that drops nothing returns its argument, and one that draws nothing in eager mode moves no generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from device_helpers import NPU, check, compiled

DROPOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "function": lambda x: F.dropout(x, 0.5, training=False),
    "positional": lambda x: torch.dropout(x, 0.5, False),
    "named": lambda x: torch.dropout(x, p=0.5, train=False),
    "module": torch.nn.Dropout(0.5).eval(),
    "no probability": lambda x: F.dropout(x, 0.0),
}


@pytest.mark.parametrize("dropout", DROPOUTS.values(), ids=DROPOUTS)
def test_what_is_written_into_the_result(dropout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The argument and the result have it."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = dropout(x)
        y += 1
        return x * 2, y

    check(program, [(torch.full((4,), float(call), device=NPU),) for call in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("inplace", [False, True])
def test_the_next_draw(*, inplace: bool) -> None:
    """It is eager mode's after a dropout of all elements, of none, and of no elements; infinity times 0 is no number."""

    def program(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.dropout(x, p, inplace=inplace)
        y += 1
        return x * 2, y

    def seen(function: Callable[..., tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        torch.npu.manual_seed(1)  # type: ignore[attr-defined]
        found = []
        for size, p in ((2, 0.5), (2, 0.25), (2, 0.0), (2, 1.0), (0, 0.5)):
            found += [*function(torch.full((size,), torch.inf, device=NPU), p), torch.rand(3, device=NPU)]
        return [torch.nan_to_num(one, nan=7) for one in found]

    assert all(map(torch.equal, seen(compiled(program)), seen(program)))


def test_a_dropout_that_drops_is_left() -> None:
    """Half of the elements are zero."""
    dropped = compiled(lambda x: F.dropout(x, 0.5))(torch.ones(1000, device=NPU))
    assert 300 < int((dropped == 0).sum()) < 700
