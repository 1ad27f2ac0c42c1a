"""Faults of each form of lifting: it reads something else than is there, or makes another operator of it.

The judge refuses most of what such a form proposes, so no value is wrong. What shows the fault is that a spelling is not lifted,
or that the form did not refuse a near-miss itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms import rotary, swiglu
from npugraph_ex.lifting.forms._parted_rotary import RotaryTables
from npugraph_ex.lifting.powers import Power
from npugraph_ex.lifting.proposal import Unlike
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering, with_result

_aten = torch.ops.aten


def _building(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function of arguments that makes a build, with the results or the operands of the build changed."""
    return lambda original: lambda *how, **named: change(original(*how, **named))


def _with_arguments(change: Callable[..., tuple[Any, ...]]) -> Callable[[Any], Any]:
    """The same function with its positional arguments changed."""
    return lambda original: lambda *given, **named: original(*change(*given), **named)


def _exchanged(build: Any) -> Any:
    """A build whose second and third operand change places."""
    return lambda emit, first, second, third: build(emit, first, third, second)


def _reversed(build: Any) -> Any:
    return lambda *operands: build(*operands)[::-1]


# Norms.


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
        return original(node) or terms.Mean(rows, (value.dim() - 1,), float(value.shape[-1]))  # type: ignore[arg-type]

    return by_a_column


def _added_once(both: Any) -> Any:
    return both and tuple(replace(one, scale=1.0) for one in both)


def _over_the_last(found: terms.Mean | None) -> terms.Mean | None:
    value = terms.tensor(found.of) if found is not None else None
    return found if found is None or value is None else replace(found, dims=(value.dim() - 1,))


def _complete(found: terms.Mean | None) -> terms.Mean | None:
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


# Rotary embeddings and attention.


def _or_itself(original: Any) -> Any:
    return lambda node: original(node) or node


def _without_signs(original: Any) -> Any:
    """Halves that only change places are turned, too."""

    def turned(node: fx.Node) -> Any:
        swapped = rotary._swapped(node)
        return original(node) if swapped is None else rotary._Turned(1.0, swapped.x, swapped.mode)

    return turned


def _added(both: Any) -> Any:
    """Both terms of a sum are added, whatever their sign."""
    return both and (both[0], replace(both[1], scale=abs(both[1].scale)))


def _with_a_plus(found: Any) -> Any:
    return replace(found, sign=1.0) if isinstance(found, rotary._Turned) else found


def _with_any_tables(original: Any) -> Any:
    """The tables of the first two parts are those of the others."""

    def tables(first: Any, second: Any, *others: Any) -> RotaryTables:
        found: RotaryTables | None = original(first, second, *others)
        return found or RotaryTables(first.table, second.table, doubled=True)

    return tables


def _of_the_other_mode(emit: Any, table: fx.Node, mode: str) -> tuple[Any, ...]:
    return emit, table, "interleave" if mode == "half" else "half"


def _unscaled(original: Any) -> Any:
    del original
    return lambda node: (node, 1.0)


def _with_any_shift(original: Any) -> Any:
    """Whatever is subtracted from scores is left out."""

    def unshifted(node: fx.Node) -> Any:
        found, inner = original(node), terms.core(node)
        return inner.args[0] if isinstance(found, str) else found

    return unshifted


def _off_by_one(original: Any) -> Any:
    return lambda emit, *scores: emit(_aten.roll.default, original(emit, *scores), [1], [3])


def _keeping_the_others(emit: Any, filled: Any, *how: Any) -> tuple[Any, ...]:
    return emit, replace(filled, keeps=not filled.keeps), *how


def _of_fewer_heads(original: Any) -> Any:
    """What any chain of operators makes more heads of."""

    def shared(heads: fx.Node, dim: int = 1) -> fx.Node | None:
        found: fx.Node | None = original(heads, dim)
        whole, node = heads.meta["val"], heads
        while found is None and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
            value = terms.tensor(node)
            if value is not None and value.dim() == whole.dim() and value.shape[dim] < whole.shape[dim]:
                return node
        return found

    return shared


# Gates, routers and losses.


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


