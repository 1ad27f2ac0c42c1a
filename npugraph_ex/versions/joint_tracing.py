"""The operators that torch decomposes while it traces a function with its backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Before torch 2.12 `joint_fwd_bwd` takes no table of decompositions, and reads Inductor's.",
    since=(2, 12),
    test="tests/fusion/test_training.py",
)


def with_decompositions(table: Callable[[], dict[Any, Any]]) -> AbstractContextManager[object]:
    """Make Inductor's tracers of patterns decompose what is in a table; newer ones have an argument for it."""
    if not DIFFERENCE.older:
        return nullcontext()
    return mock.patch("torch._inductor.pattern_matcher.select_decomp_table", table)
