"""Finds where a rule matches: traces its search function for many sizes and dtypes, and asks the matcher about each.

It uses fake tensors only and computes nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.fusion import tracing
from npugraph_ex.fusion.engine import apply_rules
from npugraph_ex.fusion.rule import PreparedRule, always
from npugraph_ex.graph.metadata import quiet_refusals
from npugraph_ex.observe.logger import logger
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import PassReport
from npugraph_ex.testing.crashes import watched
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.validation.guards import numbers_in

Answer = Literal["fused", "guard", "library", "no trace"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MULTIPLES = (1, 2, 4, 8)
_ODD = 31
"""Nearly two blocks of 16, so that what a replacement drops behind whole blocks is half of it."""
_USUAL = (1, 2, 3, 16, _ODD, 64, 100, 128)
_LARGE = (2048, 2048 + 127)
"""More than a replacement's block, whole blocks and nearly one more, and with few rows still small enough to compute with."""
_COMBINATIONS = 8
_ELEMENTS = 1 << 20
_MOST = 24
_MOST_OF_OTHER_DTYPES = 8


@dataclass(frozen=True)
class Setting:
    """Sizes and dtypes of a rule's tensor arguments, in the order of the arguments.

    Attributes:
        shapes: of each argument.
        dtypes: of each argument.
        broadcasts: the position of the argument that broadcasts against the others; None where sizes agree as the examples' do.
        foreign: whether a dtype is neither the examples' nor one that is tried in its place in every size.
        numbers: the numeric arguments, by name; where there are none they are the given ones, and random programs draw them.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    broadcasts: int | None = None
    foreign: bool = False
    numbers: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return ", ".join(
            f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


@dataclass(frozen=True)
class Surveyed:
    """One setting and the matcher's answer.

    Attributes:
        setting: what was asked about.
        answer: "fused"; "guard" when only the rule's own condition refused; "library" when the matcher refused
            whatever the condition says; "no trace" when the search function does not take such arguments.
        reason: of a refusal.
        allowed: whether the rule's own condition let it pass.
    """

    setting: Setting
    answer: Answer
    reason: str = ""
    allowed: bool = True


def survey(
    prepared: PreparedRule, pattern: Pattern, *, dtypes: Sequence[torch.dtype] | None = None
) -> tuple[Surveyed, ...]:
    """Ask the matcher about the rule alone, in settings around its example inputs and around what its guard mentions.

    They are always the same: where a rule is asked about decides the verdict, and chance must not.

    Args:
        prepared: the rule.
        pattern: the same, as something to plant.
        dtypes: of the floating-point arguments; None for what the library usually sees.
    """
    settings = _settings(pattern, dtypes, random.Random(0))  # noqa: S311 - chooses sizes
    return tuple(asked(prepared, pattern, setting) for setting in settings)


def asked(prepared: PreparedRule, pattern: Pattern, setting: Setting) -> Surveyed:
    """The matcher's answer about one setting."""
    report = match_report(pattern, setting, (prepared,))
    if isinstance(report, str):
        return Surveyed(setting, "no trace", report)
    if report.fusions():
        return Surveyed(setting, "fused")
    reason = _reason(report)
    open_rule = dataclasses.replace(prepared, rule=dataclasses.replace(prepared.rule, condition=always))
    without = match_report(pattern, setting, (open_rule,))
    if isinstance(without, str):
        return Surveyed(setting, "no trace", without)
    if without.fusions():
        return Surveyed(setting, "guard", reason, allowed=False)
    other = _reason(without)
    return Surveyed(setting, "library", other, allowed=other == reason)


def example_setting(pattern: Pattern) -> Setting:
    """The sizes and dtypes of the rule's own example inputs."""
    return Setting(
        tuple(tuple(argument.dims) for argument in pattern.arguments),
        tuple(argument.dtype for argument in pattern.arguments),
    )


def has_other_ranks(pattern: Pattern, setting: Setting) -> bool:
    """Whether an argument, but for one that broadcasts, has another number of dimensions than in the examples."""
    return any(
        len(shape) != len(argument.dims) and place != setting.broadcasts
        for place, (argument, shape) in enumerate(zip(pattern.arguments, setting.shapes, strict=True))
    )


def _reason(report: PassReport) -> str:
    """Why nothing was fused."""
    reasons = [miss.reason for miss in report.near_misses()] + [rule.inactive for rule in report.rules if rule.inactive]
    return next(iter(reasons), "nothing in the graph looks like the pattern")


def match_report(pattern: Pattern, setting: Setting, rules: tuple[PreparedRule, ...]) -> PassReport | str:
    """The report of the rules on the pattern alone, or why it cannot be traced."""
    try:
        with quiet_refusals():
            graph = traced(pattern, setting).graph
    except Exception as error:  # noqa: BLE001 - a user's function raises what it likes about sizes that it does not take
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    report = ReportBuilder()
    with computing(setting), quiet_refusals(logger.name):  # that a rule is not used is an answer, too
        apply_rules(graph, rules, report)
    return report.build()


def computing(setting: Setting, more: str = "") -> AbstractContextManager[None]:
    """A block that computes in a setting; ``more`` says how, as in `watched`, whose error it raises."""
    numbers = "".join(f", {name}={number}" for name, number in setting.numbers)
    return watched(f"{setting}{numbers}", more)


