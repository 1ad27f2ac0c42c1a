"""``silu(a) * b`` and ``gelu(a) * b`` of the two halves of one tensor => `npu_swiglu` and `npu_geglu`.

`npu_swiglu` takes the first half as the gate (operator documentation of ``torch_npu.npu_swiglu``), `npu_geglu` either (CANN
operator documentation, aclnnGeGluV3). Both compute in float32 and round once, so the product of a program in 16 bits may be one in
float32 that is cast back. Rows may be reshaped on the way. Models with one projection for both have such halves. Two separate
projections stay here: to join their results costs the kernel that the operator would save. `joined_gates.py` joins their weights;
where they have biases, `joined_projections.py` does, and the halves are read afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms.activation import Activation, gated
from npugraph_ex.lifting.parts import cut_by_a_symbol, part_of
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
SYMBOLIC = "the size of the last dimension is a symbol, so that the halves are unknown; mark_dynamic makes symbols of others alone"
_Where = tuple[int, int, int]


def _swiglu(_: Activation, *, first: bool) -> Build | None:
    return (lambda emit, x: (emit(torch.ops.npu.npu_swiglu.default, x, -1),)) if first else None


def _geglu(activation: Activation, *, first: bool) -> Build | None:
    approximate = ("none", "tanh").index(activation.how.get("approximate", "none"))

    def build(emit: Emit, x: fx.Node) -> tuple[fx.Node, ...]:
        return (emit(getitem, emit(torch.ops.npu.npu_geglu.default, x, -1, approximate, first), 0),)

    return build


@dataclass(frozen=True)
class GatedHalves:
    """The form of an activation.

    Attributes:
        name: in the report.
        activation: of the gate.
        build: the operator, by the activation, and by whether the gate is the ``first`` half; None where it takes no such.
    """

    name: str
    activation: OpOverload
    build: Callable[..., Build | None]

    ends_with = frozenset({*terms.MULTIPLYING, _aten._to_copy.default})  # noqa: SLF001 - its name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The product that is ``node``, or that ``node`` casts back."""
        product = terms.before_a_cast_back(node)
        found = gated(product)
        if found is None or found.activation.operator is not self.activation:
            return None
        first, second = (next(filter(None, map(part_of, terms.same_rows(one))), None) for one in (found.gate, found.up))
        alone = all(same_numbers(one.meta["val"].shape, product.meta["val"].shape) for one in (found.gate, found.up))
        if first is None or second is None or first[0] is not second[0] or not alone:
            return Unlike(product, SYMBOLIC) if cut_by_a_symbol(found.gate, found.up) else None
        build = self.build(found.activation, first=first[1] == 0)
        return _halves(node, product, first[0], first[1:], second[1:], build)


def _reshaped(build: Build, shape: Sequence[int | torch.SymInt]) -> Build:
    """The result in the dimensions of the program's, of which one may be a symbol."""
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return lambda emit, x: tuple(emit(_aten.view.default, one, sizes) for one in build(emit, x))


def _halves(
    node: fx.Node, product: fx.Node, x: fx.Node, gate: _Where, up: _Where, build: Build | None
) -> Proposal | Unlike | None:
    value, size = node.meta["val"], x.meta["val"].shape[-1]
    operand = terms.of_dtype(x, value.dtype)
    if build is None or {gate, up} != {(0, size // 2, 1), (size // 2, size, 1)}:
        which = "the first half" if build is None else "a half"
        return Unlike(
            product,
            f"the gate is the elements {slice(*gate)} of {size} and the other factor {slice(*up)}; "
            f"the operator takes {which} as the gate",
        )
    if operand is None or value.dtype not in _TAKEN:
        if any(terms.before_a_cast_back(user) is node for user in node.users):
            return None  # the cast back was asked before
        return Unlike(product, f"the halves are {terms.core(x).meta['val'].dtype} and the product {value.dtype}")
    if not same_numbers(x.meta["val"].shape[:-1], value.shape[:-1]):
        if sum(not isinstance(size, int) for size in value.shape) > 1:
            return Unlike(product, f"rows of {size} elements become {list(value.shape)}, of several symbols")
        build = _reshaped(build, value.shape)
    return Proposal((operand,), (node,), (build,))


SWIGLU = GatedHalves("lift_swiglu", _aten.silu.default, _swiglu)
GEGLU = GatedHalves("lift_geglu", _aten.gelu.default, _geglu)
