"""Names as people read them: of Dynamo's variables, and of local functions. Without torch, for saved compilations are read so."""

from __future__ import annotations

import re


def program_name(text: str) -> str:
    """Dynamo's names, such as ``G['__import_my_dot_code'].N`` and ``L['m']._modules['lin']``: ``my.code.N``, ``m.lin``."""
    text = re.sub(r"\b[LG]\['(?:__import_)?(\w+)'\]", lambda found: found[1].replace("_dot_", "."), text)
    return re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", text)


def shown_name(name: str, source: str = "") -> str:
    """The name of a rule in a table: ``my.outer.<locals>.f`` as ``f``, with its ``file:line`` where that is known."""
    last = name.rpartition("<locals>.")[2]
    return f"{last} ({source})" if source and last != name else last
