"""Dynamic quantisation of each token to int8 => `npu_dynamic_quant`.

::

    scale = max(abs(x)) / 127          over the last dimension; max(amax(x), -amin(x)) and vector_norm(x, inf), too,
                                       and max(abs(amax(x)), abs(amin(x)))
    q     = round(x / scale)           half to even; with a clamp, which changes nothing, or without

A scale with a lower bound, ``max(scale, bound)`` or ``scale + bound``, is not the operator's for rows of tiny numbers, nor is one
with another number for 127, such as 127.5. There the scale is made by the operator alone, or from the largest element where that
rounds once less, and `npu_quantize` quantises with it. A bound that no row of the dtype but zeros is below changes the scale alone.
Where the program divides by a scale of 16 bits and gives it out, `npu_quantize` divides by that one: the two are multiplied later.
The operators take float16 and bfloat16 (operator documentation of ``torch_npu.npu_dynamic_quant``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike
from npugraph_ex.lifting.subgraph import Subgraph

_aten = torch.ops.aten
_CAST = _aten._to_copy.default  # noqa: SLF001 - the operator's name
_TAKEN = (torch.float16, torch.bfloat16)
_LARGEST = 127
_CLAMPS = (_aten.clamp.default, _aten.clamp_min.default, _aten.clamp_max.default)
_RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)  # noqa: SLF001 - its name
_NEAR = 1e-6
_DEEPEST = 8
"""Operators between the largest element of a row and its scale."""


@dataclass(frozen=True)
class _QuantisationScale:
    """``max(factor * largest, bound)``, or ``factor * largest + bound``: of ``of``, over the last dimension, from ``node``.

    ``coarse``: the product is rounded to 16 bits, so that one more rounding to float32 is not seen. ``paired``: it is given out in
    16 bits, and it is what divides.
    """

    node: fx.Node
    of: fx.Node
    factor: float = 1.0
    bound: float = 0.0
    added: bool = False
    coarse: bool = False
    paired: bool = False

    def is_like(self, other: _QuantisationScale) -> bool:
        """Whether the two are equal over the real numbers."""
        numbers = ((self.factor, other.factor), (self.bound, other.bound))
        same = all(math.isclose(one, another, rel_tol=_NEAR) for one, another in numbers)
        return same and self.node is other.node and self.added == other.added

    @property
    def most(self) -> float:
        """What the largest element becomes."""
        return 1 / self.factor

    @property
    def is_of_127(self) -> bool:
        """Whether that is what it becomes in the operator."""
        return math.isclose(self.most, _LARGEST, rel_tol=_NEAR)

    def is_the_operators(self, dtype: torch.dtype) -> bool:
        """Whether no bound changes the scale of a row of this dtype, but of zeros, and no other number."""
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        unbounded = not self.bound or not (self.added or self.bound > self.factor * smallest)
        return self.is_of_127 and unbounded


def _largest_of(node: fx.Node) -> _QuantisationScale | Unlike | None:
    """The largest magnitude of each row; None for anything else."""
    inner = terms.core(node)
    if terms.calls(inner, _aten.maximum.default):
        ends = [_end(one) for one in inner.args]
        if None in ends or {sign for sign, _ in ends} != {1, -1}:  # type: ignore[misc]
            return None
        (_, found), (_, other) = ends  # type: ignore[misc]
        return replace(found, node=inner) if terms.core(found.of) is terms.core(other.of) else None
    if terms.calls(inner, _aten.linalg_vector_norm.default) and terms.arguments(inner).get("ord", 2) == math.inf:
        found, x = _QuantisationScale(inner, inner.args[0]), inner.args[0]  # type: ignore[arg-type]
    else:
        reduced = _reduced(inner, _aten.amax.default, _aten.max.dim, _aten.max.default)
        under = None if reduced is None else terms.core(reduced.of)
        if reduced is None or not terms.calls(under, _aten.abs.default):
            return None
        found, x = reduced, under.args[0]
    value, dims = terms.tensor(x), _dims(inner)
    if value is None or not value.dim() or dims != [value.dim() - 1]:
        over = "all elements" if dims is None else f"the dimensions {dims}"
        return Unlike(inner, f"the largest element is that of {over}; the operator takes that of the last one")
    return replace(found, of=x)  # type: ignore[arg-type]


def _end(node: Any) -> tuple[int, _QuantisationScale] | None:
    """``(1, amax(x))`` or ``(-1, -amin(x))`` of the last dimension, which may be bounded by 0, or either one's magnitude."""
    outer = terms.core(node)
    if terms.calls(outer, _aten.abs.default):
        inner = terms.core(outer.args[0])  # type: ignore[arg-type]
        sign = 1 if _end_of(inner, 1) else -1
    else:
        sign = -1 if terms.calls(outer, _aten.neg.default) else 1
        inner = _unbounded(outer if sign > 0 else terms.core(outer.args[0]), sign)  # type: ignore[arg-type]
    found = _end_of(inner, sign)
    value = terms.tensor(found.of) if found else None
    return (sign, found) if found and value is not None and _dims(inner) == [value.dim() - 1] else None


