"""What an entry of the known-bug corpus is, and what its program says without and with the fault."""

from __future__ import annotations

from dataclasses import dataclass

from npugraph_ex.testing import mutation
from npugraph_ex.testing.arguments import check_fields, checked
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.checking import check
from npugraph_ex_conformance.examples import FAMILIES


@dataclass(frozen=True)
class KnownBug:
    """A fault that is known to happen.

    Attributes:
        name: what goes wrong, in a few words.
        link: where it was reported.
        mutant: what brings it back.
        case: the program that shows it; None where an example of a family does, by its number.
        example: that number.
        family: of the example; the mutant's own when empty.
    """

    name: str
    link: str
    mutant: str
    case: Case | None = None
    example: int = 0
    family: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self) -> str:
        """What is wrong with the program now; empty when nothing is."""
        if self.case is None:
            return FAMILIES[self.family or mutation.mutants()[self.mutant].found_by](self.example)
        outcome = check(self.case)
        return outcome.failures[0] if outcome.failures else ""


@checked
def shows(bug: KnownBug) -> tuple[str, str]:
    """What the program says without the fault, and with it."""
    right = bug.check()
    with mutation.mutant(bug.mutant):
        return right, bug.check()
