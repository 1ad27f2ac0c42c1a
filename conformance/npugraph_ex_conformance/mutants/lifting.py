"""Faults of lifting: what it finds, and what it takes away."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering


def _everything(original: Any) -> Any:
    del original
    return lambda nodes, _outputs: nodes


def _without_powers(original: Any) -> Any:
    def root(node: fx.Node) -> fx.Node | None:
        found: fx.Node | None = original(node)
        return None if found is not None and "pow" in str(node.target) else found

    return root


def _unscaled(original: Any) -> Any:
    del original
    return lambda node: (node, 1.0)


def _from_the_end(original: Any) -> Any:
    del original
    return lambda dim, _: dim == -1


def _on_the_right(original: Any) -> Any:
    def bias(node: fx.Node, scores: fx.Node) -> fx.Node | None:
        found: fx.Node | None = original(node, scores)
        return found if found is not None and terms.core(terms.core(node).args[0]) is scores else None  # type: ignore[arg-type]

    return bias


def _in_float32(original: Any) -> Any:
    def whole(node: fx.Node) -> Any:
        return original(node) if node.meta["val"].dtype == torch.float32 else None

    return whole


MUTANTS = (
    Mutant(
        "lifting-ignores-writes-between", "nothing writes what a spelling reads before it ends",
        "npugraph_ex.lifting.engine:checks.undisturbed", answering(None), "spellings",
    ),
    Mutant(
        "lifting-takes-what-others-use", "a value on the way that has another user is still computed",
        "npugraph_ex.lifting.subgraph:_vanishing", _everything, "spellings",
    ),
    Mutant(
        "lifting-knows-one-root", "a norm is found however its root is spelled",
        "npugraph_ex.lifting.terms:inverse_root_of", _without_powers, "spellings",
    ),
    Mutant(
        "lifting-knows-one-scale", "attention is found wherever its scale stands",
        "npugraph_ex.lifting.forms.softmax_attention:_scaled", _unscaled, "spellings",
    ),
    Mutant(
        "lifting-counts-from-the-end", "the last dimension is the last one, however it is counted",
        "npugraph_ex.lifting.forms.gating:_is_last", _from_the_end, "spellings",
    ),
    Mutant(
        "lifting-adds-on-the-right", "a bias is found on either side of the sum",
        "npugraph_ex.lifting.forms.sigmoid_gating:_bias", _on_the_right, "spellings",
    ),
    Mutant(
        "lifting-believes-rounded-bits", "an exact operator has eager mode's bits before it rounds, too",
        "npugraph_ex.lifting.judging:_Pair.in_float32", answering(""), "spellings",
    ),
    Mutant(
        "lifting-reads-no-bound", "a scale with a lower bound is still a scale",
        "npugraph_ex.lifting.forms.dynamic_quant:_least", answering(None), "spellings",
    ),
    Mutant(
        "lifting-multiplies-in-float32", "a product of whole numbers is found in whichever dtype it is computed",
        "npugraph_ex.lifting.forms.quant_matmul:int8_of", _in_float32, "spellings",
    ),
)  # fmt: skip
