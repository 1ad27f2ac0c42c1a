"""The kinds of items, by name. Each opens its examples only in the process that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npugraph_ex.errors import UsageError
from npugraph_ex_conformance.fidelity.table import FIDELITY
from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer, ItemKind
from npugraph_ex_conformance.mutation.oracle import systematic_mutants
from npugraph_ex_conformance.steering.kind import steered

if TYPE_CHECKING:
    from npugraph_ex.testing import Outcome, Program
    from npugraph_ex.testing.generator.strategies import Maker

_STRIDE = 1_000_003
"""Examples that take a number get another one for each seed."""


def _integers(_number: int, *, dynamic: bool | None) -> Maker:
    from npugraph_ex import testing

    return testing.exact_programs(dynamic=dynamic)


def _planted(number: int, *, near_miss: bool) -> Maker:
    """A rule's programs, of all rules in turn, none of whose variants may be missing."""
    from npugraph_ex import testing
    from npugraph_ex.fusion.rules import RULE_NAMES, is_usable
    from npugraph_ex.testing.generator.near_misses import applicable

    names = [
        name for name in sorted(RULE_NAMES) if not near_miss or any(map(applicable, testing.registered_patterns(name)))
    ]
    name = names[number % len(names)]
    if not is_usable(name):
        raise ValueError(f"a variant of {name} cannot be prepared, so that no program has it.")
    return testing.planted_programs(pattern=name, near_miss=near_miss)


