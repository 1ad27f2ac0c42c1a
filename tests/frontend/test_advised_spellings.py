"""The lines that advice gives in place of a spelling: who writes them gets the fusion, and the values of before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from npugraph_ex.commands.advise import advising
from npugraph_ex.report.passes import last_report

SIZE = 64


def _by_slots(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> Any:
    keys.view(-1, 2, 16)[slots], values.view(-1, 2, 16)[slots] = key, value
    return keys + 0.5, values + 0.5


def _by_index_copy(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> Any:
    keys.view(-1, 2, 16).index_copy_(0, slots, key)
    values.view(-1, 2, 16).index_copy_(0, slots, value)
    return keys + 0.5, values + 0.5


def _pages() -> tuple[torch.Tensor, ...]:
    rows, cache = (_half(3, 2, 16), _half(3, 2, 16)), (_half(5, 4, 2, 16), _half(5, 4, 2, 16))
    return (*rows, *cache, torch.tensor([7, 0, 12]).npu())


def _added_norm(x: torch.Tensor, y: torch.Tensor, *vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + y
    return functional.layer_norm(total, (SIZE,), *vectors), total


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).half().npu()


def _tables(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return _half(2, 4, 5, SIZE), _half(1, 1, 5, SIZE).to(dtype), _half(1, 1, 5, SIZE)


_Call = tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]
SPELLED: dict[str, tuple[_Call, _Call, str]] = {
    "cache.index_copy_(0, slots, rows)": ((_by_slots, _pages), (_by_index_copy, _pages), "lift_paged_cache"),
    "torch.nn.LayerNorm(size)": (
        (_added_norm, lambda: (_half(5, SIZE), _half(5, SIZE))),
        (_added_norm, lambda: (_half(5, SIZE), _half(5, SIZE), _half(SIZE) * 0 + 1, _half(SIZE) * 0)), "lift_add_layer_norm",
    ),
    "cos.to(x.dtype)": (
        (_rotated, lambda: _tables(torch.float32)), (_rotated, lambda: _tables(torch.float16)), "lift_rotary",
    ),
}  # fmt: skip
"""By what the lines say: the spelling and its inputs, both after the advised lines, and the form."""


@pytest.mark.parametrize("name", SPELLED)
def test_the_lines_of_a_spelling_bring_the_fusion(name: str) -> None:
    """The form is not lifted before and is lifted after, with the values of before but for one rounding."""
    (call, inputs), (followed, others), form = SPELLED[name]
    options = {"lift": "judged"}
    with torch.no_grad(), advising() as found:
        torch._dynamo.reset()
        expected = torch.compile(call, backend="npugraph_ex", options=options)(*inputs())
        assert not last_report().fusions(form)
        result = torch.compile(followed, backend="npugraph_ex", options=options)(*others())
    assert last_report().fusions(form), last_report().near_misses()
    (advised,) = (one for one in found.advice if one.rule == form and one.kind == "spelling")
    assert name in advised.change
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-3, atol=4e-3)
