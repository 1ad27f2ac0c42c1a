"""Writes the tables of operators and fusion rules into the pages, from their records: ``python -m npu_emulator docs/tables.py``.

A table stands in its page between two comments, so that the page is whole without a build. A test compares them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from npugraph_ex.compat.torchair_names import NAMES
from npugraph_ex.fusion.rules import RECORDS
from npugraph_ex.operators import OPERATORS, Operator
from npugraph_ex_conformance.fidelity.table import markdown_rows

sys.path.insert(0, str(Path(__file__).parent))
import device_calls

HERE = Path(__file__).parent


def _summary(module: str) -> str:
    """The first sentence of a module, in Markdown."""
    return str(sys.modules[module].__doc__).splitlines()[0].replace("``", "`")


def rules() -> Iterator[str]:
    """One row a rule, in the order in which rules are tried."""
    yield "| rule | what it does | |"
    yield "|---|---|---|"
    for name, record in RECORDS.items():
        summary = re.sub(
            r" An extra rule(, off unless switched on)?\.$", "", _summary(record.variants[0].search.__module__)
        )
        yield f"| `{name}` | {summary} | {'default' if record.default else 'extra'} |"


def operators() -> Iterator[str]:
    """One row an operator, by name."""
    yield "| operator | what it computes | dtypes | what its record says besides | source |"
    yield "|---|---|---|---|---|"
    for name, record in sorted(OPERATORS.items()):
        summary = _summary(record.formula.__module__) if record.formula else "(no formula yet)"
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in record.dtypes)
        yield f"| `{name}` | {summary} | {dtypes} | {'; '.join(_besides(record))} | {record.source} |"


def _besides(record: Operator) -> Iterator[str]:
    if record.absent_on:
        yield "not on " + " and ".join(filter(None, (", ".join(record.absent_on[:-1]), record.absent_on[-1])))
    if record.before_rounding:
        yield "value before rounding"
    if record.synonyms:
        yield "synonyms of " + ", ".join(f"`{argument}`" for argument in record.synonyms)
    if record.writes:
        yield "writes " + ", ".join(f"`{argument}`" for argument in record.writes) + " undeclared"
    if record.host_arguments:
        yield "host arguments " + ", ".join(f"`{argument}`" for argument in record.host_arguments)
    yield from _constraints(record)
    if record.first_factor is not None:
        yield "a matrix product"
    if record.work:
        yield "its work"
    if record.draws_random_numbers:
        yield "draws random numbers"
    if record.schema:
        yield "a client's operator"


def _constraints(record: Operator) -> Iterator[str]:
    for what, arguments in record.alike.groups():
        yield f"one {what} for " + ", ".join(f"`{argument}`" for argument in arguments)
    for argument, dtypes in record.alike.besides.items():
        yield f"`{argument}` also in " + ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if record.constraints and not any(record.alike):
        yield "constraints"


def torchair() -> Iterator[str]:
    """One row a public name of TorchAir."""
    yield "| name | here | what differs, or what there is instead |"
    yield "|---|---|---|"
    for name, known in NAMES.items():
        yield f"| `torchair.{name}` | {known.state} | {known.differs} |"


TABLES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "rules": ("how-to/fusion.md", rules),
    "fidelity": ("reference/fidelity.md", markdown_rows),
    "operators": ("reference/operators.md", operators),
    "calls": ("reference/device-calls.md", device_calls.rows),
    "torchair": ("reference/torchair.md", torchair),
}


def page_with_table(name: str) -> tuple[Path, str]:
    """The page of a table, and its text with the table as the records give it."""
    file, rows = TABLES[name]
    page = HERE / file
    begin, end = f"<!-- table of {name}: written by docs/tables.py -->\n", f"\n<!-- end of the table of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} must hold {begin.strip()!r} and {end.strip()!r} around the table; one is missing.")
    return page, "".join((before, begin, "\n".join(["", *rows()]), "\n", end, after))


if __name__ == "__main__":
    for table in TABLES:
        path, text = page_with_table(table)
        path.write_text(text, encoding="utf-8")
