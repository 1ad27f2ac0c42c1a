"""Lets AOT record `multilabel_margin_loss` as the operator that eager mode calls.

While a program is traced, torch takes the operator apart by a function in Python, whose result is wrong where a row of targets ends
with -1, as rows of fewer labels do. (`multi_margin_loss` is taken apart too, and right; whole it would run on the CPU.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from npugraph_ex import _torch_private
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="`multilabel_margin_loss` counts class 0 once more for each -1 at the end of a row of targets.",
    threads=("pytorch#141017", "pytorch#185464"),
    torch=("2.10", "2.11", "2.12", "2.13"),
    test="tests/frontend/test_losses.py",
)


@contextmanager
def kept() -> Iterator[None]:
    """Within the block AOT records the operator as it is; torch has no meta function of its gradient."""
    aten = torch.ops.aten
    with (
        _torch_private.python_kernels({aten.multilabel_margin_loss_forward.default: None}),
        _torch_private.meta_functions({aten.multilabel_margin_loss_backward.default: _gradient}),
    ):
        yield


def _gradient(_grad: torch.Tensor, x: torch.Tensor, *_settings: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
