"""A view whose schema declares none, of a copy that is removed: its memory is then that of what was copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

_aten = torch.ops.aten
_DENSE = torch.contiguous_format
Program = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def _reshaped(x: torch.Tensor) -> torch.Tensor:
    return _aten._unsafe_view.default(x, [8, 4])


def of_an_input(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The input's own copy."""
    return (_reshaped(x.clone(memory_format=_DENSE)) * 2,)


def of_an_intermediate(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A copy of a value that leaves, too."""
    y = x + 1
    return y, _reshaped(y.clone(memory_format=_DENSE)) * 2


def of_a_cast(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A cast to the same dtype."""
    return (_reshaped(x.to(torch.float32, copy=True)) * 2,)


def of_a_product_by_one(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Arithmetic that lifting removes."""
    return (_reshaped(x * 1) * 2,)


def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two parts of the input's copy."""
    first, second = _aten.unsafe_split.Tensor(x.clone(memory_format=_DENSE), 1, 1)
    return first.exp(), second.exp()


@pytest.mark.parametrize("options", [{}, {"force_eager": True}, {"lift": "judged"}], ids=str)
@pytest.mark.parametrize(
    "program", [of_an_input, of_an_intermediate, of_a_cast, of_a_product_by_one, split], ids=lambda one: one.__name__
)
def test_what_was_copied_is_not_written(program: Program, options: dict[str, Any]) -> None:
    """Nothing is computed in place over the view; the values are those of eager mode, and the input stays."""
    torch.compiler.reset()
    compiled = torch.compile(program, backend="npugraph_ex", options=options)
    with torch.no_grad():
        for seed in range(2):
            x = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).npu()
            before = x.clone()
            for result, expected in zip(compiled(x), program(before), strict=True):
                assert torch.equal(result, expected)
            assert torch.equal(x, before)