def _by_the_other_formula(original: swiglu.GatedHalves) -> swiglu.GatedHalves:
    def build(activated: fx.Node, *, first: bool) -> Any:
        of = original.build(activated, first=first)
        return lambda emit, x: of and of(lambda to, *how: emit(to, *how[:2], *(1 - by for by in how[2:3]), *how[3:]), x)

    return replace(original, build=build)


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


# Products.


def _with_a_positive_number(*given: Any) -> tuple[Any, ...]:
    *operands, factor, dtypes = given
    return *operands, abs(factor), dtypes


def _in_float32(original: Any) -> Any:
    def whole(node: fx.Node) -> Any:
        return original(node) if node.meta["val"].dtype == torch.float32 else None

    return whole


def _without_alpha(added: Callable[..., fx.Node]) -> Callable[[Any], Any]:
    """What ``added`` finds among the arguments is read as if it were a plain sum."""

    def replacement(original: Any) -> Any:
        def read(*given: Any) -> Any:
            total = added(*given)
            kept, total.kwargs = total.kwargs, {}
            found = original(*given)
            total.kwargs = kept
            return found

        return read

    return replacement


def _parts_reversed(original: Any) -> Any:
    def made(self: Any, gm: fx.GraphModule) -> None:
        original(self, gm)
        self.parts = [replace(parts, places=parts.places[::-1]) for parts in self.parts]

    return made


# Caches and constants.


def _any_before(original: Any) -> Any:
    del original

    def before(write: Any) -> Any:
        found = [node for node in write.node.graph.nodes if node < write.node and node.target is write.node.target]
        return type(write).of(found[-1]) if found else None

    return before


def _with_its_first_places(original: Any) -> Any:
    """Of places that are stacked for the heads, the first ones are taken for all."""

    def expanded(rows: Any, places: Any, dim: Any) -> Any:
        inner: Any = places.args[0] if terms.calls(places, _aten.expand.default) else places
        parts: Any = [
            one for one in terms.reshaped_from(inner) if terms.calls(one, _aten.stack.default, _aten.cat.default)
        ]
        return original(rows, places, dim) or (parts and next(terms.reshaped_from(parts[0].args[0][0])))

    return expanded


