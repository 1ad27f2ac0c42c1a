"""The record of a repair: the fault upstream, its public threads, and when the repair may go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A fault of Dynamo or AOT that this library works around.

    A test shows each fault with torch's own ``aot_eager`` on the CPU. If that test fails with a new torch, the fault is
    mended there. The repair may go once no supported torch has the fault.

    Attributes:
        fault: what is wrong upstream, in one sentence.
        threads: public threads about it; empty where none is known.
        torch: the releases in which the fault was seen.
        mended: the first release that gets it right, such as (2, 14); None where none is known.
        test: the file of tests that fail without the repair, from the root of the repository.
    """

    fault: str
    threads: tuple[str, ...] = ()
    torch: tuple[str, ...]
    mended: tuple[int, int] | None = None
    test: str
