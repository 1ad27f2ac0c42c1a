"""Faults of the key under which compilations are kept."""

from __future__ import annotations

from npugraph_ex.testing.faults._patches import answering
from npugraph_ex.testing.mutation import Mutant

_KEY = "npugraph_ex.cache.key"

MUTANTS = (
    Mutant(
        "cache-key-ignores-options", "what was compiled with other options is not used",
        f"{_KEY}:_options", answering(""), "cache",
    ),
    Mutant(
        "cache-key-ignores-rules", "what was compiled with other rules is not used",
        f"{_KEY}:_rule", answering(()), "cache",
    ),
)  # fmt: skip