def traced(pattern: Pattern, setting: Setting) -> fx.GraphModule:
    """The search function's graph in a setting; of a rule for training the joint one."""
    with computing(setting), FakeTensorMode():
        tensors = [
            torch.empty(shape, dtype=dtype, device="npu", requires_grad=argument.gradient)
            for argument, shape, dtype in zip(pattern.arguments, setting.shapes, setting.dtypes, strict=True)
        ]
        return tracing.trace(
            pattern.rule.search, arguments_of(pattern, tensors, setting.numbers), pattern.rule.trace_fn
        )


def arguments_of(
    pattern: Pattern, tensors: Sequence[torch.Tensor], numbers: Sequence[tuple[str, float]] = ()
) -> list[object]:
    """What the search function is called with: the tensors and the numbers, in its order."""
    names = [argument.name for argument in pattern.arguments]
    given: dict[str, object] = {**dict(zip(names, tensors, strict=True)), **pattern.rule.scalars, **dict(numbers)}
    return [given[name] for name in inspect.signature(pattern.rule.search).parameters]


def _settings(pattern: Pattern, dtypes: Sequence[torch.dtype] | None, rng: random.Random) -> Iterator[Setting]:
    """Distinct settings, the example inputs' own sizes first; other dtypes are tried in fewer of them."""
    shapes = list(dict.fromkeys(_shapes(pattern, rng)))
    for position, kinds in enumerate(_dtypes(pattern, dtypes)):
        for sizes in shapes[: _MOST_OF_OTHER_DTYPES if position else _MOST]:
            yield Setting(sizes, kinds)


def _dtypes(pattern: Pattern, wanted: Sequence[torch.dtype] | None) -> list[tuple[torch.dtype, ...]]:
    """Dtypes of all arguments: those of the example's main floating dtype vary together, the others stay."""
    own = tuple(argument.dtype for argument in pattern.arguments)
    floating = Counter(dtype for dtype in own if dtype.is_floating_point)
    narrow = [dtype for dtype in floating if dtype != torch.float32]
    if not floating:
        return [own]
    main = max(narrow or floating, key=lambda dtype: floating[dtype])
    choices = dict.fromkeys(wanted if wanted is not None else (main, *DTYPES))
    return [tuple(new if dtype == main else dtype for dtype in own) for new in choices]


def _shapes(pattern: Pattern, rng: random.Random) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Sizes for all arguments. Dimensions of one class have one size; two ways to class them are tried in turn."""
    hints = numbers_in(pattern.rule.condition)
    ways = [_sizes_of_classes(_classes(pattern, finer=finer), hints, rng) for finer in (False, True)]
    for shapes in (shape for pair in zip_longest(*ways) for shape in pair if shape is not None):
        if sum(math.prod(shape) for shape in shapes) <= _ELEMENTS:
            yield shapes


def _sizes_of_classes(
    classes: Sequence[Sequence[tuple[int, int]]], hints: Sequence[int], rng: random.Random
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The example's sizes, and those of the guard; large, odd, one more, and one; then a class at a time, and combinations."""
    base = {key: key[0] for row in classes for key in row}
    lifted = {key: 4 if size == 1 else size for key, size in base.items()}
    few = dict.fromkeys(base, 2)
    first = [base, *({**around, key: size} for size in hints for key in base for around in (base, lifted))]
    # Chance must not decide whether a size is tried that is larger than what a replacement takes at once, or no whole blocks.
    for key in base:
        first += [
            {**base, key: max(_sizes(key[0], hints))},
            *({**few, key: size} for size in _LARGE),
            {**base, key: _ODD},
        ]
        first += [{**base, key: key[0] + 1}, {**base, key: 1}]
    others = [{**base, key: size} for key in base for size in _sizes(key[0], hints)]
    others += [
        {key: rng.choice(_sizes(key[0], hints)) if rng.random() < 0.6 else lifted[key] for key in base}
        for _ in range(_COMBINATIONS)
    ]
    rng.shuffle(others)
    for chosen in (*first, *others):
        yield tuple(tuple(chosen[key] for key in row) for row in classes)


def _classes(pattern: Pattern, *, finer: bool) -> list[list[tuple[int, int]]]:
    """For each dimension its class: equal sizes in the examples; ``finer`` also tells equal places from the right."""
    return [
        [(size, position - len(argument.dims) if finer else 0) for position, size in enumerate(argument.dims)]
        for argument in pattern.arguments
    ]


def _sizes(size: int, hints: Sequence[int]) -> list[int]:
    beside = (size - 1, size + 1) if size > _USUAL[2] else ()
    return list(dict.fromkeys((*(size * times for times in _MULTIPLES), *beside, *hints, *_USUAL)))


def counts_of(answers: Sequence[Surveyed]) -> Mapping[Answer, int]:
    """The number of settings for each answer."""
    return Counter(entry.answer for entry in answers)


def operators_of(pattern: Pattern, setting: Setting) -> tuple[str, ...]:
    """The operators of the traced search function, in order."""
    return tuple(
        str(node.target).removesuffix(".default")
        for node in traced(pattern, setting).graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    )
