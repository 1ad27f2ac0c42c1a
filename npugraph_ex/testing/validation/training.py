"""Runs a rule for training: its graph of forward and backward, before and after the replacement, judged by float64.

Such a rule is applied to the joint graph of a model. Its own joint graph is compared here, which has the gradients among its
inputs and results; random programs are not planted around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from torch import fx

from npugraph_ex.fusion.engine import apply_rules
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.testing.crashes import CrashedError
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.inputs import Input, Integers, make_inputs
from npugraph_ex.testing.generator.numbers import numbers_in_graph
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.oracle.host import HostGraph
from npugraph_ex.testing.oracle.judge import Limits
from npugraph_ex.testing.oracle.tracing import copy_of
from npugraph_ex.testing.oracle.verdict import Verdict
from npugraph_ex.testing.oracle.without_device import compare_on_host
from npugraph_ex.testing.validation.eager import drawn_numbers
from npugraph_ex.testing.validation.effort import Effort
from npugraph_ex.testing.validation.integers import integer_ranges
from npugraph_ex.testing.validation.survey import Setting, computing, traced
from npugraph_ex.testing.validation.trials import in_turn

_SCALES = (1.0, 0.01, 0.001, 20.0)
"""Magnitudes of the inputs in turn: an epsilon matters only where all that it is added to is small."""


@dataclass(frozen=True)
class JointTrial:
    """The joint graph in one setting; ``verdict`` is None where it cannot be computed with random inputs."""

    setting: Setting
    verdict: Verdict | None


def joint_trials(
    prepared: PreparedRule, pattern: Pattern, settings: Sequence[Setting], effort: Effort
) -> list[JointTrial]:
    """Compare the joint graph with the replaced one, in the settings in turn."""
    kinds = len({setting.dtypes for setting in settings})
    name = f"{effort.seed}:{prepared.rule.name}"
    chosen, choices = in_turn(settings, Choices(Sampled(name))), Choices(Sampled(f"{name}: numbers"))
    trials = []
    for number, (setting, scale) in enumerate(islice(zip(chosen, cycle(_SCALES)), effort.examples)):
        drawn = drawn_numbers(choices, pattern, setting)
        ranges = integer_ranges(pattern, setting)
        whole = [ranges.get(argument.name) for argument in pattern.arguments]
        try:
            with computing(drawn):
                before = _without_numbers(traced(pattern, drawn))
                verdict = _verdict(prepared, before, whole, number, scale, near_numbers=number // kinds % 2 == 0)
        except CrashedError:
            verdict = None
        trials.append(JointTrial(setting, verdict))
        if effort.after_each is not None:
            effort.after_each((number + 1) / effort.examples)
    return trials


def _without_numbers(before: fx.GraphModule) -> fx.GraphModule:
    """The joint graph, in which numeric arguments stand as numbers, without inputs for them."""
    for node in before.graph.find_nodes(op="placeholder"):
        if "val" not in node.meta:
            before.graph.erase_node(node)
    before.recompile()
    return before


def _verdict(
    prepared: PreparedRule, before: fx.GraphModule, whole: Sequence[Integers | None], number: int, scale: float,
    *, near_numbers: bool,
) -> Verdict | None:  # fmt: skip
    after, report = copy_of(before), ReportBuilder()
    apply_rules(after.graph, (prepared,), report)
    numbers = numbers_in_graph(before.graph) + numbers_in_graph(after.graph) if near_numbers else ()
    inputs = list(_inputs(before.graph, number, scale, numbers))
    for place, integers in enumerate(whole):
        if integers is not None:
            inputs[place] = inputs[place].within(integers)
    try:
        HostGraph(before).run(make_inputs(inputs, device="cpu"))
    except Exception:  # noqa: BLE001 - whatever a user's function raises for these values
        return None
    return compare_on_host(before, after, report.build(), inputs=tuple(inputs), sizes=({},), limits=Limits())


def _inputs(graph: fx.Graph, number: int, scale: float, around: tuple[float, ...]) -> Iterator[Input]:
    """The arguments, near some numbers, and the incoming gradients, which keep the magnitude of one."""
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta["val"]
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(map(int, value.shape))
        floating, own = value.dtype.is_floating_point, "tangent" not in node.name
        yield Input(
            shape, dtype, scale=scale if floating and own else 1.0, seed=number * 64 + place,
            below=None if floating else 2, around=around if floating and own else (),
        )  # fmt: skip
