"""RMS norm => `npu_rms_norm`; with a weight counted from one, as Gemma's, => `npu_gemma_rms_norm`.

::

    y = x * 1 / sqrt(mean(x^2) + epsilon) * w          mean over the last dimension; w or (1 + w) one row

A norm without a weight gets one of ones. The operators take a weight of the dtype of ``x`` (CANN operator documentation,
aclnnRmsNorm and aclnnGemmaRmsNorm).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Root:
    """A factor that is one divided by a root: the node in the product, and what the root is of."""

    node: fx.Node
    under: fx.Node


@dataclass(frozen=True)
class _Weight:
    """What the norm is multiplied by; ``node`` is None for a norm without a weight."""

    node: fx.Node | None
    from_one: bool = False


def roots(factors: terms.Product) -> Iterator[Root]:
    """The inverse roots among the factors."""
    for node in factors.factors:
        under = terms.inverse_root_of(_unexpanded(node))
        if under is not None:
            yield Root(node, under)
    for node in factors.divisors:
        under = terms.root_of(_unexpanded(node))
        if under is not None:
            yield Root(node, under)


def _unexpanded(node: fx.Node) -> fx.Node:
    """The node before it was repeated along its last dimension, or before it got one."""
    inner = terms.core(node)
    while terms.calls(inner, _aten.expand.default) or _gets_a_last_dimension(inner):
        inner = terms.core(inner.args[0])  # type: ignore[arg-type]
    return inner


def _gets_a_last_dimension(node: fx.Node) -> bool:
    value = terms.tensor(node)
    return terms.calls(node, _aten.unsqueeze.default) and value is not None and node.args[1] in {-1, value.dim() - 1}


def _epsilon_outside(factors: terms.Product) -> fx.Node | None:
    """A divisor that is a root of a mean of squares plus a number, where the number should be under the root."""
    for node in factors.divisors:
        added = terms.plus_number(node)
        under = added and terms.root_of(added[0])
        found = under and terms.mean(under)
        if found and terms.square_of(found.of) is not None:
            return terms.core(node)
    return None


def _epsilon_unknown(root: Root) -> Unlike | None:
    """Why a root of a mean of squares and of something that is no number is left alone; None where it is no such root."""
    total = terms.core(root.under)
    for term, other in (total.args[:2], total.args[1::-1]) if terms.calls(total, _aten.add.Tensor) else ():
        found = terms.mean(term) if isinstance(term, fx.Node) and terms.tensor(term) is not None else None
        if found is not None and terms.square_of(found.of) is not None:
            reason = f"epsilon is {other}, which is no number when the graph is compiled"
            lines = "torch.compile(..., dynamic=None)   # epsilon stays a number"
            return Unlike(terms.core(root.node), reason, lines=lines)
    return None


def squared(root: Root) -> tuple[fx.Node, float] | Unlike | None:
    """``(x, epsilon)`` of a root of the mean of squares of x; None where it is something else."""
    added = terms.plus_number(root.under)
    under, epsilon = added if added is not None else (root.under, 0.0)
    found = terms.mean(under)
    x = None if found is None else terms.square_of(found.of)
    value = terms.tensor(x)
    if found is None or x is None or value is None:
        return _epsilon_unknown(root)
    if not found.complete:
        return Unlike(terms.core(root.node), "the squares are added up, and not divided by how many they are")
    if found.dims != (value.dim() - 1,):
        return Unlike(
            terms.core(root.node),
            f"the mean is over the dimensions {list(found.dims)} of {value.dim()}; the operator normalises the last one",
        )
    return x, epsilon


def _weight_of(parts: terms.Product, x: fx.Node, root: fx.Node) -> _Weight | str:
    """What else is in the product besides ``x`` and the root."""
    rest = [node for node in parts.factors if node is not root]
    scaled = [node for node in rest if terms.core(node) is terms.core(x)]
    others = [node for node in rest if node not in scaled]
    if len(scaled) != 1:
        return f"the squares are of {x.name}, which is {'not' if not scaled else 'more than once'} in the product"
    if len(others) > 1 or parts.scale != 1.0 or any(node is not root for node in parts.divisors):
        return "the norm is multiplied by more than a weight"
    if not others:
        return _Weight(None)
    counted = terms.plus_number(others[0])
    return _Weight(counted[0], from_one=True) if counted is not None and counted[1] == 1.0 else _Weight(others[0])


def vector(node: fx.Node, size: object, dtype: torch.dtype) -> fx.Node | None:
    """One row of this dtype with an element for each of the last dimension: the vector that ``node`` is a reshape of, or ``node``.

    A build gets it by `as_vector`.
    """
    value = terms.tensor(node)
    if value is None or not value.dim() or not terms.same_size(value.shape[-1], size):
        return None
    if not all(terms.same_size(other, 1) for other in value.shape[:-1]):
        return None
    for source in terms.reshaped_from(node):
        found = terms.tensor(source)
        if found is not None and found.dim() == 1 and found.dtype == dtype:
            return source
    return terms.of_dtype(node, dtype)


def as_vector(emit: Emit, row: fx.Node) -> fx.Node:
    """The row as a tensor of one dimension."""
    value = row.meta["val"]
    return row if value.dim() == 1 else emit(_aten.view.default, row, [value.shape[-1]])


def _ones(emit: Emit, like: torch.Tensor) -> fx.Node:
    """A weight that changes nothing. It reads no tensor, so that all norms of a size share it."""
    return emit(_aten.ones.default, [like.shape[-1]], dtype=like.dtype, device=like.device)


def _build(epsilon: float, *, from_one: bool) -> Build:
    def build(emit: Emit, x: fx.Node, *weight: fx.Node) -> tuple[fx.Node, ...]:
        gamma = as_vector(emit, weight[0]) if weight else _ones(emit, x.meta["val"])
        operator = torch.ops.npu.npu_gemma_rms_norm if from_one else torch.ops.npu.npu_rms_norm
        return (emit(getitem, emit(operator.default, x, gamma, epsilon), 0),)

    return build


class _RmsNorm:
    """The form."""

    name = "lift_rms_norm"
    ends_with = frozenset({_aten.mul.Tensor, _aten.div.Tensor, _aten._to_copy.default})  # noqa: SLF001 - its name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The norm that ends with ``node``."""
        loose = terms.product(node)
        refusal: Unlike | None = None
        for root in roots(loose):
            found = squared(root)
            answer = self._of(node, root, *found) if isinstance(found, tuple) else found
            if isinstance(answer, Proposal):
                return answer
            refusal = refusal or answer
        outside = _epsilon_outside(loose)
        if outside is not None:
            return Unlike(outside, "epsilon is added to the root; the operator adds it under the root")
        return refusal

    def _of(self, node: fx.Node, root: Root, of: fx.Node, epsilon: float) -> Proposal | Unlike:
        value, whole = node.meta["val"], terms.core(of)
        parts = terms.product(node, lambda one: terms.core(one) is whole or one is root.node)
        weight = _weight_of(parts, of, root.node)
        if isinstance(weight, str):
            return Unlike(terms.core(root.node), weight)
        x = terms.of_dtype(of, value.dtype)
        if x is None or value.dtype not in _TAKEN:
            return Unlike(terms.core(root.node), f"the result is {value.dtype} and the input {whole.meta['val'].dtype}")
        size = value.shape[-1]
        if not isinstance(size, int):
            return Unlike(terms.core(root.node), f"the size of the last dimension is the symbol {size}")
        if weight.node is None:
            return Proposal((x,), (node,), (_build(epsilon, from_one=False),))
        gamma = vector(weight.node, size, value.dtype)
        if gamma is None:
            shown = weight.node.meta["val"]
            return Unlike(
                terms.core(root.node),
                f"the weight is {shown.dtype}{list(shown.shape)}; the operator takes a {value.dtype} vector of {size}",
                lines="weight = weight.to(x.dtype)   # once, when the model is made"
                if shown.dtype != value.dtype
                else "",
            )
        return Proposal((x, gamma), (node,), (_build(epsilon, from_one=weight.from_one),))


FORM = _RmsNorm()
