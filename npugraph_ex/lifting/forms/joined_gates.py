"""``silu(x @ gate.T) * (x @ up.T)``, or with GELU, => `npu_swiglu` or `npu_geglu` of one product, with both weights in one tensor.

The weights are joined in the graph, by a concatenation that `joined_weights.py` then takes out of the call. So these forms are for
graphs whose parameters are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms.activation import gated
from npugraph_ex.lifting.forms.swiglu import GEGLU, SWIGLU, GatedHalves
from npugraph_ex.lifting.projections import Projection, joined_weight, projected
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_PRODUCTS = (_aten.matmul.default, _aten.mm.default)
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class JoinedSwiGlu:
    """The form of one activation; ``parameters`` are the inputs whose weights may be joined."""

    parameters: Collection[fx.Node]

    name: ClassVar[str] = "lift_joined_swiglu"
    halves: ClassVar[GatedHalves] = SWIGLU
    """What the halves of the product are then an instance of."""
    ends_with = GatedHalves.ends_with

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The product that is ``node``, or that ``node`` casts back."""
        product = terms.before_a_cast_back(node)
        found = gated(product)
        if found is None or found.activation.operator is not self.halves.activation:
            return None
        gate, up = _projection(found.gate), _projection(found.up)
        gating = self.halves.build(found.activation, first=True)
        return None if gate is None or up is None or gating is None else self._of(node, product, gate, up, gating)

    def _of(
        self, node: fx.Node, product: fx.Node, gate: Projection, up: Projection, gating: Build
    ) -> Proposal | Unlike:
        weights, value = (gate.weight, up.weight), node.meta["val"]
        if gate.x is not up.x:
            return Unlike(product, f"the gate is a projection of {gate.x.name}, and the other factor of {up.x.name}")
        if gate.bias is not None or up.bias is not None or gate.node.target not in _PRODUCTS:
            return Unlike(product, "the projections have biases, or a reshape before them")
        if gate.weight is up.weight:
            return Unlike(product, "the weights are one and the same")
        if not all(weight in self.parameters for weight in weights):
            return Unlike(
                product,
                "a weight is no parameter, or was made in inference mode, where nothing tells whether it was written",
            )
        if gate.inputs_first != up.inputs_first:
            return Unlike(product, "one of the weights is [in, out], and the other [out, in]")
        kinds = {(one.meta["val"].dtype, tuple(one.meta["val"].shape)) for one in weights}
        if len(kinds) > 1 or value.dtype not in _TAKEN or gate.x.meta["val"].dtype != value.dtype:
            return Unlike(product, f"the weights are {' and '.join(map(str, kinds))}, and the result {value.dtype}")

        x, joined = gate.node.args[0], _joined(inputs_first=gate.inputs_first)
        steps = (
            Proposal((x, *weights), (gate.node, up.node), (_halves(joined, gate.size),), sums_rows=True),  # type: ignore[arg-type]
            Proposal((gate.node, up.node), (node,), (_gated_together(gating),)),
        )
        return Proposal((x, *weights), (node,), (_build(gating, joined),), steps=steps)  # type: ignore[arg-type]


@dataclass(frozen=True)
class JoinedGeGlu(JoinedSwiGlu):
    """With GELU, by an error function or a tanh, as Gemma has it."""

    name: ClassVar[str] = "lift_joined_geglu"
    halves: ClassVar[GatedHalves] = GEGLU


def _projection(node: fx.Node) -> Projection | None:
    """The projection that ``node`` is a reshape of."""
    return next(filter(None, map(projected, terms.reshaped_from(node))), None)


def _joined(*, inputs_first: bool) -> Callable[..., fx.Node]:
    """One product in the place of two."""
    return lambda emit, x, *weights: emit(
        _aten.matmul.default, x, joined_weight(emit, weights, inputs_first=inputs_first)
    )


def _build(gating: Build, joined: Callable[..., fx.Node]) -> Build:
    return lambda emit, x, gate, up: gating(emit, joined(emit, x, gate, up))


def _halves(joined: Callable[..., fx.Node], size: Any) -> Build:
    """The first step as it is judged: what the joined product has in the place of each of the two."""

    def build(emit: Emit, x: fx.Node, gate: fx.Node, up: fx.Node) -> tuple[fx.Node, ...]:
        halves = emit(_aten.split_with_sizes.default, joined(emit, x, gate, up), [size, size], -1)
        return emit(getitem, halves, 0), emit(getitem, halves, 1)

    return build


def _gated_together(gating: Build) -> Build:
    """The second step as it is judged: the operator on the two products that the program has."""
    return lambda emit, gate, up: gating(emit, emit(_aten.cat.default, [gate, up], -1))
