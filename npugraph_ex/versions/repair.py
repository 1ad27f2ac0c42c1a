"""The record of a repair: the fault upstream, its public threads, the releases that have it, and so when the repair may go."""

from __future__ import annotations

from dataclasses import dataclass

from npugraph_ex.versions.pairs import TESTED

SUPPORTED = tuple(release.rpartition(".")[0] for release in TESTED)
"""The releases of torch that this library supports, such as "2.13"."""

NOT_REPORTED = ()
"""The threads of a fault about which none was found."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A fault of torch or torch_npu that this library works around.

    `tests/frontend/test_upstream_repairs.py` shows each fault without the repair, and compares ``torch`` with the release that
    is installed.

    Attributes:
        fault: what is wrong upstream, in one sentence.
        threads: its issues and pull requests, such as "pytorch#139789"; `NOT_REPORTED` where none was found.
        torch: the releases with the fault.
        test: the file of tests that fail without the repair, from the root of the repository.
    """

    fault: str
    threads: tuple[str, ...]
    torch: tuple[str, ...] = SUPPORTED
    test: str

    @property
    def may_go(self) -> bool:
        """Whether no supported release of torch has the fault, so that nothing needs the repair."""
        return not set(self.torch).intersection(SUPPORTED)
