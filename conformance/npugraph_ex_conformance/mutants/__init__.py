"""The mutants, one module for each part of the library that they break. The suite must kill every one.

A mutant is data: what it replaces, by name, and with what. Nothing in the library knows of it, so it costs nothing while
it is off; `testing.mutant` switches one on.
"""

from __future__ import annotations

from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants import (
    capture,
    collectives,
    frontend,
    lifting,
    lifting_forms,
    matcher,
    passes,
    rules,
    streams,
)

MUTANTS: tuple[Mutant, ...] = (
    *matcher.MUTANTS,
    *rules.MUTANTS,
    *passes.MUTANTS,
    *lifting.MUTANTS,
    *lifting_forms.MUTANTS,
    *streams.MUTANTS,
    *capture.MUTANTS,
    *frontend.MUTANTS,
    *collectives.MUTANTS,
)
"""All mutants, part by part."""
