"""Two defects that this library had: each stopped every compiled run of the engine. A run with one has to end with its error."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEFECTS", "Defect"]


class Defect(NamedTuple):
    """A defect.

    Attributes:
        put_back: replaces what mended it, in this process.
        says: a part of the error with which the engine then ends.
    """

    put_back: Callable[[], None]
    says: str


def _plain_functions() -> None:
    """AOT gets plain functions also where Dynamo's `aot_compile` makes it keep its results."""
    backend: Any = import_module("npugraph_ex.frontend.entry.backend")
    backend._for_aot = lambda made, _: made.boxed()


def _strict_schemas() -> None:
    """An operator that returns or writes its argument undeclared is an error."""
    contracts: Any = import_module("npugraph_ex.aclgraph.operator_contracts")

    def note(self: Any, _target: Any, _arguments: Any, what: str, remedy: str, **_: Any) -> None:
        self._refuse(what, remedy)

    contracts.ContractInterpreter._note = note


DEFECTS = {
    "plain functions under aot_compile": Defect(_plain_functions, "expected OutputCode"),
    "undeclared aliasing is an error": Defect(_strict_schemas, "returned memory of an argument, undeclared"),
}
"""By what the table calls them."""
