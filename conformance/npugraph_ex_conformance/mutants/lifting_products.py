"""Faults of lifting products of matrices: scales, biases, quantised operands, and parameters that are joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting.forms import swiglu
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import (
    FORMS,
    answering,
    exchanged,
    with_arguments,
    with_result,
    without_alpha,
)


def _reversed(build: Any) -> Any:
    return lambda *operands: build(*operands)[::-1]


def _by_the_other_formula(original: swiglu.GatedHalves) -> swiglu.GatedHalves:
    def build(activated: fx.Node, *, first: bool) -> Any:
        of = original.build(activated, first=first)
        return lambda emit, x: of and of(lambda to, *how: emit(to, *how[:2], *(1 - by for by in how[2:3]), *how[3:]), x)

    return replace(original, build=build)


def _with_a_positive_number(*given: Any) -> tuple[Any, ...]:
    *operands, factor, dtypes = given
    return *operands, abs(factor), dtypes


def _in_float32(original: Any) -> Any:
    def whole(node: fx.Node) -> Any:
        return original(node) if node.meta["val"].dtype == torch.float32 else None

    return whole


def _parts_reversed(original: Any) -> Any:
    def made(self: Any, gm: fx.GraphModule) -> None:
        original(self, gm)
        self.parts = [replace(parts, places=parts.places[::-1]) for parts in self.parts]

    return made


MUTANTS = (
    Mutant(
        "lifting-adds-what-is-subtracted", "what is scaled is added with its sign",
        FORMS + "scaled_sum:_with_alpha", with_arguments(_with_a_positive_number), "spelled scaled_sum",
    ),
    Mutant(
        "lifting-reads-no-bound", "a scale with a lower bound is still a scale",
        FORMS + "dynamic_quant:_least", answering(None), "spelled dynamic_quant",
    ),
    Mutant(
        "lifting-multiplies-in-float32", "a product of whole numbers is found in whichever dtype it is computed",
        FORMS + "quant_matmul:int8_of", _in_float32, "spelled quant_matmul",
    ),
    Mutant(
        "lifting-scales-any-dimension", "the scale of a weight is one of its columns",
        FORMS + "weight_quant:_is_of_columns", answering(True), "spelled weight_quant",
    ),
    Mutant(
        "lifting-ignores-alpha", "the bias of a product is added once",
        FORMS + "bias:_with_bias", without_alpha(lambda total, *_: total), "spelled bias",
    ),
    Mutant(
        "lifting-fuses-scaled-products", "a product and its activation are one operator where nothing is scaled",
        FORMS + "product_activation:_is_row", answering(True), "spelled product_activation",
    ),
    Mutant(
        "lifting-exchanges-projections", "each part of a joined product is its own projection",
        FORMS + "joined_projections:_build", with_result(_reversed), "joined parameters",
    ),
    Mutant(
        "lifting-exchanges-gate-and-up", "the gate of a joined product comes first",
        FORMS + "joined_gates:_build", with_result(exchanged), "joined parameters",
    ),
    Mutant(
        "lifting-leaves-joined-halves", "gate and up with biases, once joined, are the halves of one operator",
        "npugraph_ex.lifting.engine:swiglu.SWIGLU", lambda _: swiglu.GEGLU, "joined parameters",
    ),
    Mutant(
        "lifting-takes-either-gelu", "GELU by an error function is none by a tanh",
        FORMS + "joined_gates:JoinedGeGlu.halves", _by_the_other_formula, "joined parameters",
    ),
    Mutant(
        "joined-weights-in-another-order", "joined weights lie in the order in which the graph reads them",
        "npugraph_ex.frontend.entry.joined_inputs:JoinedInputs.__init__", _parts_reversed, "joined parameters",
    ),
    Mutant(
        "joined-weights-ignore-writes", "joined weights follow the parameters",
        "npugraph_ex.frontend.entry.joined_inputs:_VERSION", answering(0), "joined parameters",
    ),
)  # fmt: skip