def _end_of(node: fx.Node, sign: int) -> _QuantisationScale | None:
    """The input of the reduction, if ``node`` is a maximum (or, for a negative ``sign``, a minimum)."""
    largest, smallest = (_aten.amax.default, _aten.max.dim), (_aten.amin.default, _aten.min.dim)
    return _reduced(node, *(largest if sign > 0 else smallest)) or _of_both_ends(node, sign)


def _of_both_ends(node: fx.Node, sign: int) -> _QuantisationScale | None:
    """The input of `aminmax`, if ``node`` is its maximum (or, for a negative ``sign``, its minimum)."""
    call = node.args[0] if node.target is getitem and node.args[1] == (sign > 0) else None
    return _QuantisationScale(node, terms.arguments(call)["self"]) if terms.calls(call, _aten.aminmax.default) else None


def _unbounded(node: fx.Node, sign: int) -> fx.Node:
    """``x`` where the node is the larger (the smaller) of it and zeros."""
    if terms.calls(node, _aten.maximum.default if sign > 0 else _aten.minimum.default):
        left, right = map(terms.core, node.args)  # type: ignore[arg-type]
        return left if terms.constant(right) == 0 else right
    return node


def _reduced(node: fx.Node, *targets: Any) -> _QuantisationScale | None:
    """What a call of one of these reduces."""
    call = node.args[0] if node.target is getitem and node.args[1] == 0 else node
    return _QuantisationScale(node, call.args[0]) if terms.calls(call, *targets) else None  # type: ignore[arg-type]


