"""The library's logger. It has no level and no handler of its own: what is shown is the program's affair."""

from __future__ import annotations

import logging

logger = logging.getLogger("npugraph_ex")
logger.addHandler(logging.NullHandler())
