"""Faults of lifting: what it finds, and what it takes away. Those of one form each are in `lifting_forms.py`."""

from __future__ import annotations

from typing import Any

from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering


def _everything(original: Any) -> Any:
    del original
    return lambda nodes, _outputs: nodes


MUTANTS = (
    Mutant(
        "lifting-ignores-writes-between", "nothing writes what a spelling reads before it ends",
        "npugraph_ex.lifting.engine:checks.undisturbed", answering(None), "spelled add_layer_norm",
    ),
    Mutant(
        "lifting-takes-what-others-use", "a value on the way that has another user is still computed",
        "npugraph_ex.lifting.subgraph:_vanishing", _everything, "spelled rms_norm",
    ),
    Mutant(
        "lifting-believes-rounded-bits", "an exact operator has eager mode's bits before it rounds, too",
        "npugraph_ex.lifting.judging:_Pair.in_float32", answering(""), "spellings",
    ),
)  # fmt: skip
