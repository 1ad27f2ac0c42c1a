"""What a repair says of itself: the fault upstream, where it is discussed, and when the repair may go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A fault of Dynamo or AOT that this library works around.

    A test shows each fault with torch's own ``aot_eager`` on the CPU. When a new torch makes that test fail, the fault is
    mended there, and the repair may go once no supported torch has it.

    Attributes:
        fault: what is wrong upstream, in one sentence.
        threads: public threads about it; empty where none is known.
        torch: the releases in which the fault was seen.
        test: the file of tests that fail without the repair, from the root of the repository.
    """

    fault: str
    threads: tuple[str, ...] = ()
    torch: tuple[str, ...]
    test: str
