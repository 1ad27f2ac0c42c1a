"""Faults that nobody's values show, each with the reason: what `argued.toml` says, and what of it is no longer true."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from npugraph_ex_conformance.mutation.sites import FaultIdentity, sites

ARGUED = Path(__file__).parent / "argued.toml"
EFFECTS = ("none", "speed", "report")
"""What a fault changes: nothing that a program could notice; only time or memory; only what people read."""


class ArguedEffect(NamedTuple):
    """Why no value shows a fault.

    Attributes:
        effect: one of ``EFFECTS``.
        why: a sentence that a reader of the function can check.
    """

    effect: str
    why: str


def arguments(file: Path = ARGUED) -> Mapping[FaultIdentity, ArguedEffect]:
    """The arguments of a file.

    Raises:
        ValueError: an entry has another effect, has no reason, or is there twice.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # the extra `conformance` brings it
    found: dict[FaultIdentity, ArguedEffect] = {}
    for module, functions in tomllib.loads(file.read_text(encoding="utf-8")).items():
        for function, entries in functions.items():
            for entry in entries:
                fault = FaultIdentity(module, function, entry["change"], entry["text"], entry.get("turn", 0))
                argument = ArguedEffect(entry["effect"], entry["why"])
                if argument.effect not in EFFECTS or not argument.why or fault in found:
                    raise ValueError(
                        f"{fault}: an effect of {', '.join(EFFECTS)}, a reason, and once; it is {argument}."
                    )
                found[fault] = argument
    return found


def stale(faults: Iterable[FaultIdentity]) -> list[FaultIdentity]:
    """Those faults that can no longer be made: the code has changed, so their arguments are about nothing."""
    faults = list(faults)
    there = {site.identity for module in {fault.module for fault in faults} for site in sites(module)}
    return [fault for fault in faults if fault not in there]


def refuted(rows: Iterable[Mapping[str, Any]], argued: Mapping[FaultIdentity, ArguedEffect]) -> list[str]:
    """What the rows of a campaign say against the arguments: an example noticed the fault, by more than its time."""
    return [
        f"{row['label']} is noticed by {row['value']['by']}; it was argued: {argued[identity].why}"
        for row in rows
        if row["value"]["by"]
        and (identity := identity_of(row)) in argued
        and not (argued[identity].effect == "speed" and "SIGXCPU" in row["value"]["by"])
    ]


def identity_of(row: Mapping[str, Any]) -> FaultIdentity:
    """The fault of a row of a campaign."""
    return FaultIdentity(*row["value"]["fault"])
