"""What surrounds `npu_fusion_attention` and costs kernels goes into the operator, which computes the same without it.

``lift_shared_heads``: keys and values that are repeated for the query heads that share them are read as they are. The operator
takes fewer heads of keys than of queries (operator documentation of ``torch_npu.npu_fusion_attention``).

``lift_attention_layout``: heads and positions change places before the operator, and back behind it, where a copy is made. In
layout BSND it reads and writes them where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._shared_heads import shared_heads
from npugraph_ex.lifting.proposal import Emit, Proposal, Unlike

_aten = torch.ops.aten
_OPERANDS = ("query", "key", "value")


@dataclass(frozen=True)
class _AttentionCall:
    """A call in layout BNSD of which the first result alone is used."""

    node: fx.Node
    given: Mapping[str, Any]
    output: fx.Node

    @classmethod
    def read(cls, node: fx.Node) -> _AttentionCall | Unlike | None:
        """The call; None where it has another layout, or a separate rotary part."""
        given = terms.arguments(node)
        if given["input_layout"] != "BNSD" or given.get("query_rope") is not None:
            return None
        used = [user for user in node.users if user.users]
        if [user.args[1] for user in used if user.target is getitem] != [0]:
            return Unlike(node, "not the first result alone is used")
        if any(isinstance(value, fx.Node) and terms.tensor(value) is None for value in given.values()):
            return Unlike(node, "an argument is a symbol")
        return cls(node, given, used[0])

    def shape(self, operand: str) -> torch.Size:
        """The shape of query, key or value: [B, N, S, D]."""
        value = terms.tensor(self.given[operand])
        assert value is not None  # noqa: S101 - the schema says so
        return value.shape

    def proposal(
        self, operands: Mapping[str, fx.Node], output: fx.Node, exchanged: Collection[str] = (), **changes: str
    ) -> Proposal:
        """The same call on other operands, and with ``changes`` of its arguments, in the place of ``output``.

        Of the operands ``exchanged`` the operator gets a view with heads and positions in each other's place.
        """
        tensors = {name: value for name, value in self.given.items() if isinstance(value, fx.Node)} | dict(operands)
        heads = tuple(self.shape(name)[1] for name in _OPERANDS)
        named = (*heads, *(value.meta["val"].shape[_heads_at(name in exchanged)] for name, value in operands.items()))
        operator = self.node.target

        def build(emit: Emit, *inputs: fx.Node) -> tuple[fx.Node, ...]:
            read = dict(zip(tensors, inputs, strict=True))
            views = {name: emit(_aten.transpose.int, read[name], 1, _POSITIONS) for name in exchanged}
            return (emit(getitem, emit(operator, **{**self.given, **read, **views, **changes}), 0),)

        return Proposal(tuple(tensors.values()), (output,), (build,), named, rounds_alike=True)


_POSITIONS = 2
"""The dimension of the sequence in BNSD."""


def _exchanges(node: object) -> TypeGuard[fx.Node]:
    """Whether ``node`` is its operand with heads and positions in each other's place."""
    if terms.calls(node, _aten.permute.default):
        return [dim % 4 for dim in node.args[1]] == [0, _POSITIONS, 1, 3]  # type: ignore[union-attr,operator]
    return terms.calls(node, _aten.transpose.int) and {dim % 4 for dim in node.args[1:3]} == {1, _POSITIONS}  # type: ignore[operator]


def _uncopied(node: fx.Node) -> fx.Node:
    """What ``node`` is a copy of, or itself."""
    while terms.calls(node, _aten.clone.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _heads_at(exchanged: bool) -> int:  # noqa: FBT001 - its only argument
    """The dimension of the heads, where they may have changed places with positions."""
    return _POSITIONS if exchanged else 1


def _unrepeated(heads: fx.Node) -> tuple[fx.Node, bool] | None:
    """What ``heads`` repeat for several heads of queries, and whether its positions come first."""
    shared = shared_heads(heads)
    if shared is not None:
        return shared, False
    inner = _uncopied(heads)
    shared = shared_heads(inner.args[0], _POSITIONS) if _exchanges(inner) else None  # type: ignore[arg-type]
    return None if shared is None else (shared, True)


def _without_repetition(found: _AttentionCall) -> Proposal | Unlike | None:
    """The call without the repetition of its keys and values."""
    sources = {name: _unrepeated(found.given[name]) for name in ("key", "value")}
    there = {name: one for name, one in sources.items() if one is not None}
    if len(there) != len(sources):
        return Unlike(found.node, "of keys and values one is repeated, the other is not") if there else None
    counts = [one.meta["val"].shape[_heads_at(behind)] for one, behind in there.values()]
    if not terms.same_size(*counts):
        return Unlike(found.node, "keys and values are repeated for different numbers of heads")
    exchanged = [name for name, (_, behind) in there.items() if behind]
    return found.proposal({name: one for name, (one, _) in there.items()}, found.output, exchanged)


def _positions_first(node: fx.Node) -> bool:
    """Whether in memory all heads of a position lie together."""
    strides = node.meta["val"].stride()
    return statically_known_true(strides[_POSITIONS] > strides[1])


def _in_place(found: _AttentionCall) -> Proposal | Unlike | None:
    """The call in layout BSND, without what exchanges heads and positions around it."""
    behind = [user for user in found.output.users if _exchanges(user)]
    copies = [user for one in behind for user in one.users if terms.calls(user, _aten.clone.default)]
    if len(behind) != 1 or len(copies) != 1:
        return None
    operands = {name: _uncopied(found.given[name]) for name in _OPERANDS}
    # The strides of one head do not tell.
    kept = [name for name, operand in operands.items() if not (_exchanges(operand) or _positions_first(operand))]
    if kept:
        return Unlike(found.node, f"{', '.join(kept)}: heads come before positions in memory")
    exchanged = [name for name, operand in operands.items() if not _exchanges(operand)]
    sources: dict[str, Any] = {name: one if name in exchanged else one.args[0] for name, one in operands.items()}
    return found.proposal(sources, copies[0], exchanged, input_layout="BSND")


@dataclass(frozen=True)
class _AttentionForm:
    """A form of a call and what surrounds it."""

    name: str
    propose: Callable[[_AttentionCall], Proposal | Unlike | None]

    @property
    def ends_with(self) -> frozenset[torch._ops.OpOverload]:
        """All versions; looked up late, because torch_npu defines them."""
        npu = torch.ops.npu
        versions = (npu.npu_fusion_attention, npu.npu_fusion_attention_v2, npu.npu_fusion_attention_v3)
        return frozenset(version.default for version in versions)

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """What is proposed for the call at ``node``."""
        found = _AttentionCall.read(node)
        return self.propose(found) if isinstance(found, _AttentionCall) else None


SHARED_HEADS = _AttentionForm("lift_shared_heads", _without_repetition)
LAYOUT = _AttentionForm("lift_attention_layout", _in_place)
