"""A saved compilation in words: for `readable_cache` and `npugraph-ex cache show`. Nothing of the file is executed."""

from __future__ import annotations

import json
from pathlib import Path

from tabulate import tabulate

from npugraph_ex.cache.store import read_entry
from npugraph_ex.saving import text


def describe(path: Path) -> str:
    """What a file was made from and for, and its graph as Python.

    Raises:
        SavedGraphError: the file is damaged, foreign or another user's.
    """
    entry = read_entry(path)
    data, source = text.parse(text.find(entry.payload, int(entry.header["graph_length"])))
    plain = {
        key: value for key, value in entry.header.items() if key not in {"values", "sources", "imports", "graph_length"}
    }
    rows = [(key, _short(value)) for key, value in sorted(plain.items())]
    sources = [(where,) for where in json.loads(entry.header.get("sources", "{}"))]
    inputs = [
        (
            i["name"],
            i.get("dtype", ""),
            _list(i.get("size", i.get("symbol", i.get("number")))),
            _list(i.get("stride", "")),
        )
        for i in data["inputs"]
    ]
    parts = [
        f"{path}",
        tabulate(rows, tablefmt="plain", disable_numparse=True),
        tabulate(sources, headers=("traced from",), tablefmt="simple"),
        tabulate(inputs, headers=("input", "dtype", "size", "strides"), tablefmt="simple", disable_numparse=True),
        source.rstrip(),
    ]
    return "\n\n".join(parts) + "\n"


def _list(sizes: object) -> str:
    return ", ".join(map(str, sizes)) if isinstance(sizes, list) else str(sizes)


def _short(value: str, most: int = 100) -> str:
    return value if len(value) <= most else f"{value[: most - 1]}…"
