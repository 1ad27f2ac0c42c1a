"""Units in the last place, as the toolkit offers them: an argument of another type is refused at the call."""

from __future__ import annotations

from npugraph_ex.operators import FORMATS, Format
from npugraph_ex.operators import ulp as _ulp
from npugraph_ex.testing.arguments import checked

__all__ = ["FORMATS", "Format", "ulp"]

ulp = checked(_ulp)
"""The gap between the neighbours of a value in a dtype; `npugraph_ex.operators.ulp`, with its arguments checked."""
