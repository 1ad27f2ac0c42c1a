"""The three-way oracle: eager mode, the optimised graph run operator by operator, and capture and replay.

Each way makes the same calls, on inputs of its own, with new values and (mostly) new addresses each time, with
unrelated memory allocated in between and every result kept alive. Then:

* replay equals the optimised graph to the bit, call by call, right after each call and again at the end;
* the optimised graph equals eager mode in metadata, aliasing and changed inputs, and in values by the float64 judge;
* exactly the expected number of subgraphs was fused, and no pass had to be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

import npugraph_ex
from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import compile_graph, scopes
from npugraph_ex.aclgraph.host_updates import UpdatePlan
from npugraph_ex.aclgraph.obstacles import find_obstacles
from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.errors import CaptureError
from npugraph_ex.report.passes import PassReport
from npugraph_ex.testing.arguments import checked
from npugraph_ex.testing.generator.inputs import make_inputs, refill
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.case import UNRUNNABLE, Case, Outcome
from npugraph_ex.testing.oracle.host import HostGraph
from npugraph_ex.testing.oracle.judge import same_values
from npugraph_ex.testing.oracle.memory import replay_uses_memory
from npugraph_ex.testing.oracle.observation import Observation, host_copy, observe, shared_counters, visible_difference
from npugraph_ex.testing.oracle.side_streams import free_events
from npugraph_ex.testing.oracle.verdict import JudgedValues, judge_values
from npugraph_ex.testing.oracle.without_device import compare_on_host, optimise, replaced_nodes

_JUDGED_CALLS = 2
"""In how many calls of a case values are judged: the float64 reference costs more than all the rest. Replay is compared in all."""


@dataclass
class _Session:
    """All calls that one way of running made."""

    seen: list[Observation] = field(default_factory=list)
    alive: list[tuple[Any, ...]] = field(default_factory=list)
    inputs: list[list[torch.Tensor]] = field(default_factory=list)
    counters: tuple[int | None, ...] = ()

    def at_end(self) -> list[list[Any]]:
        """The results of every call as they are now."""
        return [[host_copy(value) for value in outputs] for outputs in self.alive]


def _session(function: Callable[..., Any], case: Case) -> _Session:
    """Make every call of the case: new addresses for each, except that the last reuses those of the one before."""
    session, junk = _Session(), []
    for call, sizes in enumerate(case.sizes):
        reuse = call == len(case.sizes) - 1 and call > 0 and sizes == case.sizes[call - 1]
        if reuse:
            inputs = session.inputs[-1]
            refill(inputs, case.inputs, sizes, call)
        else:
            inputs = make_inputs(case.inputs, sizes=sizes, call=call)
        outputs = function(*inputs)
        outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        session.seen.append(observe(inputs, outputs))
        session.alive.append(outputs)
        session.inputs.append(inputs)
        # Somebody else's memory, so that nothing is right because an address happened to be free.
        junk.append(torch.full((257 + 64 * call,), -7.0, device=inputs[0].device if inputs else "npu"))
        if call % 2:
            junk.clear()
    session.counters = shared_counters([value for outputs in session.alive for value in outputs])
    return session


@checked
def check(case: Case | Program) -> Outcome:
    """Check one case. Never raises for what the case does: an exception is a failure of the outcome.

    Args:
        case: with everything that decides how it is checked; or a program as strategies draw them, which is checked as
            ``Case.of(program)``.

    Raises:
        TypeError: it is neither.
    """
    case = Case.of(case) if isinstance(case, Program) else case
    outcome = Outcome()
    try:
        with free_events():
            scopes.closing(_check)(case, outcome)
    except Exception as error:  # noqa: BLE001 - whatever the code under test raises is what the outcome reports
        outcome.failures.append(failure_of(case, error))
    return outcome


def failure_of(case: Case, error: Exception) -> str:
    """The failure of a case in which an error was raised; it is the program's own if the program alone raises, too."""
    own = _error_of(case)
    what, shown = ("raised", error) if own is None else (UNRUNNABLE, own)
    return f"{what} {type(shown).__name__}: {str(shown)[:1500]}"


def _error_of(case: Case) -> Exception | None:
    """What the program itself raises in one of its calls, before anything is made of it."""
    if not case.runs:
        return None
    try:
        function, device = case.function(), "npu"
        if case.route == "fx":
            traced = tracing.trace(
                function, case.inputs, case.sizes[0], dynamic=case.dynamic, functional=case.functional
            )
            function, device = (lambda *inputs: HostGraph(traced).run(inputs)), "cpu"
        for call, sizes in enumerate(case.sizes):
            scopes.closing(function)(*make_inputs(case.inputs, sizes=sizes, call=call, device=device))
    except Exception as error:  # noqa: BLE001 - any reason will do
        return error
    return None


