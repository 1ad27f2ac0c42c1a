"""Keeps `alpha` where AOT replaces a number that changes between calls by a tensor.

`x.add(number, alpha=2)` and `x.sub(number, alpha=2)` became `x + number` from the second number on, and from the first one where
sizes are dynamic or the number is `tensor.item()`: torch writes the operator anew from its positional arguments.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from npugraph_ex import _torch_private
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A sum of a tensor and a number that changes between calls loses its `alpha`.",
    threads=("pytorch#189547",),
    test="tests/frontend/test_number_keywords.py",
)


def kept() -> AbstractContextManager[None]:
    """Within the block AOT keeps the keywords of such operators."""
    return _torch_private.keywords_of_number_operands()
