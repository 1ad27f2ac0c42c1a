"""Replacements that leave open which of several equal elements comes first, where the pattern does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex import LikeExamples
from npugraph_ex.testing import validate_replacement

Function = Callable[[torch.Tensor], torch.Tensor]


def largest(x: torch.Tensor) -> torch.Tensor:
    """The first one, of equal ones."""
    return torch.argmax(x, -1)


def largest_value(x: torch.Tensor) -> torch.Tensor:
    """The same, whichever it is."""
    return torch.amax(x, -1)


def by_topk(x: torch.Tensor) -> torch.Tensor:
    """Any of equal ones."""
    return torch.topk(x, 1)[1].squeeze(-1)


def by_topk_value(x: torch.Tensor) -> torch.Tensor:
    """A value alone does not tell which one it is."""
    return torch.topk(x, 1, -1)[0].squeeze(-1)


def by_sort(x: torch.Tensor) -> torch.Tensor:
    """Any of equal ones."""
    return torch.sort(x, -1, descending=True)[1].select(-1, 0).clone()


def by_stable_sort(x: torch.Tensor) -> torch.Tensor:
    """The first one."""
    return torch.sort(x, stable=True, dim=-1, descending=True)[1].select(-1, 0).clone()


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("search", "replace", "because"),
    [
        (largest, by_topk, "aten.topk.default"),
        (largest, by_sort, "int64 must be exact"),
        (largest, by_stable_sort, ""),
        (largest_value, by_topk_value, ""),
    ],
)
def test_no_order_of_equal_elements_is_relied_on(search: Function, replace: Function, because: str) -> None:
    """At this size the emulated device's `topk` takes the first one, and nothing says that a device does."""
    with FakeTensorMode():
        examples = [torch.empty(4, 64, device="npu")]
    guard = LikeExamples(x=examples[0])
    found = validate_replacement(search, replace, examples, extra_check=guard, max_examples=4, dtypes=(torch.float32,))
    refuted = [finding.text for finding in found.findings if finding.kind == "refuted"]
    assert bool(refuted) == bool(because), str(found)
    assert found.verdict.startswith("refuted" if because else "proven"), str(found)
    assert [text for text in refuted if because in text] == refuted


def below(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """How many bounds are below each element; the values alone are sorted, in any order of equal ones."""
    return torch.bucketize(x, torch.sort(bounds)[0])


def at_or_below(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """More, where an element equals a bound."""
    return torch.bucketize(x, torch.sort(bounds)[0], right=True)


def median_of_doubles(x: torch.Tensor) -> torch.Tensor:
    """A value, whichever of equal elements it is."""
    return torch.median(x * 2, -1)[0]


def double_of_median(x: torch.Tensor) -> torch.Tensor:
    """The same."""
    return torch.median(x, -1)[0] * 2


def place_of_topk(x: torch.Tensor) -> torch.Tensor:
    """Any of equal ones, of the doubles as of the elements."""
    return torch.topk(x * 2, 1, -1)[1]


def same_place(x: torch.Tensor) -> torch.Tensor:
    """Any of equal ones."""
    return torch.topk(x, 1, -1)[1]


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("search", "replace", "verdict", "ties"),
    [
        (below, at_or_below, "refuted", True),
        (median_of_doubles, double_of_median, "proven", True),
        (place_of_topk, same_place, "proven", False),
    ],
)
def test_equal_elements_are_tried_where_only_values_are_used(
    search: Callable[..., torch.Tensor], replace: Callable[..., torch.Tensor], verdict: str, *, ties: bool
) -> None:
    """Places of equal elements are undefined, and the finding says that they were not tried."""
    with FakeTensorMode():
        examples = [torch.empty(4, 8, device="npu"), torch.empty(5, device="npu")][: search.__code__.co_argcount]
    found = validate_replacement(search, replace, examples, max_examples=4, dtypes=(torch.float32,))
    assert found.verdict.startswith(verdict), str(found)
    assert ("Not tried is what has equal elements" in str(found)) != ties, str(found)
