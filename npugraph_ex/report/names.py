"""What Dynamo calls a variable, as the program calls it. Not with torch, because it reads saved compilations without one."""

from __future__ import annotations

import re


def program_name(text: str) -> str:
    """Dynamo's names, such as ``G['__import_my_dot_code'].N`` and ``L['m']._modules['lin']``: ``my.code.N``, ``m.lin``."""
    text = re.sub(r"\b[LG]\['(?:__import_)?(\w+)'\]", lambda found: found[1].replace("_dot_", "."), text)
    return re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", text)