def _check(case: Case, outcome: Outcome) -> None:
    if case.route == "fx":
        _check_passes(case, outcome)
        return
    compiled = _CompiledCase(case)
    if not case.runs:
        compiled.optimise()
        _count(case, outcome, compiled.report)
        return
    # Where in-place operators were made functional, what outputs alias is AOT's runtime's affair, not the graph's: the
    # graph as traced is then what must not change.
    without = compiled.traced if case.route == "graph" and case.functional else case.function()
    eager = _session(without, case)
    optimised = _session(compiled.optimise(), case)
    _count(case, outcome, compiled.report)
    try:
        captured = compiled.capture()
    except CaptureError:
        if not find_obstacles(compiled.traced, UpdatePlan.from_graph(compiled.traced)):
            raise  # else the program could not be captured as it was, and nothing is there to compare
    else:
        replayed = _session(captured, case)
        _compare_exactly(optimised, replayed, outcome)
        if case.route == "graph" and outcome.ok:
            _check_memory(case, captured, replayed, outcome)
    _compare_with_eager(case, compiled.traced, eager, optimised, outcome, compiled.graph)


def _check_passes(case: Case, outcome: Outcome) -> None:
    traced = tracing.trace(
        case.function(), case.inputs, case.sizes[0], dynamic=case.dynamic, functional=case.functional
    )
    optimised = tracing.copy_of(traced)
    report = optimise(optimised, case.options)
    _count(case, outcome, report)
    if not case.runs:
        return
    judged = compare_on_host(traced, optimised, report, inputs=case.inputs, sizes=case.sizes, limits=case.limits)
    outcome.worst_ulp, outcome.eager_ulp = judged.worst_ulp, judged.eager_ulp
    outcome.failures += [f"optimised, {message}" for message in judged.messages]


def check_optimised(
    case: Case, traced: fx.GraphModule, optimised: Callable[..., Any], report: PassReport | None
) -> Outcome:
    """Compare an optimised graph, or what runs one in a way of its own, with the graph that it was made from."""
    outcome = Outcome()
    _count(case, outcome, report)
    graph = optimised if isinstance(optimised, fx.GraphModule) else None
    _compare_with_eager(case, traced, _session(traced, case), _session(optimised, case), outcome, graph)
    return outcome


def _generators() -> tuple[list[int], list[int]]:
    """The states of the CPU's and the device's default generators."""
    device = torch.get_device_module("npu")
    return torch.get_rng_state().tolist(), device.get_rng_state().tolist() if device.is_available() else []


