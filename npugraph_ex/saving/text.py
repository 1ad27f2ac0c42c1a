"""The text of a saved graph: a line with the format and a digest, a line of data as JSON, and the graph for people.

Imports no torch, so that saved graphs can be read anywhere.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from npugraph_ex.errors import SavedGraphError

Json = Any

FORMAT = 5
_MAGIC = "# npugraph_ex saved graph"


def write(data: dict[str, Json], source: str) -> str:
    """The text; `parse` undoes it."""
    body = f"# {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n{source}"
    return f"{_MAGIC} {FORMAT} sha256:{_digest(body)}\n{body}"


def parse(text: str) -> tuple[dict[str, Json], str]:
    """The arguments of `write`: data and source.

    Raises:
        SavedGraphError: the text is cut off, changed, or of another format.
    """
    first, _, body = text.partition("\n")
    if not first.startswith(_MAGIC):
        raise SavedGraphError(f"this is no graph that npugraph_ex saved: it begins with {first[:60]!r}")
    words = first.removeprefix(_MAGIC).split()
    if words[:1] != [str(FORMAT)]:
        raise SavedGraphError(f"the graph is saved in format {' '.join(words[:1])!r}; this version reads {FORMAT}")
    if words[1:] != [f"sha256:{_digest(body)}"]:
        raise SavedGraphError("the saved graph is cut off or was changed since it was written; compile it anew")
    line, _, source = body.partition("\n")
    return json.loads(line.removeprefix("# ")), source.lstrip("\n")


def find(data: bytes, length: int) -> str:
    """The text of a graph somewhere inside other bytes, ``length`` bytes long.

    Raises:
        SavedGraphError: there is none.
    """
    start = data.find(f"{_MAGIC} {FORMAT} sha256:".encode())
    if start < 0:
        raise SavedGraphError("there is no saved graph inside")
    return data[start : start + length].decode()


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
