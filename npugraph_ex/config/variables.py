"""The environment variables that the library reads, so that a mistyped one is noticed; each is read where it is used."""

from __future__ import annotations

import difflib
import functools
import os

from npugraph_ex.observe.logger import logger

KNOWN = ("NPUGRAPH_EX", "NPUGRAPH_EX_CACHE", "NPUGRAPH_EX_TARGET")
_OURS = "NPUGRAPHEX"


@functools.cache
def warn_of_unknown() -> None:
    """Warn, once in a process, of variables that begin like ours and that nothing reads."""
    for name in sorted(os.environ):
        if name.upper().replace("_", "").startswith(_OURS) and name not in KNOWN:
            near = difflib.get_close_matches(name.upper(), KNOWN, n=1, cutoff=0.9)
            hint = f"; did you mean {near[0]}?" if near else f"; those it reads are {', '.join(KNOWN)}"
            logger.warning("npugraph_ex reads no environment variable %s%s", name, hint)
