"""The mutants, one module for each part of the library that they break. The suite must kill every one.

A mutant is data: what it replaces, by name, and with what. Nothing in the library knows of it, so it costs nothing while
it is off; `testing.mutant` switches one on.
"""

from __future__ import annotations

from importlib import import_module

from npugraph_ex.testing.mutation import Mutant

_PARTS = (
    "matcher", "rules", "passes",
    "lifting", "lifting_norms", "lifting_rotary", "lifting_attention", "lifting_gates", "lifting_products",
    "streams", "capture", "frontend", "collectives",
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = tuple(mutant for part in _PARTS for mutant in import_module(f"{__name__}.{part}").MUTANTS)
"""All mutants, part by part."""