class _CompiledCase:
    """The case's program, compiled both ways."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.report: PassReport | None = None
        self.traced: fx.GraphModule = tracing.trace(
            case.function(), case.inputs, case.sizes[0], dynamic=case.dynamic, functional=case.functional
        )

        self.graph: fx.GraphModule | None = None
        """The optimised graph, once it is there; none where Dynamo has it."""

    def optimise(self) -> Callable[..., Any]:
        """The optimised graph, to be run operator by operator."""
        if self.case.route == "compile":
            return self._through_dynamo({**self.case.options, "force_eager": True})
        self.graph = tracing.copy_of(self.traced)
        torch.rand(1)  # a generator that stands where a seed puts it would not show that it was seeded again
        before = _generators()
        compiled = npugraph_ex.compile_fx(self.graph, None, {**self.case.options, "force_eager": True})
        if _generators() != before:
            raise RuntimeError("compiling moved a random generator of the process.")
        self.report = npugraph_ex.last_report()
        return compiled

    def capture(self) -> Callable[..., Any]:
        """The optimised graph, captured and replayed."""
        if self.case.route == "compile" or self.graph is None:
            return self._through_dynamo(self.case.options)
        # The passes have run already; this is what compile_fx does after them. A graph that is not captured is no replay.
        config = CompilerConfig()
        apply_flat(config, {"require_capture": True, **self.case.options})
        examples = [node.meta.get("val") for node in self.graph.graph.find_nodes(op="placeholder")]
        return compile_graph(self.graph, examples, config.to_options())

    def _through_dynamo(self, options: Mapping[str, Any]) -> Callable[..., Any]:
        torch.compiler.reset()
        # Not dynamic=True, which would make every size symbolic, those too that the program knows as numbers. As it is,
        # Dynamo compiles the second call anew with those sizes symbolic that have changed.
        compiled = torch.compile(self.case.function(), backend="npugraph_ex", options=dict(options), fullgraph=True)

        def call(*inputs: torch.Tensor) -> Any:
            with torch.no_grad(), _torch_private.unmeasured_guards():
                result = compiled(*inputs)
            self.report = npugraph_ex.last_report()
            return result

        return call


def _count(case: Case, outcome: Outcome, report: PassReport | None) -> None:
    if report is None:
        outcome.failures.append("compile produced no pass report")
        return
    outcome.report = report
    outcome.fusions = report.fusions()
    outcome.near_misses = tuple(miss.reason for miss in report.near_misses())
    if case.expected is not None and outcome.fusions != case.expected:
        reasons = "; ".join(outcome.near_misses) or "none"
        outcome.failures.append(f"fused {outcome.fusions} times instead of {case.expected}; near-misses: {reasons}")
    outcome.failures += [
        f"pass {record.name} was rolled back: {record.message}"
        for record in report.passes
        if record.outcome == "rolled back"
    ]


def _compare_exactly(optimised: _Session, replayed: _Session, outcome: Outcome) -> None:
    """Replay is bit-equal to the optimised graph: no tolerance."""
    for call, (expected, actual) in enumerate(zip(optimised.seen, replayed.seen, strict=True)):
        what = visible_difference(expected, actual) or _first_difference(expected, actual)
        if what:
            outcome.failures.append(f"replay, call {call}: {what}")
            return
    for call, (before, after) in enumerate(zip(optimised.at_end(), replayed.at_end(), strict=True)):
        for position, (old, new) in enumerate(zip(before, after, strict=True)):
            if not same_values(old, new):
                outcome.failures.append(f"replay, output {position} of call {call} was changed by a later call")
                return
    if optimised.counters != replayed.counters:
        outcome.failures.append("replay, results of different calls share version counters otherwise than eager mode's")


def _check_memory(case: Case, captured: Callable[..., Any], session: _Session, outcome: Outcome) -> None:
    """Once captured, a call allocates nothing but copies of its results, and gives back what they were."""
    session.alive.clear()
    call = len(case.sizes) - 1
    inputs = make_inputs(case.inputs, sizes=case.sizes[call], call=call)
    found = replay_uses_memory(captured, inputs)
    if found:
        outcome.failures.append(f"replay {found}")


def _first_difference(expected: Observation, actual: Observation) -> str | None:
    pairs = [("output", expected.outputs, actual.outputs), ("input", expected.inputs, actual.inputs)]
    for kind, left, right in pairs:
        for position, (old, new) in enumerate(zip(left, right, strict=True)):
            if not same_values(old, new):
                return f"{kind} {position} differs from the optimised graph run operator by operator"
    return None


def _other_zero_signs(expected: Any, actual: Any) -> int:
    """How many elements are zero in both, with another sign."""
    if not isinstance(actual, torch.Tensor) or not actual.is_floating_point() or actual.shape != expected.shape:
        return 0
    return int(((expected == 0) & (actual == 0) & (expected.signbit() != actual.signbit())).sum())


def _compare_with_eager(
    case: Case, traced: fx.GraphModule, eager: _Session, optimised: _Session, outcome: Outcome,
    graph: fx.GraphModule | None,
) -> None:  # fmt: skip
    judged_calls = 0
    for call, (expected, actual) in enumerate(zip(eager.seen, optimised.seen, strict=True)):
        # Without Dynamo and AOT, a graph is compared with itself.
        kept_as = case.route == "compile"
        difference = visible_difference(expected, actual, kept_as=kept_as)
        if difference:
            outcome.failures.append(f"optimised, call {call}: {difference}")
            return
        values: Sequence[Any] = (*actual.outputs, *actual.inputs)
        wanted: Sequence[Any] = (*expected.outputs, *expected.inputs)
        outcome.elements += sum(value.numel() for value in actual.outputs if isinstance(value, torch.Tensor))
        if all(same_values(old, new) for old, new in zip(wanted, values, strict=True)) or outcome.report is None:
            continue
        outcome.zero_signs += sum(map(_other_zero_signs, wanted, values))
        judged_calls += 1
        if judged_calls > _JUDGED_CALLS:
            return
        inputs = partial(make_inputs, case.inputs, sizes=case.sizes[call], call=call)
        replaced = replaced_nodes(outcome.report)
        what = JudgedValues(traced, inputs, len(actual.outputs), replaced, optimised=graph)
        judged = judge_values(what, values, wanted, limits=case.limits)
        outcome.worst_ulp, outcome.eager_ulp = max(
            (outcome.worst_ulp, outcome.eager_ulp), (judged.worst_ulp, judged.eager_ulp)
        )
        outcome.apart = max(outcome.apart, judged.apart)
        outcome.wrong += judged.wrong
        outcome.failures += [f"optimised, call {call}, {message}" for message in judged.messages]
        if judged.messages:
            return
