"""Keeps calls that draw random numbers nobody uses; AOT drops them, and all later draws differ from those of eager mode.

Torch keeps them if Inductor's option `fallback_random` asks for the numbers of eager mode. `partition` keeps them
in a graph that is trained.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from npugraph_ex import _torch_private
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A random operator whose result nobody uses does not advance the generator.",
    threads=("pytorch#143431", "pytorch#151524"),
    test="tests/frontend/test_unused_draws.py",
)


def kept() -> AbstractContextManager[None]:
    """Within the block AOT keeps these calls."""
    return _torch_private.draws_of_eager_mode()
