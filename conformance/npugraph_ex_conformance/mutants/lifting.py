"""Faults of lifting: what it finds, and what it takes away. Those of the forms are in `lifting_*.py` beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering, with_result


def _everything(original: Any) -> Any:
    del original
    return lambda nodes, _outputs: nodes


def _moved_by_one(found: dict[fx.Node, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    return {node: value.roll(1, -1) if value.dim() else value for node, value in found.items()}


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
    Mutant(
        "lifting-moves-constants", "a mask that is computed once has its diagonal where the program has it",
        "npugraph_ex.lifting.constants:_computed", with_result(_moved_by_one), "spelled constants",
    ),
    Mutant(
        "lifting-rounds-constants", "what rounds is left to the device",
        "npugraph_ex.lifting.constants:_is_equal", answering(True), "spelled constants",
    ),
    Mutant(
        "lifting-repeats-what-is-written", "what is written in between is computed again",
        "npugraph_ex.lifting.repeated:_same", answering(True), "spelled repeated",
    ),
)  # fmt: skip