def _programs(what: str, made: Callable[[int], Maker], route: str, *, name: str, batch: int) -> ItemKind:
    """A kind of random programs that the oracle checks along a route."""

    def seed(settings: CampaignSettings, number: int) -> str:
        return f"{settings.seed}:{name}:{number}"

    def opened(settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
        from npugraph_ex.testing import Case, check, sample

        def checked(number: int) -> ItemAnswer:
            program = sample(made(number), f"{seed(settings, number)}:0")  # as find_failure draws its first
            outcome = check(Case.of(program, route=route))
            return ItemAnswer(outcome.failures[0] if outcome.failures else "", _features(program, outcome))

        return checked

    def shrink(settings: CampaignSettings, number: int) -> str:
        from npugraph_ex.testing import find_failure, script_of

        found = find_failure(made(number), examples=1, seed=seed(settings, number), route=route)
        return script_of(*found) if found is not None else ""

    return ItemKind(name, what, opened, shrink=shrink, batch=batch)


def _features(program: Program, outcome: Outcome) -> Iterator[str]:
    """What a program reached: which operator reads which one's result, what passes did with it, why nothing was fused."""
    made = {name: step.operator for step in program.steps for name in step.results}
    for step in program.steps:
        for value in step.args:
            yield f"{made.get(getattr(value, 'name', ''), 'input')} > {step.operator}"
    for spec in program.inputs:
        yield f"input {spec.dtype} {spec.layout}{' shared' if spec.alias_of is not None else ''}"
    for record in outcome.report.passes if outcome.report is not None else ():
        yield f"pass {record.name}: {record.outcome}"
    for reason in outcome.near_misses:
        yield f"near-miss: {''.join(letter for letter in reason if not letter.isdigit())[:80]}"
    if program.pattern is not None:
        yield f"{program.pattern} {program.dtype} {program.near_miss or 'planted'} {'dynamic' if program.dynamic else 'static'}"


def _examples(
    family: str, what: str, *, batch: int, shrink: Callable[[CampaignSettings, int], str] | None = None
) -> ItemKind:
    """A family of examples as a kind."""

    def opened(settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
        from npugraph_ex_conformance.examples import FAMILIES

        return lambda number: ItemAnswer(FAMILIES[family](settings.seed * _STRIDE + number))

    return ItemKind(family.replace(" ", "-"), what, opened, shrink=shrink, batch=batch)


def _caller_script(settings: CampaignSettings, number: int) -> str:
    from npugraph_ex_conformance.examples.caller_scripts import caller_script

    return caller_script(settings.seed * _STRIDE + number)


def _listed(
    name: str,
    what: str,
    listed: Callable[[CampaignSettings], list[Any]],
    checked: Callable[[CampaignSettings, Any], ItemAnswer],
    **options: Any,
) -> ItemKind:
    """A kind with an end: the examples are the elements of a list."""

    def opened(settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
        elements = listed(settings)
        return lambda number: checked(settings, elements[number])

    return ItemKind(name, what, opened, size=lambda settings: len(listed(settings)), **options)


def _records(_settings: CampaignSettings) -> list[str]:
    from npugraph_ex.operators import OPERATORS

    return sorted(name for name, record in OPERATORS.items() if record.formula is not None)


def _record(_settings: CampaignSettings, name: str) -> ItemAnswer:
    from npugraph_ex.operators import OPERATORS
    from npugraph_ex_conformance.operator_checks import faults

    return ItemAnswer("; ".join(faults(OPERATORS[name])), label=name)


def _operator_cases(settings: CampaignSettings) -> list[Any]:
    from npugraph_ex_conformance.campaign.strangers import operator_cases

    return list(operator_cases(settings))


def _operator_case(settings: CampaignSettings, case: Any) -> ItemAnswer:
    from npugraph_ex_conformance.campaign.strangers import check_operator

    return check_operator(settings, case)


def _architecture_cases(settings: CampaignSettings) -> list[Any]:
    from npugraph_ex_conformance.campaign.architecture_checks import architecture_cases

    return list(architecture_cases(settings))


def _architecture(settings: CampaignSettings, case: Any) -> ItemAnswer:
    from npugraph_ex_conformance.campaign.architecture_checks import check_architecture

    return check_architecture(settings, case)


def _mutants(_settings: CampaignSettings) -> list[str]:
    from npugraph_ex.testing import mutants

    return [*mutants()]


def _mutant(_settings: CampaignSettings, name: str) -> ItemAnswer:
    from npugraph_ex_conformance.mutants.search import kill

    killed = kill(name)
    return ItemAnswer("" if killed.examples else "survives", [f"killed: {name}"], name)


def upstream_files(settings: CampaignSettings) -> list[Any]:
    """The files of tests below the checkout; raises UsageError where there is none."""
    from pathlib import Path

    from npugraph_ex_conformance.upstream.checkout import find

    if not settings.checkout:
        raise UsageError("the kind upstream needs --checkout, a folder of op-plugin's or torch_npu's tests")
    return list(find(Path(settings.checkout)).files)


def _file(settings: CampaignSettings, file: Any) -> ItemAnswer:
    from npu_emulator.settings import SOCS
    from npugraph_ex_conformance.upstream import known
    from npugraph_ex_conformance.upstream.checkout import find
    from npugraph_ex_conformance.upstream.process import ProcessLimits, run_file

    checkout = find(file)
    limits = ProcessLimits(600, max(int(settings.memory), 1), 2, SOCS)
    outcomes = known.explained(run_file(file, checkout, limits), known.load(known.OURS, checkout.project))
    wrong = [outcome for outcome in outcomes if outcome.state == "failed" and not outcome.known]
    return ItemAnswer("; ".join(f"{outcome.test}: {outcome.cause}" for outcome in wrong), label=checkout.name(file))


def kind_named(name: str) -> ItemKind:
    """A kind of the registry; or ``module:attribute``, somebody's own.

    Raises:
        UsageError: there is none of this name.
    """
    module, colon, attribute = name.partition(":")
    try:
        found: Any = getattr(import_module(module), attribute) if colon else KINDS[name]
    except (ImportError, AttributeError, KeyError):
        found = None
    if not isinstance(found, ItemKind):
        raise UsageError(
            f"there is no kind of items called {name!r}; there are {', '.join(KINDS)}, and MODULE:NAME for your own"
        )
    return found


_ALL = (
    _programs(
        "random programs on integers, through the passes",
        partial(_integers, dynamic=False),
        "fx",
        name="integers",
        batch=100,
    ),
    _programs("those with symbolic sizes", partial(_integers, dynamic=True), "fx", name="integers-dynamic", batch=50),
    _programs(
        "a planted pattern, through the passes", partial(_planted, near_miss=False), "fx", name="planted", batch=30
    ),
    _programs("what only resembles a pattern", partial(_planted, near_miss=True), "fx", name="near-misses", batch=40),
    _programs("integers, captured and replayed", partial(_integers, dynamic=None), "graph", name="replays", batch=30),
    _programs(
        "a pattern, captured and replayed",
        partial(_planted, near_miss=False),
        "graph",
        name="planted-replays",
        batch=10,
    ),
    _programs("through torch.compile", partial(_integers, dynamic=None), "compile", name="compiled", batch=5),
    _examples("streams", "graphs of several streams, under every schedule", batch=60),
    _examples("stream graphs", "random graphs of several streams: the stream check beside the device", batch=40),
    _examples("device programs", "random programs on the device, and all that it tells of them", batch=15),
    _examples("device settings", "settings of the emulated device, and what npu-smi says then", batch=60),
    _examples("pytest projects", "random test projects, and what the pytest plugin makes of each phase", batch=10),
    _examples("parts", "parts of graphs on streams", batch=10),
    _examples("racy parts", "racy programs, which the compiler refuses or repairs", batch=10),
    _examples("side streams", "programs that the compiler divides between two streams", batch=10),
    _examples("forms", "every form in which streams are written", batch=6),
    _examples("events", "where events stand", batch=1000),
    _examples("spellings", "operators written in ATen, lifted", batch=20),
    _examples("spellings in turn", "those, of one form after the other", batch=20),
    _examples("joined parameters", "models whose projections are joined, and whose weights change", batch=15),
    _examples("user rules", "a user's rules", batch=20),
    _examples("wrong passes", "passes that rewrite graphs by chance, under check_numerics", batch=40),
    _examples("literals", "numbers in patterns", batch=20),
    _examples("collectives", "collectives, read and written at once or late, through the passes", batch=20),
    _examples("random numbers", "random numbers in captured graphs", batch=10),
    _examples("updates", "host arguments of captured graphs", batch=8),
    _examples("cache", "saved compilations", batch=8),
    _examples("saved graphs", "graphs that are saved and loaded, and what they refuse", batch=10),
    _examples("callers", "what callers pass, keep, write and drop", batch=15, shrink=_caller_script),
    _examples("idioms", "what no graph shows: pads, unused draws, checkpoints, gradients, tangents", batch=15),
    _examples("nested regions", "nested compile regions, called in many ways", batch=10),
    _examples("undeclared effects", "operators that write and return what their schemas do not say", batch=20),
    _examples("static kernels", "static kernels, with a stand-in for CANN's compiler", batch=4),
    _examples("shared pool", "several graphs in one pool", batch=15),
    _listed("operators", "the checks of every operator's record", _records, _record, batch=4),
    _listed(
        "opinfo", "torch's database of operators, compiled against eager mode", _operator_cases, _operator_case, batch=6
    ),
    _listed(
        "architectures",
        "architectures of transformers: calls, sessions, generated text and training, against eager mode",
        _architecture_cases,
        _architecture,
        batch=1,
    ),
    FIDELITY,
    steered(kind_named),
    systematic_mutants(kind_named),
    _listed("mutants", "deliberate faults: does the suite notice?", _mutants, _mutant, batch=1),
    _listed("upstream", "test files of op-plugin or torch_npu", upstream_files, _file, batch=1, processor=3600),
)
KINDS: Mapping[str, ItemKind] = MappingProxyType({kind.name: kind for kind in _ALL})
