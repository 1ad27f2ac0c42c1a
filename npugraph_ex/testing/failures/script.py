"""Writes a failing case as a script of one page that reproduces it under plain ``python``."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

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

{imports}
{setup}
PROGRAM = """
{source}"""

INPUTS = [
{inputs}
]

{function}(
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
    return calling(
        "from npugraph_ex.testing import Input, reproduce",
        "reproduce",
        case,
        outcome,
        _changed(
            route=(case.route, "graph"),
            expected=(case.expected, None),
            runs=(case.runs, True),
            options=(dict(case.options), {}),
        ),
        guilty=guilty if guilty is not None else find_guilty(case),
        setup=setup,
    )


def calling(  # noqa: PLR0913 - a script is said by these
    imports: str,
    function: str,
    case: Case,
    outcome: Outcome,
    arguments: Mapping[str, object],
    *,
    guilty: str,
    setup: str = "",
) -> str:
    """The script that calls a function with a case's program, inputs and sizes.

    Args:
        imports: lines that import the function and ``Input``.
        function: its name.
        case: the case; the deliberate fault that is on is an argument, too.
        outcome: what came of it.
        arguments: what else the function gets.
        guilty: which pass or rule did it.
        setup: lines of Python that run before the program.
    """
    mutant = mutation.active_mutant()
    given = {
        "sizes": [dict(size) for size in case.sizes],
        **arguments,
        **_changed(dynamic=(case.dynamic, False), functional=(case.functional, True), mutant=(mutant, None)),
    }
    title = textwrap.shorten(outcome.failures[0].replace('"""', "'''").replace("\\", "/"), 300)
    return _TEMPLATE.format(
        title=title,
        guilty=guilty,
        source=case.source,
        imports=imports,
        function=function,
        setup=f"\n{setup.strip()}\n" if setup.strip() else "",
        inputs="\n".join(f"    {_text(spec)}," for spec in case.inputs),
        arguments="\n".join(f"    {name}={value!r}," for name, value in given.items()),
    )


def _changed(**values: tuple[object, object]) -> dict[str, object]:
    """The values that are not the usual ones; each comes with the usual one."""
    return {name: value for name, (value, usual) in values.items() if value != usual}


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


def write_script(text: str, folder: Path, name: str) -> Path:
    """Write a script to ``folder/name.py``; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path


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
    end(outcome.failures, f"fused {outcome.fusions} times, all values within the limits: {case.limits}")


def end(failures: Sequence[str], right: str) -> NoReturn:
    """Print what is wrong, or what is right, and end the process: 1 or 0."""
    sys.stdout.write("\n".join(["WRONG", *failures, ""]) if failures else f"right: {right}\n")
    sys.exit(1 if failures else 0)


def _checked(case: Case, name: str | None) -> Outcome:
    with client_operators(), mutation.mutant(name) if name is not None else nullcontext():
        return check(case)
