"""Examples about tagged events in random order: each wait is for the latest record before it, and what is wrong is reported.

A wait before its record waits for nothing, so it is dropped and said to be wrong; so is a record that nothing waited for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import fx

from npugraph_ex.config import CompilerConfig
from npugraph_ex.graph.streams.events import awaited, is_record, is_wait
from npugraph_ex.graph.streams.ops import TAGGED_RECORDS, TAGGED_WAITS
from npugraph_ex.passes import events
from npugraph_ex.passes.base import PassContext
from npugraph_ex.report.findings import Code

_TAGS = ("a", "b", "c")
_MOST_STEPS = 8
_Step = tuple[str, str]
"""What is done, "record" or "wait", and the tag of the event."""


def event_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    draw = random.Random(seed)
    steps = [(draw.choice(("record", "wait")), draw.choice(_TAGS)) for _ in range(draw.randint(2, _MOST_STEPS))]
    try:
        found = _lowered(steps)
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"
    wanted = _meant(steps)
    for what, is_so, should_be in zip(("waits for records", "findings"), found, wanted, strict=True):
        if is_so != should_be:
            return f"tagged events {steps}: {what} {is_so} instead of {should_be}"
    return ""


def _lowered(steps: Sequence[_Step]) -> tuple[list[int], list[Code]]:
    """The number of the record that each wait is for, among all records, and what the report says."""
    graph = fx.Graph()
    for what, tag in steps:
        graph.call_function((TAGGED_RECORDS if what == "record" else TAGGED_WAITS)[0], (tag,))
    graph.output(())
    context = PassContext(CompilerConfig().to_options(), [])
    events.run(fx.GraphModule({}, graph), context)
    graph.lint()
    records = [node for node in graph.nodes if is_record(node)]
    waits = [records.index(record) for node in graph.nodes if is_wait(node) for record in awaited(node)]
    return waits, [finding.code for finding in context.report.build().streams]


def _meant(steps: Sequence[_Step]) -> tuple[list[int], list[Code]]:
    """The same, read off the steps."""
    latest: dict[str, int] = {}
    idle: set[str] = set()  # whose latest record nothing has waited for
    waits: list[int] = []
    findings: list[Code] = []
    for position, (what, tag) in enumerate(steps):
        if what == "record":
            if tag in idle:
                findings.append(Code.RECORDED_TWICE)
            latest[tag] = sum(kind == "record" for kind, _ in steps[:position])
            idle.add(tag)
        elif tag in latest:
            waits.append(latest[tag])
            idle.discard(tag)
        else:
            to_come = ("record", tag) in steps[position:]
            findings.append(Code.WAIT_WITHOUT_RECORD if to_come else Code.WAIT_FOR_OUTSIDE)
    return waits, findings
