"""Layer norm => `native_layer_norm`, one kernel, as ``torch.nn.functional.layer_norm`` has it.

::

    y = (x - mean(x)) / sqrt(variance(x) + epsilon) * w + b      over the last dimension; w and b rows, or missing
    y = layer_norm(x) * w + b                                    as DiT has it, with a scale and a shift of the step

The operator takes one weight for all rows, so where each of several images has a scale and a shift of its own, they stay. The
variance is the mean of the squared distances from the mean, spelled out, as ``mean(x^2) - mean(x)^2``, or by torch. Divided by
one less than the size, as ``x.var(-1)`` has it by default, it is another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from npugraph_ex.lifting import reductions, terms
from npugraph_ex.lifting.forms._root_mean_square import ADDED_UP, Root, RowDivisor, root_mean_square, roots
from npugraph_ex.lifting.forms.rms_norm import as_vector, vector
from npugraph_ex.lifting.powers import power
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_MORE = "the norm is multiplied by more than a weight"
_VARIANCES = (_aten.var.correction, _aten.var_mean.correction)
_WITH_MEANS = (_aten.var_mean.correction, _aten.std_mean.correction)
_OUTSIDE = "epsilon is added to the root; the operator adds it under the root"
_CORRECTED = "the variance has the correction {0}, so it is divided by size - {0}; the operator divides it by the size"
_TORCH = (
    "y = torch.nn.functional.layer_norm(x, (size,), weight, bias, epsilon)   # if rows near zero may have other values"
)
_FACTOR = "(1 - {} / size)"
_SCALED = f"weight = weight * {_FACTOR} ** 0.5   # once; without a weight torch.full((size,), {_FACTOR} ** 0.5)\n"
_TORCH_CORRECTED = _SCALED + f"y = torch.nn.functional.layer_norm(x, (size,), weight, bias, epsilon * {_FACTOR})"


@dataclass(frozen=True)
class _Centred:
    """``node`` is ``x`` without its mean over ``dims``."""

    node: fx.Node
    x: fx.Node
    dims: tuple[int, ...]


def _centred(node: fx.Node) -> _Centred | None:
    """What ``node`` is, if it is a difference from a mean."""
    inner = terms.core(node)
    if not terms.calls(inner, _aten.sub.Tensor) or inner.kwargs:
        return None
    x, other = inner.args
    if not isinstance(x, fx.Node) or not isinstance(other, fx.Node):
        return None
    result = _result(other, 1)
    if result is not None:
        given = terms.arguments(result)
        return _Centred(inner, x, _dims(given, x)) if terms.core(given["self"]) is terms.core(x) else None
    found = reductions.mean(other)
    if found is None or not found.complete or terms.core(found.of) is not terms.core(x):
        return None
    return _Centred(inner, x, found.dims)


def _result(node: fx.Node, number: int) -> fx.Node | None:
    """The call of `var_mean` or `std_mean` whose result of this number ``node`` is a reshape of."""
    for one in terms.reshaped_from(node):
        if one.target is getitem and one.args[1] == number and terms.calls(one.args[0], *_WITH_MEANS):
            return one.args[0]
    return None


def _dims(given: dict[str, object], x: fx.Node) -> tuple[int, ...]:
    rank, dims = x.meta["val"].dim(), given.get("dim")
    return tuple(range(rank)) if dims is None else tuple(dim % rank for dim in dims)  # type: ignore[attr-defined]


def _corrected(node: fx.Node, call: fx.Node, centred: _Centred, outside: str = "") -> Unlike:
    """Why a root of a variance with a correction stays; ``outside`` says what is not under it, if anything."""
    correction = terms.arguments(call).get("correction", 1)
    reason = _CORRECTED.format(correction) + (f"; {outside}" if outside else "")
    lines = _SCALED + _TORCH if outside else _TORCH_CORRECTED
    return Unlike(node, reason, lines=lines.replace("{}", str(correction)) if _is_of(call, centred) else "")


def _is_of(call: fx.Node, centred: _Centred) -> bool:
    """Whether a variance or a deviation is that of what is centred, over its last dimension, as the mean is."""
    source, last = call.args[0], (centred.x.meta["val"].dim() - 1,)
    if not isinstance(source, fx.Node) or terms.core(source) is not terms.core(centred.x):
        return False
    return _dims(terms.arguments(call), source) == centred.dims == last


def _variance(root: Root, centred: _Centred, outside: str = "") -> tuple[fx.Node, float] | Unlike | None:
    """``(x, epsilon)`` of a root of the variance of x; None where it is something else. ``outside`` is what a refusal adds."""
    under, epsilon = terms.plus_number(root.under) or (root.under, 0.0)
    if root.scale != 1.0:
        return None
    kept = next((one for one in terms.reshaped_from(under) if terms.calls(one, *_VARIANCES)), None)
    call = _result(under, 0) or kept
    if call is not None and call.target in _VARIANCES:
        given, source = terms.arguments(call), call.args[0]
        correction = given.get("correction", 1)
        if correction != 0:
            return _corrected(terms.core(root.node), call, centred, outside)
        return (source, epsilon) if isinstance(source, fx.Node) and len(_dims(given, source)) == 1 else None
    found = root_mean_square(root)
    of_squares = _difference_of_squares(under) if found is None else None
    if of_squares is not None:
        return of_squares, epsilon
    if not isinstance(found, RowDivisor):
        return found
    unlike = found.over_others or ("" if terms.same_number(found.square.times, 1.0) else ADDED_UP)
    if unlike or found.least:
        return Unlike(
            terms.core(root.node), unlike or f"the root is at least {found.epsilon}; the operator has no bound"
        )
    squared = _centred(found.square.x)
    return None if squared is None else (squared.x, found.epsilon)


def _difference_of_squares(node: fx.Node) -> fx.Node | None:
    """``x`` where ``node`` is ``mean(x^2) - mean(x)^2``, its variance, which may be said to be no less than 0."""
    bound = terms.at_least(node)
    found = terms.summands(bound[0] if bound is not None and bound[1] <= 0 else node)
    square = None if found is None or found[0].alone is None else reductions.mean(found[0].alone)
    x = None if square is None or not square.complete else terms.square_of(square.of)
    if found is None or square is None or x is None:
        return None
    taken = terms.product(found[1])
    power = terms.square_of(taken.factors[0]) if len(taken.factors) == 1 else None
    means = [reductions.mean(one) for one in (taken.factors if power is None else (power, power))]
    same = [one and one.complete and one.dims == square.dims and terms.core(one.of) is terms.core(x) for one in means]
    return x if taken.scale == -1.0 and not taken.divisors and same == [True, True] else None


def _by_deviation(node: fx.Node, centred: _Centred) -> Unlike | None:
    """Why a division by a root of a variance plus a number stays, or by torch's deviation; None where it is none."""
    added = terms.plus_number(node)
    deviation = (added or terms.at_least(node) or (node, 0.0))[0]
    root = power(deviation)
    if root.exponent == 0.5:
        known = _variance(Root(node, root.base), centred, _OUTSIDE) if added else None
        if isinstance(known, tuple):
            return Unlike(node, _OUTSIDE, lines=_TORCH) if terms.core(known[0]) is terms.core(centred.x) else None
        return known if isinstance(known, Unlike) and known.lines else None
    alone = next((one for one in terms.reshaped_from(deviation) if terms.calls(one, _aten.std.correction)), None)
    call = alone or _result(deviation, 0)
    if call is None or not _is_of(call, centred):
        return None
    reason = _OUTSIDE if added else "the deviation divides without an epsilon under the root, as the operator has it"
    if terms.arguments(call).get("correction", 1) != 0:
        return _corrected(node, call, centred, reason)
    return Unlike(node, reason, lines=_TORCH)


