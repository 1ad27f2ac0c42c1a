"""What the tests of work in place ask: the optimised operators of a program, and what became of each pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from device_helpers import check, through_aot

from npugraph_ex import last_report


def operators(function: Callable[..., Any], *inputs: torch.Tensor, **options: object) -> list[str]:
    """The optimised operators of a program whose values are right, over three calls with new inputs."""
    check(function, [tuple(torch.randn_like(value) for value in inputs) for _ in range(3)], **options)
    return through_aot(function, *inputs, **options)[1]


def with_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give `function` an intermediate, x + 1, in place of the first input."""
    return lambda x, *others: function(x + 1, *others)


def outcomes(function: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    """What became of each pass, for a program whose values are right."""
    operators(function, *inputs)
    report = last_report()
    assert report is not None
    return [record.outcome for record in report.passes]
