"""A typed client of `npugraph_ex.testing`: every public name, used as the documentation uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from typing_extensions import assert_type

from npugraph_ex import testing


def started() -> testing.Target:
    """A device to test on."""
    try:
        return testing.start_target("emulated")
    except testing.TargetError as error:
        raise SystemExit(str(error)) from error


def checked(program: testing.Program) -> list[str]:
    """One program through the oracle, and what a failure needs."""
    case = testing.Case.of(program, route="fx")
    outcome = testing.check(case)
    assert_type(outcome, testing.Outcome)
    if not outcome.ok:
        return [testing.script_of(case, outcome), testing.find_guilty(case)]
    return outcome.failures


def drawn() -> testing.Program:
    """Random programs, from hypothesis and from seeds."""
    for strategy in (testing.programs(pattern="mine"), testing.integer_programs()):
        program: testing.Program = strategy.example()
        checked(program)
    graph: fx.GraphModule = testing.stream_graphs().example()
    graph.recompile()
    found = testing.find_failure(testing.exact_programs(), examples=3)
    if found is not None:
        case, outcome = found
        checked_again = testing.check(case)
        assert_type((checked_again, outcome), tuple[testing.Outcome, testing.Outcome])
    indices = {"places": testing.Integers(least=0, most=3, distinct=True)}
    smallest = testing.sample(testing.planted_programs(pattern="mine", integers=indices), 3)
    return testing.shrink(smallest, lambda program: bool(checked(program)))


def judged(candidate: torch.Tensor, reference: torch.Tensor) -> bool:
    """The float64 judge and its limits."""
    limits = testing.Limits()
    judgements: list[testing.Judgement] = [
        testing.judge_floating(candidate, reference, limits=limits),
        testing.judge_quantised(candidate, reference, limits=limits),
    ]
    return bool(testing.ulp(reference, torch.float16).isfinite().all()) and bool(judgements)


def reproduced(source: str) -> Sequence[torch.Tensor]:
    """A failing script, and the inputs that a description stands for."""
    inputs = [testing.Input((4, 8)), testing.Input(("n", 8), dtype="float32")]
    testing.reproduce(source, inputs)
    return testing.make_inputs(inputs, sizes={"n": 3}, device="cpu")


def compared(inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    """What a caller can see of a call, and how two calls differ."""
    seen = testing.observe(inputs, outputs)
    assert_type(seen, testing.Observation)
    return testing.visible_difference(seen, seen)


def known() -> list[str]:
    """The corpora, the registered patterns and the deliberate faults."""
    bugs: tuple[testing.KnownBug, ...] = testing.CORPUS
    programs: tuple[testing.StreamProgram, ...] = testing.stream_corpus()
    patterns: tuple[testing.Pattern, ...] = testing.registered_patterns()
    names = [*testing.mutants(), *testing.shows(bugs[0]), *(program.name for program in programs)]
    with testing.mutant(names[0]):
        killed = testing.kill(names[0])
    builder = testing.StreamBuilder()
    with builder.on("side"):
        builder.input(8)
    return [*names, killed.mutant, *(pattern.name for pattern in patterns)]


def validated() -> list[testing.ValidationFinding]:
    """A user's replacement, and all that a module registers."""
    try:
        rules = testing.load_rules("mine.rules")
    except testing.RulesNotFoundError:
        rules = ()
    try:
        one: testing.Validation = testing.validate_replacement(
            torch.neg, torch.negative, [torch.ones(2)], max_examples=len(rules) + 3
        )
    except testing.ReplacementRefutedError as error:
        raise SystemExit(str(error)) from error
    several: tuple[testing.Validation, ...] = testing.validate_module("mine.rules")
    return [finding for validation in (one, *several) for finding in validation.findings]
