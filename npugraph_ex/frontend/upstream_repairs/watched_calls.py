"""Runs a graph that is not captured outside the mode of AOT's first call, under which torch computes some operators wrongly.

In the first call AOT watches custom operators by a dispatch mode. An operator in C++ that calls others on adjoints of complex
values (`linalg_pinv`) gets values that are not conjugated, because under a mode the inner calls skip torch's kernels for
lazy conjugates. This library checks custom operators itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npugraph_ex import _torch_private
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="The first call of a compiled `torch.linalg.pinv` of complex values gives other values.",
    threads=("pytorch#198118",),
    torch=("2.11", "2.12", "2.13", "2.14"),
    test="tests/frontend/test_watched_calls.py",
)


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which leaves that mode while it runs."""

    def run(*inputs: Any) -> Any:
        with _torch_private.outside_first_call_mode():
            return function(*inputs)

    return run
