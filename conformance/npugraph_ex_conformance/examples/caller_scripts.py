"""A failing example of `callers`, made small: the same caller calls a smaller program; and the script that makes it do so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from npugraph_ex.testing import mutation
from npugraph_ex.testing.failures.blame import find_guilty
from npugraph_ex.testing.failures.script import calling, end
from npugraph_ex.testing.failures.shrink import shrink
from npugraph_ex.testing.generator.choices import Tape
from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex_conformance.examples.callers import called_program, wrong_with

_TRIES = 150
"""How many smaller programs are tried: each is called sixteen times, and compiled."""


def smallest_call(seed: int) -> tuple[Case, Outcome] | None:
    """The smallest program found that the caller of example ``seed`` finds wrong, and in what; None if nothing is.

    The program of a steered example comes from its tape. What the caller does then comes from the seed all the same, as in
    the script, and may find nothing.
    """
    program, failed = called_program(seed), dict[Program, Outcome]()

    def kind_of(candidate: Program) -> str:
        wrong = wrong_with(seed, Case.of(candidate))
        outcome = Outcome([wrong] if wrong else [])
        if wrong:
            failed[candidate] = outcome
        return outcome.kind

    with Tape().on():
        kind = kind_of(program)
        if not kind:
            return None
        try:
            small = shrink(program, lambda candidate: kind_of(candidate) == kind, tries=_TRIES)
        except ValueError:
            small = program  # it does not fail every time
    return Case.of(small), failed[small]


def caller_script(seed: int) -> str:
    """The script of the smallest failure like example ``seed``; empty if nothing is wrong."""
    found = smallest_call(seed)
    return "" if found is None else script_of_call(seed, *found, guilty=find_guilty(found[0]))


def script_of_call(seed: int, case: Case, outcome: Outcome, *, guilty: str) -> str:
    """The script in which the caller of example ``seed`` calls a program."""
    imports = (
        "from npugraph_ex.testing import Input\n"
        "from npugraph_ex_conformance.examples.caller_scripts import reproduce_call"
    )
    return calling(imports, "reproduce_call", case, outcome, {"caller": seed}, guilty=guilty)


def reproduce_call(
    program: str,
    inputs: Sequence[Input],
    *,
    caller: int,
    sizes: Sequence[Mapping[str, int]],
    dynamic: bool = False,
    functional: bool = True,
    mutant: str | None = None,
) -> None:
    """Let a caller call one program, print what is wrong, and end the process: 1 if anything is, otherwise 0.

    Args:
        program: the text of a function ``program`` of device tensors.
        inputs: its arguments.
        caller: the number of the example whose caller it is.
        sizes: the values of the symbols in shapes, among which the caller chooses.
        dynamic: compile for symbolic shapes.
        functional: whether in-place steps are functionalised before the passes, in a graph without Dynamo.
        mutant: a deliberate fault to switch on.
    """
    case = Case(program.strip() + "\n", tuple(inputs), tuple(sizes), dynamic=dynamic, functional=functional)
    with mutation.mutant(mutant) if mutant is not None else nullcontext():
        wrong = wrong_with(caller, case)
    end([wrong] if wrong else [], "in every call results, and all that the caller kept, are as in eager mode")
