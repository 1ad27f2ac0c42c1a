"""Projections of one input, such as queries, keys and values, => one product with all weights in one tensor, and its parts.

The parts are views with the strides of the whole. So this is for parts whose strides and memory no program can see. The weights and
biases are joined in the graph, by concatenations that `joined_weights.py` then takes out of the call. A gate comes first, wherever
the program computes it: `npu_swiglu` takes the first half as the gate.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.projections import Projection, joined_weight, projected
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

NAME = "lift_joined_projections"

_aten = torch.ops.aten
_PRODUCTS = (_aten.matmul.default, _aten.mm.default, _aten.addmm.default)
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_ACTIVATIONS = (_aten.silu.default, _aten.sigmoid.default)


@dataclass(frozen=True)
class JoinedProjections:
    """The form; ``parameters`` are the inputs that may be joined."""

    parameters: Collection[fx.Node]

    name = NAME
    ends_with = frozenset(_PRODUCTS)

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The projections of which ``node`` is the last."""
        last = projected(node)
        those = [] if last is None else [one for one in _products_of(last.x) if self._goes_with(one, last)]
        if last is None or len(those) < 2 or those[-1].node is not node:
            return None
        those.sort(key=lambda one: not _is_gate(one.node))
        shape, value = _operand(last).meta["val"].shape, node.meta["val"]
        if len({one.weight for one in those}) < len(those):
            return Unlike(node, "some of the weights are one and the same")
        if value.dtype not in _TAKEN or sum(not isinstance(size, int) for size in shape) > 1:
            return Unlike(node, f"the projections are {value.dtype}, of {list(shape)}")
        parameters = [one.weight for one in those]
        if node.target is _aten.addmm.default:
            parameters += [one.bias for one in those if one.bias is not None]
        build = _build(shape, [one.size for one in those], inputs_first=last.inputs_first)
        outputs = tuple(one.node for one in those)
        return Proposal((last.x, *parameters), outputs, (build,), sums_rows=True, parts=True)

    def _goes_with(self, one: Projection, other: Projection) -> bool:
        """Whether one product may compute the two."""
        given = (one.weight, *((one.bias,) if one.node.target is _aten.addmm.default else ()))
        left, right = (_operand(each).meta["val"] for each in (one, other))
        alike = (one.node.target, one.inputs_first) == (other.node.target, other.inputs_first)
        alike = alike and same_numbers(left.shape, right.shape)
        return alike and left.dtype == right.dtype and all(part in self.parameters for part in given)


def _operand(one: Projection) -> fx.Node:
    """What is multiplied: the input, or a reshape of it."""
    return one.node.args[1 if one.node.target is _aten.addmm.default else 0]  # type: ignore[return-value]


def _products_of(x: fx.Node) -> list[Projection]:
    """The projections of ``x``, in graph order."""
    found, waiting = list[Projection](), [x]
    while waiting:
        for user in waiting.pop().users:
            one = projected(user) if terms.calls(user, *_PRODUCTS) else None
            if terms.calls(user, _aten.view.default, _aten.reshape.default):
                waiting.append(user)
            elif one is not None and one.x is x:
                found.append(one)
    return sorted(found, key=lambda one: one.node)


def _is_gate(node: fx.Node) -> bool:
    """Whether an activation reads it, or a cast or a reshape of it."""
    same = (*terms.RESHAPES, _aten._to_copy.default)  # noqa: SLF001 - the operator's name
    return any(terms.calls(user, *_ACTIVATIONS) or (terms.calls(user, *same) and _is_gate(user)) for user in node.users)


def _build(shape: Sequence[Any], sizes: list[int], *, inputs_first: bool) -> Build:
    def build(emit: Emit, x: fx.Node, *parameters: fx.Node) -> tuple[fx.Node, ...]:
        rows, count = [size if isinstance(size, int) else -1 for size in shape], len(sizes)
        if not same_numbers(x.meta["val"].shape, shape):
            x = emit(_aten.reshape.default, x, rows)
        weight = joined_weight(emit, parameters[:count], inputs_first=inputs_first)
        if len(parameters) == count:
            whole = emit(_aten.matmul.default, x, weight)
        else:
            whole = emit(_aten.addmm.default, emit(_aten.cat.default, list(parameters[count:]), 0), x, weight)
        parts = emit(_aten.split_with_sizes.default, whole, sizes, -1)
        return tuple(emit(getitem, parts, number) for number in range(count))

    return build
