"""Faults of lifting rotary embeddings: signs, halves and pairs, and the tables of cosines and sines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from npugraph_ex.lifting.forms import rotary
from npugraph_ex.lifting.forms._parted_rotary import RotaryTables
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import FORMS, answering, exchanged, with_arguments, with_result


def _without_signs(original: Any) -> Any:
    """Halves that only change places are turned, too."""

    def turned(node: fx.Node) -> Any:
        swapped = rotary._swapped(node)
        return original(node) if swapped is None else rotary._Turned(1.0, swapped.x, swapped.mode)

    return turned


def _added(both: Any) -> Any:
    """Both terms of a sum are added, whatever their sign."""
    return both and (both[0], replace(both[1], scale=abs(both[1].scale)))


def _with_a_plus(found: Any) -> Any:
    return replace(found, sign=1.0) if isinstance(found, rotary._Turned) else found


def _with_any_tables(original: Any) -> Any:
    """The tables of the first two parts are those of the others."""

    def tables(first: Any, second: Any, *others: Any) -> RotaryTables:
        found: RotaryTables | None = original(first, second, *others)
        return found or RotaryTables(first.table, second.table, doubled=True)

    return tables


def _of_the_other_mode(emit: Any, table: fx.Node, mode: str) -> tuple[Any, ...]:
    return emit, table, "interleave" if mode == "half" else "half"


MUTANTS = (
    Mutant(
        "lifting-exchanges-sine-and-cosine", "what is turned is multiplied by the sine",
        FORMS + "rotary:_build", with_result(exchanged), "spelled rotary",
    ),
    Mutant(
        "lifting-turns-pairs-as-halves", "pairs are turned as pairs",
        FORMS + "rotary:_build", with_arguments(lambda _, dtype: ("half", dtype)), "spelled rotary",
    ),
    Mutant(
        "lifting-drops-the-value", "what `addcmul` adds is multiplied by its value",
        "npugraph_ex.lifting.terms:summands", with_result(_added), "spelled rotary",
    ),
    Mutant(
        "lifting-needs-no-sign", "one of the turned parts is negated",
        FORMS + "rotary:_turned", _without_signs, "spelled rotary",
    ),
    Mutant(
        "lifting-takes-either-sign", "it is the second half that is negated, and comes first",
        FORMS + "rotary:_turned", with_result(_with_a_plus), "spelled rotary",
    ),
    Mutant(
        "lifting-takes-any-table", "both parts are multiplied by the cosine, and both by the sine",
        FORMS + "_parted_rotary:_tables", _with_any_tables, "spelled rotary",
    ),
    Mutant(
        "lifting-doubles-tables-otherwise", "a table of half the width is doubled as the parts lie",
        FORMS + "rotary:_doubled", with_arguments(_of_the_other_mode), "spelled rotary",
    ),
    Mutant(
        "lifting-says-nothing-of-signed-sines", "the report says why halves that change places without a sign stay",
        FORMS + "rotary:_swapped", answering(None), "spelled rotary",
    ),
)  # fmt: skip
