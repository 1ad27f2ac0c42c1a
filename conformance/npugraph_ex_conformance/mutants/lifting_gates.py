"""Faults of lifting activations, gates, softmaxes, routers and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms import swiglu
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import FORMS, answering, with_arguments

_aten = torch.ops.aten


def _with_any_gate(*given: Any) -> tuple[Any, ...]:
    *rest, build = given
    return *rest, build or swiglu.SWIGLU.build(None, first=True)


def _with_the_other_gate(*given: Any) -> tuple[Any, ...]:
    *rest, build = given

    def other(emit: Any, x: fx.Node) -> Any:
        return build(lambda to, *how: emit(to, *how[:3], *(not left for left in how[3:])), x)

    return *rest, other


def _wide_too(original: Any) -> Any:
    return lambda operand, dtype: original(operand, dtype) or operand


def _shifted_by_anything(original: Any) -> Any:
    def exponents(exponential: fx.Node, dim: int) -> Any:
        shifted = terms.core(exponential.args[0])  # type: ignore[arg-type]
        any_shift = terms.calls(shifted, _aten.sub.Tensor)
        return (shifted.args[0], dim) if any_shift else original(exponential, dim)

    return exponents


def _reduced_otherwise(reduction: int, *rest: Any) -> tuple[Any, ...]:
    return -reduction % 3, *rest


def _from_the_end(original: Any) -> Any:
    del original
    return lambda dim, _: dim == -1


def _on_the_right(original: Any) -> Any:
    def bias(node: fx.Node, scores: fx.Node) -> fx.Node | None:
        found: fx.Node | None = original(node, scores)
        return found if found is not None and terms.core(terms.core(node).args[0]) is scores else None  # type: ignore[arg-type]

    return bias


MUTANTS = (
    Mutant(
        "lifting-takes-any-constant", "the constants of an activation are those of the operator",
        FORMS + "activation:_TOLERANCE", lambda _: 1e-2, "spelled activation",
    ),
    Mutant(
        "lifting-needs-no-upcast", "an operator in float32 has operands that were 16 bits before",
        FORMS + "upcast:_narrow", _wide_too, "spelled upcast",
    ),
    Mutant(
        "lifting-takes-any-shift", "the largest that exponents lack is that of the elements that are added up",
        FORMS + "softmax:_exponents", _shifted_by_anything, "spelled softmax",
    ),
    Mutant(
        "lifting-casts-nothing-back", "a product in float32 that is cast back is one of 16 bits",
        "npugraph_ex.lifting.terms:before_a_cast_back", lambda _: lambda node: node, "spelled swiglu",
    ),
    Mutant(
        "lifting-takes-either-half-as-gate", "the gate is the half that goes through the activation",
        FORMS + "swiglu:_halves", with_arguments(_with_any_gate), "spelled swiglu",
    ),
    Mutant(
        "lifting-gates-with-the-other-half", "of two halves, GELU is taken of the one that the program says",
        FORMS + "swiglu:_halves", with_arguments(_with_the_other_gate), "spelled geglu",
    ),
    Mutant(
        "lifting-counts-from-the-end", "the last dimension is the last one, however it is counted",
        "npugraph_ex.lifting.terms:is_last", _from_the_end, "spelled gating",
    ),
    Mutant(
        "lifting-routes-over-any-dimension", "a softmax over another dimension is none of the experts",
        "npugraph_ex.lifting.terms:is_last", answering(True), "spelled gating",
    ),
    Mutant(
        "lifting-compares-over-any-dimension", "a softmax over another dimension is none of the classes",
        "npugraph_ex.lifting.terms:is_last", answering(True), "spelled cross_entropy",
    ),
    Mutant(
        "lifting-adds-on-the-right", "a bias is found on either side of the sum",
        FORMS + "sigmoid_gating:_bias", _on_the_right, "spelled sigmoid_gating",
    ),
    Mutant(
        "lifting-ignores-no-class", "the class that the program ignores is not counted",
        FORMS + "cross_entropy:_build", with_arguments(lambda reduction, _, *rest: (reduction, -100, *rest)),
        "spelled cross_entropy",
    ),
    Mutant(
        "lifting-reduces-otherwise", "a mean over classes is no sum",
        FORMS + "cross_entropy:_build", with_arguments(_reduced_otherwise), "spelled cross_entropy",
    ),
)  # fmt: skip