def _sums(node: fx.Node) -> Iterator[tuple[terms.Product, fx.Node | None]]:
    """What may be a norm, and the bias that is added to it."""
    yield terms.Product(1.0, (node,)), None
    found = terms.summands(node)
    for normed, bias in () if found is None else (found, found[::-1]):
        if bias.alone is not None and normed.factors:
            yield normed, bias.alone


def _build(size: int, epsilon: float, *, weight: bool, bias: bool) -> Build:
    def build(emit: Emit, x: fx.Node, *vectors: fx.Node) -> tuple[fx.Node, ...]:
        given = [as_vector(emit, one) for one in vectors]
        operands = [given.pop(0) if there else None for there in (weight, bias)]
        return (emit(getitem, emit(_aten.native_layer_norm.default, x, [size], *operands, epsilon), 0),)

    return build


def _with_vectors(
    node: fx.Node, x: fx.Node, epsilon: float, affine: tuple[list[fx.Node], fx.Node | None], shown: fx.Node
) -> Proposal | Unlike:
    """The norm of ``x`` with what it is multiplied by, and what is added."""
    value, (rest, bias) = node.meta["val"], affine
    size = value.shape[-1]
    wanted = [*rest, *([] if bias is None else [bias])]
    vectors = [vector(one, size, value.dtype) for one in wanted]
    if None in vectors:
        some = ", ".join(f"{one.meta['val'].dtype}{list(one.meta['val'].shape)}" for one in wanted)
        return Unlike(shown, f"weight and bias are {some}; the operator takes {value.dtype} vectors of {size}")
    build = _build(size, epsilon, weight=bool(rest), bias=bias is not None)
    return Proposal((x, *vectors), (node,), (build,), sums_rows=True)  # type: ignore[arg-type]