def _moved_by_one(found: dict[fx.Node, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    return {node: value.roll(1, -1) if value.dim() else value for node, value in found.items()}


_FORMS = "npugraph_ex.lifting.forms."

MUTANTS = (
    Mutant(
        "lifting-takes-any-correction", "a variance is divided by as many as it adds",
        _FORMS + "layer_norm:_variance", _uncorrected, "spelled layer_norm",
    ),
    Mutant(
        "lifting-exchanges-weight-for-bias", "a layer norm without a weight has its bias",
        _FORMS + "layer_norm:_build", _with_one_vector_as_weight, "spelled layer_norm",
    ),
    Mutant(
        "lifting-scales-all-rows-alike", "a scale and a shift that each image has for itself are no vectors",
        _FORMS + "layer_norm:vector", _first_row, "spelled layer_norm",
    ),
    Mutant(
        "lifting-scales-a-wider-norm", "the norm before a scale is over the last dimension, and has no weight and bias",
        _FORMS + "layer_norm:_plain", _any_norm, "spelled layer_norm",
    ),
    Mutant(
        "lifting-takes-either-root", "a norm divides by the root",
        _FORMS + "_root_mean_square:power", with_result(_inverted), "spelled rms_norm",
    ),
    Mutant(
        "lifting-reads-operators-alone", "a norm is found by its values, where no operators tell",
        _FORMS + "_root_mean_square:row_function", answering(None), "spelled rms_norm",
    ),
    Mutant(
        "lifting-tries-no-values", "what divides each row is tried on rows of all sizes",
        _FORMS + "_row_functions:_same", answering(True), "spelled rms_norm",
    ),
    Mutant(
        "lifting-adds-up-any-column", "a product with a column adds up the rows where its numbers are equal",
        "npugraph_ex.lifting.terms:_by_a_column", _of_any_numbers, "spelled rms_norm",
    ),
    Mutant(
        "lifting-adds-no-norm", "a norm plus itself times a weight has a weight that is counted from one",
        _FORMS + "rms_norm:_counted_from_one", answering(None), "spelled rms_norm",
    ),
    Mutant(
        "lifting-counts-from-any-number", "a norm minus itself times a weight has no weight that is counted from one",
        "npugraph_ex.lifting.terms:summands", with_result(_added_once), "spelled rms_norm",
    ),
    Mutant(
        "lifting-means-over-any-dimension", "a norm over another dimension is none of the last one",
        "npugraph_ex.lifting.terms:mean", with_result(_over_the_last), "spelled rms_norm",
    ),
    Mutant(
        "lifting-divides-by-any-number", "a sum is a mean where it is divided by as many as it adds",
        "npugraph_ex.lifting.terms:mean", with_result(_complete), "spelled rms_norm",
    ),
    Mutant(
        "lifting-forgets-epsilon", "the operator gets the norm's epsilon",
        _FORMS + "rms_norm:_build", _with_arguments(lambda _, shape: (1e-6, shape)), "spelled rms_norm",
    ),
    Mutant(
        "lifting-takes-epsilon-outside", "epsilon is added under the root",
        _FORMS + "_root_mean_square:power", _and_a_number, "spelled rms_norm",
    ),
    Mutant(
        "lifting-takes-a-bound-for-epsilon", "a least root is no epsilon under the root",
        _FORMS + "rms_norm:_another_epsilon", answering(""), "spelled rms_norm",
    ),
    Mutant(
        "lifting-takes-any-alpha-of-a-sum", "before a norm, each term is added once",
        _FORMS + "add_norm:_AddNorm.read", _without_alpha(lambda _, norm: terms.arguments(norm)["input"]),
        "spelled add_rms_norm",
    ),
    Mutant(
        "lifting-hands-on-the-norm", "behind a sum and a norm, the sum is still the sum",
        _FORMS + "add_norm:_NormCall", _with_norm(build=_reversed), "spelled add_rms_norm",
    ),
    Mutant(
        "lifting-exchanges-weight-and-bias", "the weight of a layer norm multiplies, and its bias is added",
        _FORMS + "add_norm:_NormCall", _with_norm(vectors=lambda both: both[::-1]), "spelled add_layer_norm",
    ),
    Mutant(
        "lifting-forgets-groups", "a group norm has the groups of the program",
        _FORMS + "group_norm_silu:_build", _with_arguments(lambda _, epsilon: (1, epsilon)), "spelled group_norm_silu",
    ),
    Mutant(
        "lifting-exchanges-sine-and-cosine", "what is turned is multiplied by the sine",
        _FORMS + "rotary:_build", _building(_exchanged), "spelled rotary",
    ),
    Mutant(
        "lifting-turns-pairs-as-halves", "pairs are turned as pairs",
        _FORMS + "rotary:_build", _with_arguments(lambda _, dtype: ("half", dtype)), "spelled rotary",
    ),
    Mutant(
        "lifting-drops-the-value", "what `addcmul` adds is multiplied by its value",
        "npugraph_ex.lifting.terms:summands", with_result(_added), "spelled rotary",
    ),
    Mutant(
        "lifting-needs-no-sign", "one of the turned parts is negated",
        _FORMS + "rotary:_turned", _without_signs, "spelled rotary",
    ),
    Mutant(
        "lifting-takes-either-sign", "it is the second half that is negated, and comes first",
        _FORMS + "rotary:_turned", with_result(_with_a_plus), "spelled rotary",
    ),
    Mutant(
        "lifting-takes-any-table", "both parts are multiplied by the cosine, and both by the sine",
        _FORMS + "_parted_rotary:_tables", _with_any_tables, "spelled rotary",
    ),
    Mutant(
        "lifting-doubles-tables-otherwise", "a table of half the width is doubled as the parts lie",
        _FORMS + "rotary:_doubled", _with_arguments(_of_the_other_mode), "spelled rotary",
    ),
    Mutant(
        "lifting-says-nothing-of-signed-sines", "the report says why halves that change places without a sign stay",
        _FORMS + "rotary:_swapped", answering(None), "spelled rotary",
    ),
    Mutant(
        "lifting-knows-one-scale", "attention is found wherever its scale stands",
        _FORMS + "_attention_scores:_scaled", _unscaled, "spelled attention",
    ),
    Mutant(
        "lifting-drops-alpha", "the product of `baddbmm` is scaled by alpha",
        _FORMS + "_attention_scores:_factors", with_result(lambda both: (1.0, both[1])), "spelled attention",
    ),
    Mutant(
        "lifting-takes-any-beta", "the bias of `baddbmm` is added once, or not at all where beta is 0",
        _FORMS + "_attention_scores:_factors", with_result(lambda both: (both[0], 1.0)), "spelled attention",
    ),
    Mutant(
        "lifting-takes-beta-for-alpha", "of the factors of `baddbmm`, alpha is the product's and beta the bias's",
        _FORMS + "_attention_scores:_factors", with_result(lambda both: both[::-1]), "spelled attention",
    ),
    Mutant(
        "lifting-takes-what-is-subtracted", "what is taken from each row of scores is its largest one",
        _FORMS + "_attention_scores:_unshifted", _with_any_shift, "spelled attention",
    ),
    Mutant(
        "lifting-reads-turned-weights", "the weights of a row are multiplied with the values of its keys",
        _FORMS + "_matrices:Matrices.is_same", answering(True), "spelled attention",
    ),
    Mutant(
        "lifting-adds-no-bias", "a bias is left out where it is zeros alone",
        _FORMS + "softmax_attention:_is_zero", answering(True), "spelled attention",
    ),
    Mutant(
        "lifting-moves-the-mask", "each score has its own mask",
        _FORMS + "softmax_attention:_for_every_score", _off_by_one, "spelled attention",
    ),
    Mutant(
        "lifting-needs-no-declaration", "a row without a key gives what eager mode gives, unless the user declares otherwise",
        _FORMS + "softmax_attention:_against", answering(""), "spelled attention",
    ),
    Mutant(
        "lifting-hides-what-is-kept", "a mask that fills scores hides those, and one that chooses them the others",
        _FORMS + "softmax_attention:_hidden", _with_arguments(_keeping_the_others), "spelled attention",
    ),
    Mutant(
        "lifting-fills-with-any-number", "a score that is filled with an ordinary number has a weight",
        _FORMS + "_attention_scores:_LEAST", lambda _: 1.0, "spelled attention",
    ),
    Mutant(
        "lifting-repeats-heads-in-any-order", "consecutive heads of queries share a head of keys",
        _FORMS + "attention:shared_heads", _of_fewer_heads, "spelled shared_heads",
    ),
    Mutant(
        "lifting-ignores-the-order-of-memory", "where heads come first in memory, the layout stays",
        _FORMS + "attention:_positions_first", answering(True), "spelled attention_layout",
    ),
    Mutant(
        "lifting-takes-any-constant", "the constants of an activation are those of the operator",
        _FORMS + "activation:_TOLERANCE", lambda _: 1e-2, "spelled activation",
    ),
    Mutant(
        "lifting-needs-no-upcast", "an operator in float32 has operands that were 16 bits before",
        _FORMS + "upcast:_narrow", _wide_too, "spelled upcast",
    ),
    Mutant(
        "lifting-takes-any-shift", "the largest that exponents lack is that of the elements that are added up",
        _FORMS + "softmax:_exponents", _shifted_by_anything, "spelled softmax",
    ),
    Mutant(
        "lifting-casts-nothing-back", "a product in float32 that is cast back is one of 16 bits",
        "npugraph_ex.lifting.terms:before_a_cast_back", lambda _: lambda node: node, "spelled swiglu",
    ),
    Mutant(
        "lifting-takes-either-half-as-gate", "the gate is the half that goes through the activation",
        _FORMS + "swiglu:_halves", _with_arguments(_with_any_gate), "spelled swiglu",
    ),
    Mutant(
        "lifting-gates-with-the-other-half", "of two halves, GELU is taken of the one that the program says",
        _FORMS + "swiglu:_halves", _with_arguments(_with_the_other_gate), "spelled geglu",
    ),
    Mutant(
        "lifting-adds-what-is-subtracted", "what is scaled is added with its sign",
        _FORMS + "scaled_sum:_with_alpha", _with_arguments(_with_a_positive_number), "spelled scaled_sum",
    ),
    Mutant(
        "lifting-counts-from-the-end", "the last dimension is the last one, however it is counted",
        "npugraph_ex.lifting.terms:is_last", _from_the_end, "spelled gating",
    ),
    *(
        Mutant(
            f"lifting-{does}-over-any-dimension", f"a softmax over another dimension is none of {elements}",
            "npugraph_ex.lifting.terms:is_last", answering(True), f"spelled {form}",
        )
        for does, elements, form in (
            ("attends", "the keys", "attention"), ("routes", "the experts", "gating"),
            ("compares", "the classes", "cross_entropy"),
        )
    ),
    Mutant(
        "lifting-adds-on-the-right", "a bias is found on either side of the sum",
        _FORMS + "sigmoid_gating:_bias", _on_the_right, "spelled sigmoid_gating",
    ),
    Mutant(
        "lifting-ignores-no-class", "the class that the program ignores is not counted",
        _FORMS + "cross_entropy:_build", _with_arguments(lambda reduction, _, *rest: (reduction, -100, *rest)),
        "spelled cross_entropy",
    ),
    Mutant(
        "lifting-forgets-a-minus", "a loss is minus the logarithm",
        _FORMS + "cross_entropy:_build", _with_arguments(lambda *given: (*given[:3], -given[3] if given[3:] else 1)),
        "spelled cross_entropy",
    ),
    Mutant(
        "lifting-reduces-otherwise", "a mean over classes is no sum",
        _FORMS + "cross_entropy:_build", _with_arguments(_reduced_otherwise), "spelled cross_entropy",
    ),
    Mutant(
        "lifting-reads-no-bound", "a scale with a lower bound is still a scale",
        _FORMS + "dynamic_quant:_least", answering(None), "spelled dynamic_quant",
    ),
    Mutant(
        "lifting-multiplies-in-float32", "a product of whole numbers is found in whichever dtype it is computed",
        _FORMS + "quant_matmul:int8_of", _in_float32, "spelled quant_matmul",
    ),
    Mutant(
        "lifting-scales-any-dimension", "the scale of a weight is one of its columns",
        _FORMS + "weight_quant:_is_of_columns", answering(True), "spelled weight_quant",
    ),
    Mutant(
        "lifting-ignores-alpha", "the bias of a product is added once",
        _FORMS + "bias:_with_bias", _without_alpha(lambda total, *_: total), "spelled bias",
    ),
    Mutant(
        "lifting-writes-at-any-index", "two writes of a cache go to the same slots",
        _FORMS + "cache_writes:write_before", _any_before, "spelled paged_cache",
    ),
    Mutant(
        "lifting-writes-along-any-dimension", "slots are counted along the first dimension",
        _FORMS + "cache_writes:CacheWrite.is_paged", answering(True), "spelled paged_cache",
    ),
    Mutant(
        "lifting-knows-one-write", "a cache that `scatter_` writes row by row is one that `index_copy_` writes",
        _FORMS + "cache_writes:_expanded_over", answering(None), "spelled paged_cache",
    ),
    Mutant(
        "lifting-scatters-elements-as-rows", "elements that `scatter_` writes to places of their own are no rows",
        _FORMS + "cache_writes:_expanded_over", _with_its_first_places, "spelled paged_cache",
    ),
    Mutant(
        "lifting-needs-no-pairs", "the elements of a compressed key come as pairs",
        _FORMS + "norm_rope_cache:_parted", _or_itself, "spelled norm_rope_cache",
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
    Mutant(
        "lifting-exchanges-projections", "each part of a joined product is its own projection",
        _FORMS + "joined_projections:_build", _building(_reversed), "joined parameters",
    ),
    Mutant(
        "lifting-exchanges-gate-and-up", "the gate of a joined product comes first",
        _FORMS + "joined_gates:_build", _building(_exchanged), "joined parameters",
    ),
    Mutant(
        "lifting-leaves-joined-halves", "gate and up with biases, once joined, are the halves of one operator",
        "npugraph_ex.lifting.engine:swiglu.SWIGLU", lambda _: swiglu.GEGLU, "joined parameters",
    ),
    Mutant(
        "lifting-takes-either-gelu", "GELU by an error function is none by a tanh",
        _FORMS + "joined_gates:JoinedGeGlu.halves", _by_the_other_formula, "joined parameters",
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
