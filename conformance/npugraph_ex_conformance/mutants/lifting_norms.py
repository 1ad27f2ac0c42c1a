"""Faults of lifting norms: how their means, roots, epsilon, weights and biases are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import reductions, terms
from npugraph_ex.lifting.powers import Power
from npugraph_ex.lifting.proposal import Unlike
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import FORMS, answering, with_arguments, with_result, without_alpha

_aten = torch.ops.aten


def _and_a_number(original: Any) -> Any:
    """A root plus a number is taken for the root."""

    def power(node: fx.Node, *how: Any) -> Power:
        added = terms.plus_number(node)
        found: Power = original(added[0] if added else node, *how)
        return found

    return power


def _inverted(found: Power) -> Power:
    return replace(found, exponent=-abs(found.exponent))


def _of_any_numbers(original: Any) -> Any:
    """A product with any column adds up the rows, and is their mean."""

    def by_a_column(node: fx.Node) -> Any:
        rows = node.args[0]
        value, product = terms.tensor(rows), terms.tensor(node)
        if value is None or product is None or not terms.same_size(product.shape[-1], 1):
            return original(node)
        return original(node) or reductions.Mean(rows, (value.dim() - 1,), float(value.shape[-1]))  # type: ignore[arg-type]

    return by_a_column


def _added_once(both: Any) -> Any:
    return both and tuple(replace(one, scale=1.0) for one in both)


def _over_the_last(found: reductions.Mean | None) -> reductions.Mean | None:
    value = terms.tensor(found.of) if found is not None else None
    return found if found is None or value is None else replace(found, dims=(value.dim() - 1,))


def _complete(found: reductions.Mean | None) -> reductions.Mean | None:
    return None if found is None else replace(found, times=1.0)


def _uncorrected(original: Any) -> Any:
    """Any variance is the one that the operator divides by."""

    def variance(root: Any) -> Any:
        found = original(root)
        if not isinstance(found, Unlike):
            return found
        under, epsilon = terms.plus_number(root.under) or (root.under, 0.0)
        return terms.core(under).args[0], epsilon

    return variance


def _first_row(original: Any) -> Any:
    """Of what has the right width, the dimensions before it are not looked at."""

    def vector(node: fx.Node, size: object, dtype: torch.dtype) -> fx.Node | None:
        found: fx.Node | None = original(node, size, dtype)
        value = terms.tensor(node)
        fits = value is not None and value.dtype == dtype and terms.same_size(value.shape[-1], size)
        return found or (node if fits else None)

    return vector


def _any_norm(original: Any) -> Any:
    def plain(node: fx.Node) -> fx.Node | None:
        found: fx.Node | None = original(node)
        result = terms.core(node)
        call = result.args[0] if result.target is getitem and result.args[1] == 0 else None
        return found or (call if terms.calls(call, _aten.native_layer_norm.default) else None)

    return plain


def _with_one_vector_as_weight(original: Any) -> Any:
    return lambda size, epsilon, *, weight, bias: original(size, epsilon, weight=weight or bias, bias=weight and bias)


def _with_norm(**change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A norm behind a sum with fields of it changed."""

    def replacement(original: Any) -> Any:
        def made(*fields: Any) -> Any:
            whole = original(*fields)
            return replace(whole, **{name: how(getattr(whole, name)) for name, how in change.items()})

        return made

    return replacement


MUTANTS = (
    Mutant(
        "lifting-takes-any-correction", "a variance is divided by as many as it adds",
        FORMS + "layer_norm:_variance", _uncorrected, "spelled layer_norm",
    ),
    Mutant(
        "lifting-exchanges-weight-for-bias", "a layer norm without a weight has its bias",
        FORMS + "layer_norm:_build", _with_one_vector_as_weight, "spelled layer_norm",
    ),
    Mutant(
        "lifting-scales-all-rows-alike", "a scale and a shift that each image has for itself are no vectors",
        FORMS + "layer_norm:vector", _first_row, "spelled layer_norm",
    ),
    Mutant(
        "lifting-scales-a-wider-norm", "the norm before a scale is over the last dimension, and has no weight and bias",
        FORMS + "layer_norm:_plain", _any_norm, "spelled layer_norm",
    ),
    Mutant(
        "lifting-takes-either-root", "a norm divides by the root",
        FORMS + "_root_mean_square:power", with_result(_inverted), "spelled rms_norm",
    ),
    Mutant(
        "lifting-reads-operators-alone", "a norm is found by its values, where no operators tell",
        FORMS + "_root_mean_square:row_function", answering(None), "spelled rms_norm",
    ),
    Mutant(
        "lifting-tries-no-values", "what divides each row is tried on rows of all sizes",
        FORMS + "_row_functions:_same", answering(True), "spelled rms_norm",
    ),
    Mutant(
        "lifting-adds-up-any-column", "a product with a column adds up the rows where its numbers are equal",
        "npugraph_ex.lifting.reductions:_by_a_column", _of_any_numbers, "spelled rms_norm",
    ),
    Mutant(
        "lifting-adds-no-norm", "a norm plus itself times a weight has a weight that is counted from one",
        FORMS + "rms_norm:_counted_from_one", answering(None), "spelled rms_norm",
    ),
    Mutant(
        "lifting-counts-from-any-number", "a norm minus itself times a weight has no weight that is counted from one",
        "npugraph_ex.lifting.terms:summands", with_result(_added_once), "spelled rms_norm",
    ),
    Mutant(
        "lifting-means-over-any-dimension", "a norm over another dimension is none of the last one",
        "npugraph_ex.lifting.reductions:mean", with_result(_over_the_last), "spelled rms_norm",
    ),
    Mutant(
        "lifting-divides-by-any-number", "a sum is a mean where it is divided by as many as it adds",
        "npugraph_ex.lifting.reductions:mean", with_result(_complete), "spelled rms_norm",
    ),
    Mutant(
        "lifting-forgets-epsilon", "the operator gets the norm's epsilon",
        FORMS + "rms_norm:_build", with_arguments(lambda _, shape: (1e-6, shape)), "spelled rms_norm",
    ),
    Mutant(
        "lifting-takes-epsilon-outside", "epsilon is added under the root",
        FORMS + "_root_mean_square:power", _and_a_number, "spelled rms_norm",
    ),
    Mutant(
        "lifting-takes-a-bound-for-epsilon", "a least root is no epsilon under the root",
        FORMS + "rms_norm:_another_epsilon", answering(""), "spelled rms_norm",
    ),
    Mutant(
        "lifting-takes-any-alpha-of-a-sum", "before a norm, each term is added once",
        FORMS + "add_norm:_AddNorm.read", without_alpha(lambda _, norm: terms.arguments(norm)["input"]),
        "spelled add_rms_norm",
    ),
    Mutant(
        "lifting-exchanges-weight-and-bias", "the weight of a layer norm multiplies, and its bias is added",
        FORMS + "add_norm:_NormCall", _with_norm(vectors=lambda both: both[::-1]), "spelled add_layer_norm",
    ),
    Mutant(
        "lifting-forgets-groups", "a group norm has the groups of the program",
        FORMS + "group_norm_silu:_build", with_arguments(lambda _, epsilon: (1, epsilon)), "spelled group_norm_silu",
    ),
)  # fmt: skip
