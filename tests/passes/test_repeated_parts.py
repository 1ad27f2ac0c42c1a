"""Parts of a value that are taken out twice are taken out once, where nobody could tell."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.graph import repeated_parts

aten = torch.ops.aten


def _halves(x: torch.Tensor) -> Any:
    return aten.split.Tensor(x, 2)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return _halves(x)[0] * 2 + _halves(x)[1] * _halves(x)[0]


def _written_in_between(x: torch.Tensor) -> torch.Tensor:
    before = _halves(x)[0] * 2
    aten.add_.Tensor(aten.view.default(x, [24]), 1)
    return before + _halves(x)[0]


def _of_equal_views(x: torch.Tensor) -> torch.Tensor:
    return _halves(aten.t.default(x))[0] * 2 + _halves(aten.t.default(x))[1]


def _other_parts(x: torch.Tensor) -> torch.Tensor:
    return _halves(x)[0] * 2 + aten.split.Tensor(x, 3)[0][:2] + aten.split.Tensor(x, 2, 1)[0].sum()


def _of_other_values(x: torch.Tensor) -> torch.Tensor:
    return _halves(x)[0] * 2 + _halves(x + 1)[0]


def _returned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _halves(x)[0], _halves(x)[0], _halves(x)[0] + _halves(x)[0]


@pytest.mark.parametrize(
    ("program", "splits", "parts"),
    [
        (_twice, 1, 2),
        (_written_in_between, 1, 1),
        (_of_equal_views, 1, 2),
        (_other_parts, 3, 3),
        (_of_other_values, 2, 2),
        (_returned, 1, 3),
    ],
)
def test_equal_parts_are_taken_out_once(program: Callable[[torch.Tensor], Any], splits: int, parts: int) -> None:
    """Whatever is written in between; a part that is an output stays a tensor of its own, and values stay what they were."""
    with FakeTensorMode():
        fake = torch.empty(4, 6)
    gm = make_fx(program)(fake)
    repeated_parts.join(gm.graph)
    gm.graph.lint()
    gm.recompile()
    found = [node.target for node in gm.graph.nodes if node.users]
    assert (found.count(aten.split.Tensor), found.count(operator.getitem)) == (splits, parts)
    x = torch.arange(24.0).view(4, 6)
    torch.testing.assert_close(gm(x.clone()), program(x.clone()), rtol=0, atol=0)
