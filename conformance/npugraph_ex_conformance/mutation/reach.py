"""Which examples run which lines: a fault is looked for by the examples that run its statement, and by no other.

The lines are traced by coverage.py, whose tracer is written in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

from npugraph_ex_conformance.mutation.sites import FaultSite, lines_of

Example = tuple[str, int]
"""The kind of campaign items, and the number of the item."""
_FEW = 25
"""So many examples of a kind are kept for a line, or a tenth of the kind's where that is more, evenly over all that run it."""


class Reach:
    """The examples that run each line of some modules.

    Args:
        examples: all that were traced, in their order.
        lines: for each module and line the positions in ``examples`` of those that run it.
    """

    def __init__(self, examples: Sequence[Example], lines: Mapping[str, Mapping[int, Sequence[int]]]) -> None:
        self._examples, self._lines = examples, lines

    def of(self, site: FaultSite) -> list[Example]:
        """The examples that run the statement of a fault, in their order."""
        lines = self._lines.get(site.module, {})
        return [self._examples[at] for at in sorted({at for line in lines_of(site) for at in lines.get(line, ())})]


def traced(
    modules: Sequence[str], examples: Iterable[Example], run: Callable[[Example], str]
) -> tuple[list[Example], dict[str, dict[int, list[int]]]]:
    """Run examples under a tracer: those that found nothing wrong, and who runs which line. It can be written as JSON.

    Args:
        modules: whose lines are asked for.
        examples: in the order in which they run.
        run: one example; what it finds wrong.

    Raises:
        RuntimeError: one example in ten is wrong without any fault.
    """
    import coverage

    files = {name: str(import_module(name).__file__) for name in modules}
    tracer = coverage.Coverage(data_file=None, config_file=False, include=list(files.values()), messages=False)
    right: list[Example] = []
    wrong: list[str] = []
    tracer.start()
    try:
        for position, example in enumerate(examples):
            tracer.switch_context(str(position))
            message = run(example)
            right.append(("", 0) if message else example)
            wrong += [f"{example[0]}/{example[1]}: {message}"] if message else []
    finally:
        tracer.stop()
    if len(wrong) > len(right) // 10:
        raise RuntimeError(f"{len(wrong)} of {len(right)} examples fail without any fault, first {wrong[0]}")
    data, found = tracer.get_data(), {}
    for name, file in files.items():
        found[name] = {
            line: _kept(right, sorted(int(context) for context in contexts if context))
            for line, contexts in data.contexts_by_lineno(file).items()
        }
    return right, found


def _kept(examples: Sequence[Example], positions: Sequence[int]) -> list[int]:
    """Some examples of each kind, without those that fail although there is no fault."""
    of_kind: dict[str, list[int]] = {}
    for position in positions:
        of_kind.setdefault(examples[position][0], []).append(position)
    of_kind.pop("", None)
    kept = []
    for kind, own in of_kind.items():
        count = min(len(own), max(_FEW, sum(name == kind for name, _ in examples) // 10))
        kept += [own[len(own) * number // count] for number in range(count)]
    return kept
