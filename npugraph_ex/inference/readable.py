"""A saved compilation in words: for `readable_cache` and `npugraph-ex cache show`. Nothing of the file is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path

from tabulate import tabulate

from npugraph_ex.cache.store import read_entry
from npugraph_ex.errors import SavedGraphError
from npugraph_ex.report.names import program_name
from npugraph_ex.saving import text

_PARTS = frozenset({"values", "sources", "imports", "graph_length"})
"""Of a header: what is no fact of one line."""


def describe(path: Path) -> str:
    """What a file was made from and for, and its graph as Python.

    Raises:
        SavedGraphError: the file is damaged, foreign or another user's.
    """
    entry = read_entry(path)
    data, source = text.parse(text.find(entry.payload, int(entry.header["graph_length"])))
    plain = {key: value for key, value in entry.header.items() if key not in _PARTS}
    rows = [(key, _short(value)) for key, value in sorted(plain.items())]
    sources = [(where,) for where in json.loads(entry.header.get("sources", "{}"))]
    inputs = [(i["name"], i.get("dtype", ""), _list(_sizes(i)), _list(i.get("stride", ""))) for i in data["inputs"]]
    parts = [
        f"{path}",
        tabulate(rows, tablefmt="plain", disable_numparse=True),
        tabulate(sources, headers=("traced from",), tablefmt="simple"),
        tabulate(inputs, headers=("input", "dtype", "size", "strides"), tablefmt="simple", disable_numparse=True),
        source.rstrip(),
    ]
    return "\n\n".join(parts) + "\n"


def differing(paths: Sequence[Path]) -> list[str]:
    """For each file, one line: the facts in which it differs from the others."""
    facts = [_facts(path) for path in paths]
    names = [name for name in dict.fromkeys(chain(*facts)) if len({known.get(name) for known in facts}) > 1]
    lines = ["; ".join(f"{name} {_short(known[name], 40)}" for name in names if name in known) for known in facts]
    if len({*lines}) == len(lines):
        return lines
    calls = [known.calls for known in facts]  # of an argument that is a number or a flag, which no input has
    start = len([*takewhile(lambda same: len({*same}) == 1, zip(*calls, strict=False))])
    first = [f"goes on with {_short(own[start], 60)}" if own[start:] else "ends sooner" for own in calls]
    return [f"{line}; its graph {what}".removeprefix("; ") for line, what in zip(lines, first, strict=True)]


class _EntryFacts(dict[str, str]):
    """What a file was made from and for, by name; why it cannot be read, if it cannot.

    Attributes:
        calls: of the graph, in order.
    """

    calls: Sequence[str] = ()


def _facts(path: Path) -> _EntryFacts:
    try:
        entry = read_entry(path)
        data, source = text.parse(text.find(entry.payload, int(entry.header["graph_length"])))
    except SavedGraphError as error:
        return _EntryFacts({"damaged:": str(error)})
    plain = {name: value for name, value in entry.header.items() if name not in _PARTS}
    values = json.loads(entry.header.get("values", "{}"))
    inputs = {i["name"]: f"{i.get('dtype', '')} {_list(_sizes(i))}".strip() for i in data["inputs"]}
    facts = _EntryFacts({**plain, **{program_name(name): value for name, value in values.items()}, **inputs})
    facts.calls = re.findall(r"= torch\.ops\.([^;\n]+)", source)
    return facts


def _sizes(described: Mapping[str, object]) -> object:
    return described.get("size", described.get("symbol", described.get("number")))


def _list(sizes: object) -> str:
    return ", ".join(map(str, sizes)) if isinstance(sizes, list) else str(sizes)


def _short(value: str, most: int = 100) -> str:
    return value if len(value) <= most else f"{value[: most - 1]}…"
