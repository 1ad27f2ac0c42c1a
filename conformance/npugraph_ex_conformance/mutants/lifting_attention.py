"""Faults of lifting attention and what stands around it: scores, masks, shared heads, layouts, and writes of caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import FORMS, answering, with_arguments, with_result

_aten = torch.ops.aten


def _or_itself(original: Any) -> Any:
    return lambda node: original(node) or node


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


MUTANTS = (
    Mutant(
        "lifting-knows-one-scale", "attention is found wherever its scale stands",
        FORMS + "_attention_scores:_scaled", _unscaled, "spelled attention",
    ),
    Mutant(
        "lifting-drops-alpha", "the product of `baddbmm` is scaled by alpha",
        FORMS + "_attention_scores:_factors", with_result(lambda both: (1.0, both[1])), "spelled attention",
    ),
    Mutant(
        "lifting-takes-any-beta", "the bias of `baddbmm` is added once, or not at all where beta is 0",
        FORMS + "_attention_scores:_factors", with_result(lambda both: (both[0], 1.0)), "spelled attention",
    ),
    Mutant(
        "lifting-takes-what-is-subtracted", "what is taken from each row of scores is its largest one",
        FORMS + "_attention_scores:_unshifted", _with_any_shift, "spelled attention",
    ),
    Mutant(
        "lifting-reads-turned-weights", "the weights of a row are multiplied with the values of its keys",
        FORMS + "_matrices:Matrices.is_same", answering(True), "spelled attention",
    ),
    Mutant(
        "lifting-adds-no-bias", "a bias is left out where it is zeros alone",
        FORMS + "softmax_attention:_is_zero", answering(True), "spelled attention",
    ),
    Mutant(
        "lifting-moves-the-mask", "each score has its own mask",
        FORMS + "softmax_attention:_for_every_score", _off_by_one, "spelled attention",
    ),
    Mutant(
        "lifting-needs-no-declaration", "a row without a key gives what eager mode gives, unless the user declares otherwise",
        FORMS + "softmax_attention:_against", answering(""), "spelled attention",
    ),
    Mutant(
        "lifting-hides-what-is-kept", "a mask that fills scores hides those, and one that chooses them the others",
        FORMS + "softmax_attention:_hidden", with_arguments(_keeping_the_others), "spelled attention",
    ),
    Mutant(
        "lifting-fills-with-any-number", "a score that is filled with an ordinary number has a weight",
        FORMS + "_attention_scores:_LEAST", lambda _: 1.0, "spelled attention",
    ),
    Mutant(
        "lifting-repeats-heads-in-any-order", "consecutive heads of queries share a head of keys",
        FORMS + "attention:shared_heads", _of_fewer_heads, "spelled shared_heads",
    ),
    Mutant(
        "lifting-ignores-the-order-of-memory", "where heads come first in memory, the layout stays",
        FORMS + "attention:_positions_first", answering(True), "spelled attention_layout",
    ),
    Mutant(
        "lifting-attends-over-any-dimension", "a softmax over another dimension is none of the keys",
        "npugraph_ex.lifting.terms:is_last", answering(True), "spelled attention",
    ),
    Mutant(
        "lifting-writes-at-any-index", "two writes of a cache go to the same slots",
        FORMS + "cache_writes:write_before", _any_before, "spelled paged_cache",
    ),
    Mutant(
        "lifting-writes-along-any-dimension", "slots are counted along the first dimension",
        FORMS + "cache_writes:CacheWrite.is_paged", answering(True), "spelled paged_cache",
    ),
    Mutant(
        "lifting-knows-one-write", "a cache that `scatter_` writes row by row is one that `index_copy_` writes",
        FORMS + "cache_writes:_expanded_over", answering(None), "spelled paged_cache",
    ),
    Mutant(
        "lifting-scatters-elements-as-rows", "elements that `scatter_` writes to places of their own are no rows",
        FORMS + "cache_writes:_expanded_over", _with_its_first_places, "spelled paged_cache",
    ),
    Mutant(
        "lifting-needs-no-pairs", "the elements of a compressed key come as pairs",
        FORMS + "norm_rope_cache:_parted", _or_itself, "spelled norm_rope_cache",
    ),
)  # fmt: skip
