"""Writes a failing case as a script of one page that reproduces it under plain ``python``."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from npugraph_ex.testing import mutation
from npugraph_ex.testing.arguments import checked
from npugraph_ex.testing.failures.blame import find_guilty
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.generator.program import Program, function_of, literal
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.oracle.checking import check

_TEMPLATE = '''\
"""{title}

Run it with plain python: it exits 1 and says what is wrong as long as the fault is there, and 0 when it is gone.
Guilty: {guilty}
"""

from npugraph_ex.testing import start_target

start_target("auto")  # a real NPU where there is one, otherwise the emulated one; before torch is imported

from npugraph_ex.testing import Input, reproduce
{setup}
PROGRAM = """
{source}"""

INPUTS = [
{inputs}
]

reproduce(
    PROGRAM,
    INPUTS,
{arguments}
)
'''


@checked
def script_of(case: Case, outcome: Outcome, *, guilty: str | None = None, setup: str = "") -> str:
    """The script that reproduces a failed case.

    Args:
        case: the case.
        outcome: what came of it.
        guilty: which pass or rule did it; found by running pass by pass when None.
        setup: lines of Python that run before the program, such as the registration of a replacement.

    Raises:
        ValueError: the case did not fail.
    """
    if outcome.ok:
        raise ValueError("script_of is for a case that failed; this one has no failures.")
    switched_on = mutation.active_mutant()
    arguments = {
        "sizes": _compact_sizes(case.sizes),
        "route": case.route,
        "dynamic": case.dynamic,
        "functional": case.functional,
        "expected": case.expected,
        "runs": case.runs,
        "options": dict(case.options),
        "mutant": switched_on,
    }
    standard = {
        "route": "graph",
        "dynamic": False,
        "functional": True,
        "expected": None,
        "runs": True,
        "options": {},
        "mutant": None,
    }
    lines = [
        f"    {name}={value!r}," for name, value in arguments.items() if name not in standard or standard[name] != value
    ]
    title = textwrap.shorten(outcome.failures[0].replace('"""', "'''").replace("\\", "/"), 300)
    return _TEMPLATE.format(
        title=title,
        guilty=guilty if guilty is not None else find_guilty(case),
        source=case.source,
        setup=f"\n{setup.strip()}\n" if setup.strip() else "",
        inputs="\n".join(f"    {_text(spec)}," for spec in case.inputs),
        arguments="\n".join(lines),
    )


def _compact_sizes(sizes: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    return [dict(size) for size in sizes]


def _text(spec: Input) -> str:
    """``Input(...)`` with only what is not the default."""
    plain = Input(())
    shown = [repr(spec.shape)]
    names = [field.name for field in dataclasses.fields(Input)][1:]
    changed = {name: getattr(spec, name) for name in names if getattr(spec, name) != getattr(plain, name)}
    shown += [f"{name}={_numbers(x) if isinstance(x, tuple) else repr(x)}" for name, x in changed.items()]
    return f"Input({', '.join(shown)})"


def _numbers(values: Sequence[float]) -> str:
    return f"({', '.join(map(literal, values))},)"


def write_script(case: Case, outcome: Outcome, folder: Path, name: str, *, guilty: str) -> tuple[Path, str]:
    """Write the script to ``folder/name.py``; its path and its text."""
    text = script_of(case, outcome, guilty=guilty)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path, text


@checked
def reproduce(
    program: str | Program,
    inputs: Sequence[Input],
    *,
    sizes: Sequence[Mapping[str, int]] = ({}, {}, {}, {}),
    mutant: str | None = None,
    **options: Any,
) -> None:
    """Check one program, print what is wrong, and end the process: 1 if anything is, otherwise 0.

    Args:
        program: the text of a function ``program`` of device tensors.
        inputs: its arguments.
        sizes: for each call, the values of the symbols in shapes.
        mutant: a deliberate fault to switch on.
        **options: further fields of ``Case``.
    """
    source = program.source if isinstance(program, Program) else program.strip() + "\n"
    case = Case(source, tuple(inputs), tuple(sizes), **options)
    function_of(source)  # a syntax error is the script's own and is raised here
    outcome = _checked(case, mutant)
    if outcome.ok:
        sys.stdout.write(f"right: fused {outcome.fusions} times, all values within the limits: {case.limits}\n")
        sys.exit(0)
    sys.stdout.write("\n".join(["WRONG", *outcome.failures, ""]))
    sys.exit(1)


def _checked(case: Case, name: str | None) -> Outcome:
    with client_operators(), mutation.mutant(name) if name is not None else nullcontext():
        return check(case)
