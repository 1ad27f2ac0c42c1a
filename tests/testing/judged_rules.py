"""A rule that the tests of validation judge, and how they ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.testing import Validation, validate_replacement


def example(*shape: int) -> torch.Tensor:
    """An example of one argument."""
    return torch.empty(shape, dtype=torch.float16, device="npu")


def validated(
    search: Callable[..., Any], replace: Callable[..., Any], *examples: torch.Tensor, **given: Any
) -> Validation:
    """What validation says of a rule, which is registered while it is asked alone."""
    before = USER_RULES.snapshot()
    result = validate_replacement(search, replace, examples or (example(4, 8), example(4, 8)), **given)
    assert USER_RULES.snapshot() == before, "it stays registered"
    return result


def product_then_sigmoid(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A pattern."""
    return torch.sigmoid(torch.mul(x, y))


def the_same_turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same values."""
    return torch.sigmoid(torch.mul(y, x))
