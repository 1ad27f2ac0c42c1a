"""The library's logger. It has no level and no handler of its own: what is shown is the program's affair.

In a program that configures no logging Python prints warnings to standard error; a null handler here would keep a user from
ever reading that a graph is not captured.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("npugraph_ex")
"""Where the library logs; set its level as that of any logger."""