def _dims(node: fx.Node) -> list[int] | None:
    """The dimensions that a reduction reduces, counted from 0; None for all."""
    call: Any = node.args[0] if node.target is getitem else node
    given = terms.arguments(call)
    value, dims = terms.tensor(given["self"]), given.get("dim")
    if dims is None or dims == [] or value is None:
        return None
    return [dim % value.dim() for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _scale_of(node: fx.Node, depth: int = _DEEPEST) -> _QuantisationScale | Unlike | None:
    """``node`` as a scale; None where it is none."""
    found = _largest_of(node)
    if found is not None or not depth:
        return found
    inner = terms.core(node)
    least = _least(inner)
    added = terms.plus_number(inner)
    if least is not None or added is not None:
        under, number = least or added  # type: ignore[misc]
        found = _scale_of(under, depth - 1)
        if not isinstance(found, _QuantisationScale) or number < 0 or (found.bound and (found.added or least is None)):
            return found if isinstance(found, Unlike) else None
        return replace(found, bound=max(found.bound, number), added=least is None)
    if terms.calls(inner, _aten.unsqueeze.default, _aten.view.default):
        shape, old = inner.meta["val"].shape, inner.args[0].meta["val"].shape  # type: ignore[union-attr]
        same = len(shape) == len(old) + 1 and all(map(terms.same_size, shape, (*old, 1)))
        return _scale_of(inner.args[0], depth - 1) if same else None  # type: ignore[arg-type]
    parts = terms.product(inner)
    if len(parts.factors) != 1 or parts.divisors or not parts.scale > 0 or terms.core(parts.factors[0]) is inner:
        return None
    found = _scale_of(parts.factors[0], depth - 1)
    if not isinstance(found, _QuantisationScale):
        return found
    coarse = found.coarse or inner.meta["val"].dtype in _TAKEN
    return replace(found, factor=found.factor * parts.scale, bound=found.bound * parts.scale, coarse=coarse)


def _least(node: fx.Node) -> tuple[fx.Node, float] | None:
    """``(x, c)`` where ``node`` is ``x``, and at least ``c``."""
    if not terms.calls(node, *_CLAMPS[:2]):
        return None
    given = terms.arguments(node)
    least = terms.number(given.get("min"))
    return (given["self"], least) if least is not None and given.get("max") is None else None


@dataclass(frozen=True)
class _Rounded:
    """What a cast to int8 is of: the quotient, whether it is rounded, and the bounds that it is clamped to."""

    quotient: fx.Node
    rounded: bool
    low: float
    high: float


def _before(node: fx.Node) -> _Rounded:
    """The quotient under ``node``, on which clamps and rounding have one effect in any order."""
    rounded, low, high = False, -math.inf, math.inf
    inner = _without_zero(terms.core(node))
    while terms.calls(inner, _aten.round.default, *_CLAMPS):
        given = terms.arguments(inner)
        rounded |= inner.target is _aten.round.default
        bounds = [
            -math.inf if given.get("min") is None else given["min"],
            math.inf if given.get("max") is None else given["max"],
        ]
        if None in map(terms.number, bounds):
            break  # bounds that are tensors
        low, high = max(low, bounds[0]), min(high, bounds[1])
        inner = _without_zero(terms.core(given["self"]))
    return _Rounded(inner, rounded, low, high)


def _without_zero(node: fx.Node) -> fx.Node:
    """``x`` where the node is ``x`` plus a zero point that is 0, which is nothing before or behind the rounding."""
    if not terms.calls(node, _aten.add.Tensor) or node.kwargs:
        return node
    left, right = node.args
    return terms.core(left) if terms.constant(right) == 0 else node  # type: ignore[arg-type]


class _DynamicQuant:
    """The form."""

    name = "lift_dynamic_quant"
    ends_with = frozenset({_CAST})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The quantisation whose whole numbers are ``node``."""
        value, source = node.meta["val"], terms.tensor(node.args[0])
        if value.dtype != torch.int8 or source is None or not source.is_floating_point():
            return None
        before = _before(node.args[0])  # type: ignore[arg-type]
        for divisor in terms.product(before.quotient).divisors:
            scale = _scale_of(divisor)
            if isinstance(scale, Unlike):
                return scale
            if scale is not None:
                return self._of(node, before, divisor, scale)
        return None

    def _of(self, node: fx.Node, before: _Rounded, divisor: fx.Node, scale: _QuantisationScale) -> Proposal | Unlike:
        whole = terms.core(scale.of)
        parts = terms.product(before.quotient, lambda one: one is divisor or terms.core(one) is whole)
        if [terms.core(one) for one in parts.factors] != [whole] or parts.divisors != (divisor,):
            return Unlike(node, f"the scale is of {whole.name}, and what it divides is something else")
        scale = replace(scale, factor=scale.factor / parts.scale, bound=scale.bound / parts.scale)
        if not before.rounded:
            return Unlike(node, "the quotient is cut off, and not rounded to the nearest whole number")
        most = min(scale.most, _LARGEST)
        beyond = (
            not scale.is_of_127 and scale.most > _LARGEST
        )  # then it depends on the clamp what becomes of the largest
        if before.low > -most or before.high < most or (beyond and (before.low, before.high) != (-128, 127)):
            return Unlike(node, f"the quotient is clamped to {before.low:g} and {before.high:g}")
        x = _half(scale.of)
        if x is None or x.meta["val"].dim() < 2:
            shown = whole.meta["val"]
            return Unlike(
                node,
                f"x is {shown.dtype}{list(shown.shape)}; the operator takes float16 and bfloat16 of two dimensions or more",
            )
        x = _unflattened(x, node.meta["val"].shape)
        inner = Proposal((x,), (node,), ())
        also = _given_out(scale, node, inner)
        if also is not None and also.meta["val"].dtype in _TAKEN:
            scale = replace(scale, paired=before.quotient in _followers(also))
        outputs = (node,) if also is None else (node, also)
        sizes = x.meta["val"].shape
        if not scale.is_the_operators(x.meta["val"].dtype) and len(sizes) > 2 and _symbols(sizes) > 1:
            return Unlike(node, "the scale is not the operator's, which has no bound, and the sizes of x are symbols")
        build = _build(scale, [one.meta["val"] for one in outputs])
        return replace(inner, outputs=outputs, builds=(build,), rounds=True)


def _unflattened(node: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """What ``node`` is a reshape of that keeps the last dimension: the operator before it may take this one, too."""
    source = node.args[0] if terms.calls(node, *_RESHAPES) else None
    old = terms.tensor(source)
    if old is None or old.dim() < 2 or not terms.same_size(old.shape[-1], shape[-1]) or _symbols(shape) > 1:
        return node
    return _unflattened(source, shape)  # type: ignore[arg-type]


def _symbols(sizes: Sequence[Any]) -> int:
    return sum(not isinstance(size, int) for size in sizes)


def _half(node: fx.Node) -> fx.Node | None:
    """The first that ``node`` is a cast of whose dtype is taken."""
    return next((one for one in terms.casts(node) if one.meta["val"].dtype in _TAKEN), None)


def _given_out(scale: _QuantisationScale, node: fx.Node, proposal: Proposal) -> fx.Node | None:
    """The first node that is the scale and that others use; None where there is none."""
    subgraph = Subgraph.of(proposal)
    inside = () if isinstance(subgraph, str) else subgraph.nodes
    for one in sorted(_followers(scale.node) - {node}):
        known = _scale_of(one)
        if not isinstance(known, _QuantisationScale) or not known.is_like(scale):
            continue
        outside = [user for user in one.users if user not in inside]
        if one not in inside or outside:
            wide = outside[0] if len(outside) == 1 else one
            return wide if terms.calls(wide, _CAST) and wide.meta["val"].dtype == torch.float32 else one
    return None


def _followers(node: fx.Node) -> set[fx.Node]:
    """The operators that lead from ``node``, as far as a scale is from the largest element."""
    found, edge = {node}, {node}
    for _ in range(_DEEPEST):
        edge = {user for one in edge for user in one.users if terms.tensor(user) is not None} - found
        found |= edge
    return found


def _build(scale: _QuantisationScale, results: Sequence[torch.Tensor]) -> Build:
    def build(emit: Emit, x: fx.Node) -> tuple[fx.Node, ...]:
        value, quantised_like, *scale_like = x.meta["val"], *results
        own = scale.is_the_operators(value.dtype)
        if scale.is_of_127 or scale.coarse:
            made = emit(torch.ops.npu.npu_dynamic_quant.default, x)
            quantised, factor = (emit(getitem, made, number) for number in range(2))
            if not scale.is_of_127:
                factor = emit(_aten.mul.Tensor, factor, scale.factor * _LARGEST)
        else:
            largest = emit(_aten.amax.default, emit(_aten.abs.default, x), [-1])
            if not (scale.paired and largest.meta["val"].dtype == scale_like[0].dtype):
                largest = emit(_CAST, largest, dtype=torch.float32)
            factor = emit(_aten.div.Tensor, largest, scale.most)
        if scale.bound and (scale_like or not own):
            factor = emit(_aten.add.Tensor if scale.added else _aten.clamp_min.default, factor, scale.bound)
        given = factor
        if scale_like and factor.meta["val"].dtype != scale_like[0].dtype:
            given = emit(_CAST, factor, dtype=scale_like[0].dtype)
        if scale.paired:
            factor = emit(_CAST, given, dtype=torch.float32)
        if not own or scale.paired:
            quantised = _with(emit, x, factor)
        quantised = _shaped(emit, quantised, quantised_like)
        return (quantised, _shaped(emit, given, scale_like[0])) if scale_like else (quantised,)

    return build


def _with(emit: Emit, x: fx.Node, scales: fx.Node) -> fx.Node:
    """``x`` [..., K] quantised with a scale for each token, as a matrix."""
    if x.meta["val"].dim() > 2:
        x = emit(_aten.reshape.default, x, [-1, x.meta["val"].shape[-1]])
        scales = emit(_aten.reshape.default, scales, [-1])
    return emit(torch.ops.npu.npu_quantize.default, x, scales, None, torch.qint8, -2, True)  # noqa: FBT003 - divides


def _shaped(emit: Emit, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """The node in a shape of as many elements."""
    shape = node.meta["val"].shape
    if len(shape) == like.dim() and all(map(terms.same_size, shape, like.shape)):
        return node
    if len(shape) == like.dim() - 1 and all(map(terms.same_size, shape, like.shape)):
        return emit(_aten.unsqueeze.default, node, -1)
    return emit(_aten.view.default, node, [size if isinstance(size, int) else -1 for size in like.shape])


FORM = _DynamicQuant()