def _plain(node: fx.Node) -> fx.Node | None:
    """The norm without weight and bias, over the last dimension, whose result ``node`` is."""
    result = terms.core(node)
    call = result.args[0] if result.target is getitem and result.args[1] == 0 else None
    if not terms.calls(call, _aten.native_layer_norm.default):
        return None
    given = terms.arguments(call)
    return call if (given["weight"], given["bias"], len(given["normalized_shape"])) == (None, None, 1) else None


def _scaled(node: fx.Node, total: tuple[terms.Product, fx.Node | None], plain: fx.Node) -> Proposal | Unlike | None:
    """A norm of torch's, scaled and shifted; None where nothing of that belongs to it."""
    value, (normed, bias), given = node.meta["val"], total, terms.arguments(plain)
    parts = terms.product(normed)
    rest = [one for one in parts.factors if _plain(one) is not plain]
    size, x = value.shape[-1], terms.of_dtype(given["input"], value.dtype)
    if not (rest or bias) or (bias is not None and vector(bias, size, value.dtype) is None):
        return None
    if len(parts.factors) != 2 - (not rest) or parts.scale != 1.0 or parts.divisors:
        return Unlike(plain, _MORE)
    if x is None or value.dtype not in _TAKEN or not isinstance(size, int):
        return Unlike(
            plain, f"the result is {value.dtype}{list(value.shape)} and the norm's {plain.meta['val'][0].dtype}"
        )
    return _with_vectors(node, x, given["eps"], (rest, bias), plain)


class _LayerNorm:
    """The form."""

    name = "lift_layer_norm"
    ends_with = frozenset({_aten.add.Tensor, *terms.MULTIPLYING, _aten._to_copy.default})  # noqa: SLF001 - its name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The norm that ends with ``node``."""
        for normed, bias in _sums(node):
            loose = terms.product(normed)
            differences = [one for one in map(_centred, loose.factors) if one is not None]
            for centred in differences:
                for root in roots(loose):
                    return self._of(node, (normed, bias), centred, root)
                for unlike in filter(None, (_by_deviation(one, centred) for one in loose.divisors)):
                    return unlike if len(differences) == 1 else None
            for plain in filter(None, map(_plain, loose.factors)):
                return _scaled(node, (normed, bias), plain)
        return None

    def _of(
        self, node: fx.Node, total: tuple[terms.Product, fx.Node | None], centred: _Centred, root: Root
    ) -> Proposal | Unlike | None:
        value, (normed, bias), x, shown = node.meta["val"], total, centred.x, terms.core(root.node)
        found = _variance(root, centred)
        if not isinstance(found, tuple):
            return found
        if terms.core(found[0]) is not terms.core(x):
            return Unlike(shown, f"the variance is that of {found[0].name}, and the mean that of {x.name}")
        if centred.dims != (value.dim() - 1,):
            where = f"the dimensions {list(centred.dims)} of {value.dim()}"
            return Unlike(shown, f"the mean is over {where}; the operator normalises the last one")
        operand, size = terms.of_dtype(x, value.dtype), value.shape[-1]
        if operand is None or value.dtype not in _TAKEN or not isinstance(size, int):
            return Unlike(shown, f"the result is {value.dtype}{list(value.shape)} and the input {x.meta['val'].dtype}")
        parts = terms.product(normed, lambda one: terms.core(one) is centred.node or one is root.node)
        rest = [one for one in parts.factors if one is not root.node and terms.core(one) is not centred.node]
        if len(rest) > 1 or parts.scale != 1.0 or any(one is not root.node for one in parts.divisors):
            return Unlike(shown, _MORE)
        return _with_vectors(node, operand, found[1], (rest, bias), shown)


FORM = _LayerNorm()
