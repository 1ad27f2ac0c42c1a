"""Lets AOT compare the memory of inputs whose symbolic sizes the program has turned into numbers; it raises.

In `a.add_(1); return b + torch.ones(5, 8)`, where `b` is a view of `a`, the sizes of both are numbers once Dynamo has traced the
sum. The fake tensor of `a` still has symbols, and torch's function for overlaps refuses it, because AOT asks the sizes alone
whether there are symbols.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from npugraph_ex import _torch_private
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="Inputs share memory, one is written, and the program fixes their symbolic sizes: `Cannot call numel() on tensor "
    "with symbolic sizes/strides`.",
    threads=("pytorch#139111",),
    test="tests/frontend/test_specialised_sizes.py",
)


def compared() -> AbstractContextManager[None]:
    """Within the block AOT compares such inputs as those that still have symbols."""
    return _torch_private.overlaps_of_specialised_sizes()
