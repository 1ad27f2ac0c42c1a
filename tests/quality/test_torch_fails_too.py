"""Errors that the callers of the suite look past: torch raises them with its own backend, and the library has no part in them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from npugraph_ex_conformance.examples.callers import TORCH_FAILS


def writes_two_views(x: torch.Tensor, view: torch.Tensor, other: torch.Tensor, passed: torch.Tensor) -> Any:
    """Both are written, and an argument is returned as it is."""
    x.add_(2)
    view[:, 1:].copy_(other)
    return (passed,)


def writes_a_view_of_a_view(x: torch.Tensor, view: torch.Tensor, other: torch.Tensor, passed: torch.Tensor) -> Any:
    """The second of two arguments in the same memory is written through its elements."""
    view.as_strided([8], [1], 0).mul_(3)
    return (x + other.sum() + passed,)


def called(program: Any) -> None:
    """First with a view, then in inference mode with the tensor that owns the memory; torch's own backend."""
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    calls: tuple[tuple[torch.Tensor, AbstractContextManager[Any]], ...] = (
        (torch.zeros(56).as_strided((7, 8), (8, 1), 0), torch.no_grad()),
        (torch.zeros(7, 8), torch.inference_mode()),
    )
    for x, mode in calls:
        with torch.no_grad():
            arguments = (x, x.as_strided((7, 8), (8, 1), 0), torch.ones(7, 7), torch.zeros(7, 8))
        with mode:
            compiled(*arguments)


@pytest.mark.parametrize(
    ("program", "words"), [*zip((writes_two_views, writes_a_view_of_a_view), TORCH_FAILS, strict=True)]
)
def test_torch_alone_raises_it(program: Any, words: str) -> None:
    """Once torch does not, the suite must not look past it either."""
    torch.compiler.reset()
    with pytest.raises((AssertionError, BackendCompilerFailed)) as raised:
        called(program)
    assert words in str(raised.value)
