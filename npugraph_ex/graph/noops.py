"""Removes nodes that only rename or copy their input, if no program can see the difference.

There are three cases:

* An *identity view* (``view`` to the same shape, a ``slice`` of everything, ``alias``, ...) has the same bytes, shape,
  strides and dtype. Input and result are always the same values, so writes do not matter. It stays if it is itself a graph
  output, because a caller may ask whether that output *is* the input. An ``as_strided`` with an offset from the beginning of
  an input's storage stays too, because another call's input may have another offset.
* An *identity copy* (``clone``, ``_to_copy`` to the same dtype and device, a pad by nothing, ...) has its own memory. It is
  removed only if nothing in the graph writes either memory and its own memory is in no output.
* *Identity arithmetic* (a real ``x * 1`` or ``x / 1``, an integer ``x + 0`` or ``x - 0``) has every bit of its input, in its own
  memory, as an identity copy has. ``x + 0`` of floating-point numbers stays: it turns -0.0 into 0.0. A complex ``x * 1``
  stays: it turns an infinite part into NaN.

`repeated_parts` joins operators that take the same parts of a value twice.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import fx

from npugraph_ex.graph import repeated_parts
from npugraph_ex.graph.memory.aliases import (
    AliasFacts,
    counted_storages,
    counts_from_the_storage,
    may_begin_elsewhere,
    named_arguments,
    output_values,
    tensor_leaves,
)
from npugraph_ex.graph.metadata import difference

_aten = torch.ops.aten

IDENTITY_VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.view.default,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.permute.default,
        _aten.as_strided.default,
        _aten.detach.default,
    }
)
IDENTITY_COPIES = frozenset(
    {
        _aten.clone.default,
        _aten._to_copy.default,  # noqa: SLF001 - the operator's name
        _aten._unsafe_view.default,  # noqa: SLF001 - the operator's name
        _aten.reshape.default,
        torch.ops.prims.convert_element_type.default,
        _aten.constant_pad_nd.default,
    }
)
_NEUTRAL_FACTORS = frozenset({_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar})
_NEUTRAL_TERMS = frozenset({_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar})
IDENTITY_ARITHMETIC = _NEUTRAL_FACTORS | _NEUTRAL_TERMS


def _changes_no_bit(node: fx.Node, source: torch.Tensor) -> bool:
    """Whether arithmetic on ``source`` is by a number that changes no element."""
    other = node.args[1] if len(node.args) > 1 else None
    if not isinstance(other, (int, float)) or isinstance(other, bool):
        return False
    if node.target in _NEUTRAL_FACTORS:
        return other == 1 and not source.is_complex()
    return other == 0 and not source.is_complex() and not source.is_floating_point()


def _is_identity(node: fx.Node, source: fx.Node) -> bool:
    """Whether the result has the shape, strides, dtype, device and storage offset of ``source``, and its elements."""
    if node.target is _aten.constant_pad_nd.default:
        amounts = named_arguments(node.target, node.args, node.kwargs)["pad"]
        if any(amount != 0 for amount in amounts):
            return False  # padding by one in front and by minus one behind keeps the shape
    old, new = tensor_leaves(source), tensor_leaves(node)
    if node.target in IDENTITY_ARITHMETIC and not (old and _changes_no_bit(node, old[0])):
        return False
    if len(old) != 1 or len(new) != 1 or difference(old[0], new[0]) is not None:
        return False
    offset = new[0].storage_offset() if node.target in IDENTITY_VIEWS else old[0].storage_offset()
    # Symbolic offsets are equal only if their text is equal.
    return offset is old[0].storage_offset() or str(offset) == str(old[0].storage_offset())


def _copy_is_invisible(node: fx.Node, source: fx.Node, facts: AliasFacts, leaving: list[fx.Node]) -> bool:
    """Whether no write and no output makes the copy differ from its source."""
    if facts.is_written(node) or facts.is_written(source):
        return False
    return not any(facts.share_storage(output, node) for output in leaving)


def _begins_as(node: fx.Node, source: fx.Node, facts: AliasFacts, movable: frozenset[int]) -> bool:
    """Whether a value begins at the same element of its storage as its source, in every call."""
    if facts.share_storage(node, source):
        return True
    offsets = {str(leaf.storage_offset()) for one in (node, source) for leaf in tensor_leaves(one)}
    return len(offsets) == 1 and movable.isdisjoint(facts.roots(source))


def remove(graph: fx.Graph, *, arithmetic: bool = False) -> None:
    """Remove every identity of ``graph`` that the module's rules allow, and join repeated parts.

    Args:
        graph: is edited in place.
        arithmetic: whether identity arithmetic goes too. It stays by default, because a pattern may spell it.
    """
    removable = IDENTITY_VIEWS | IDENTITY_COPIES | (IDENTITY_ARITHMETIC if arithmetic else frozenset())
    leaving = [value for value in output_values(graph) if isinstance(value, fx.Node)]
    identities = {node for node in graph.nodes if node.target in removable and _is_identity_of_its_first_argument(node)}
    if identities:
        _remove(graph, identities.difference(leaving), leaving)
    repeated_parts.join(graph)


def _is_identity_of_its_first_argument(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return node.op == "call_function" and isinstance(source, fx.Node) and _is_identity(node, source)


def _remove(graph: fx.Graph, identities: AbstractSet[fx.Node], leaving: list[fx.Node]) -> None:
    """Remove those of the identities of which nobody can tell that they are gone."""
    facts = AliasFacts(graph)
    movable = may_begin_elsewhere(graph, facts)
    counted = frozenset(root for value in counted_storages(graph, facts) for root in facts.roots(value))
    for node in graph.nodes:
        if node not in identities:
            continue
        source = node.args[0]
        if node.target not in IDENTITY_VIEWS and not _copy_is_invisible(node, source, facts, leaving):
            continue
        if not counted.isdisjoint(facts.roots(node)) and not _begins_as(node, source, facts, movable):
            continue
        if counts_from_the_storage(node) and not movable.isdisjoint(facts.roots(node)):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
