"""RMS norm => `npu_rms_norm`; with a weight counted from one, as Gemma's, => `npu_gemma_rms_norm`.

::

    y = x * 1 / sqrt(mean(x^2) + epsilon) * w          mean over the last dimension; w or (1 + w) one row
    y = n + n * w                                      the same as n * (1 + w)

A norm without a weight gets one of ones, which becomes a constant. The operators take a weight of the dtype of ``x`` (CANN
operator documentation, aclnnRmsNorm and aclnnGemmaRmsNorm).

An epsilon that is added to the root is another one, and so is a least value of the root, as `torch.nn.functional.normalize` has it,
but for float16 and a value that no row of its numbers comes near, unless it is zero.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import permutations
from operator import getitem

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._root_mean_square import ADDED_UP, RowDivisor, row_divisors
from npugraph_ex.lifting.proposal import Build, Change, Emit, Proposal, Unlike

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_MORE = "the norm is multiplied by more than a weight"


@dataclass(frozen=True)
class _Weight:
    """What the norm is multiplied by; ``node`` is None for a norm without a weight."""

    node: fx.Node | None
    from_one: bool = False


def _weight_of(parts: terms.Product, x: fx.Node, root: fx.Node) -> _Weight | str:
    """What else is in the product besides ``x`` and the root, and a number."""
    rest = [node for node in parts.factors if node is not root]
    scaled = [node for node in rest if terms.row_core(node) is terms.row_core(x)]
    others = [node for node in rest if node not in scaled]
    if len(scaled) != 1:
        return f"the squares are of {x.name}, which is {'not' if not scaled else 'more than once'} in the product"
    if len(others) > 1 or any(node is not root for node in parts.divisors):
        return _MORE
    if not others:
        return _Weight(None)
    counted = terms.plus_number(others[0])
    return _Weight(counted[0], from_one=True) if counted is not None and counted[1] == 1.0 else _Weight(others[0])


def _of_the_norm(parts: terms.Product, root: fx.Node) -> bool:
    """Whether a factor is a function of the norm, as in ``n * sigmoid(n)``: this product is what follows the norm."""
    waiting, seen = [one for one in (*parts.factors, *parts.divisors) if one is not root], set[fx.Node]()
    while waiting:
        one = waiting.pop()
        if one is root:
            return True
        if one not in seen and root < one:
            seen.add(one)
            waiting += one.all_input_nodes
    return False


def _counted_from_one(node: fx.Node) -> tuple[terms.Product, fx.Node] | None:
    """``(n, w)`` where ``node`` is ``n + n * w``."""
    for parts in permutations(terms.summands(terms.row_core(node)) or (), 2):
        n, more = (terms.product(part, inside=terms.row_core) for part in parts)
        (own, below), (there, others) = (
            [Counter(map(terms.row_core, nodes)) for nodes in (one.factors, one.divisors)] for one in (n, more)
        )
        weight = [*(there - own).elements()]
        if not own - there and len(weight) == 1 and below == others and n.scale == more.scale:
            return parts[0], next(one for one in more.factors if terms.row_core(one) is weight[0])
    return None


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
    """A weight that changes nothing. It reads no tensor, so that it becomes a constant, which all norms of a size share."""
    return emit(_aten.ones.default, [like.shape[-1]], dtype=like.dtype, device=like.device)


def reshaped(emit: Emit, x: fx.Node, shape: torch.Size) -> fx.Node:
    """``x`` with other rows of the same last dimension; of their numbers at most one is a symbol."""
    if same_numbers(x.meta["val"].shape, shape):
        return x
    return emit(_aten.view.default, x, [size if isinstance(size, int) else -1 for size in shape])


def can_be_reshaped(x: fx.Node, shape: torch.Size) -> bool:
    """Whether `reshaped` can do it."""
    known = sum(not isinstance(size, int) for size in shape) <= 1
    return same_numbers(x.meta["val"].shape, shape) or known


def _build(epsilon: float, shape: torch.Size, *, from_one: bool) -> Build:
    def build(emit: Emit, x: fx.Node, *weight: fx.Node) -> tuple[fx.Node, ...]:
        gamma = as_vector(emit, weight[0]) if weight else _ones(emit, x.meta["val"])
        operator = torch.ops.npu.npu_gemma_rms_norm if from_one else torch.ops.npu.npu_rms_norm
        return (reshaped(emit, emit(getitem, emit(operator.default, x, gamma, epsilon), 0), shape),)

    return build


_LEAST_SQUARE = 2.0**-48
"""The square of the least positive number of float16."""
_LOST = 2.0**-24
"""No bit of a root in float32 is left of such a part of what it is of."""


def _epsilon(divisor: RowDivisor, times: float) -> float:
    """What is added to the mean of squares, so that a row of zeros is divided by the same."""
    return (divisor.epsilon**2 if divisor.outside or divisor.least else divisor.epsilon) / times


def _another_epsilon(divisor: RowDivisor, epsilon: float, x: torch.Tensor) -> str:
    """Why ``epsilon`` gives other values in other rows; empty where it does not."""
    if divisor.outside:
        return "epsilon is added to the root; the operator adds it under the root"
    tiny, lost = torch.finfo(torch.float32).tiny, _LEAST_SQUARE * _LOST / x.shape[-1]
    if not divisor.least or (x.dtype == torch.float16 and tiny <= epsilon <= lost):
        return ""
    return f"the root is at least {divisor.epsilon:.3g}; the operator adds epsilon under the root"


def _call(size: int, weight: str, epsilon: float) -> str:
    return f"y = torch.nn.functional.rms_norm(x, ({size},), {weight}, {epsilon:.3g})"


def _by_torch(inputs: tuple[fx.Node, ...], node: fx.Node, epsilon: float, *, from_one: bool) -> Change:
    """The call of torch's own norm, whose epsilon is the operator's."""

    def program(x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()  # what torch computes: a trace of its call would have a sum in place
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        for gamma in weight:
            normed = normed * (1 + gamma if from_one else gamma)
        return normed.to(x.dtype)

    weight = "None" if len(inputs) == 1 else "1 + weight" if from_one else "weight"
    mend = "call torch.nn.functional.rms_norm, if rows near zero may have other values"
    lines = _call(node.meta["val"].shape[-1], weight, epsilon)
    return Change(Proposal(inputs, (node,), ()), "rms_norm", program, mend, lines)


def _proposal(
    node: fx.Node, divisor: RowDivisor, times: float, scale: float, inputs: tuple[fx.Node, ...], *, from_one: bool
) -> Proposal | Unlike | None:
    """What is proposed for ``scale`` times the product of ``inputs``, each row of it divided by ``divisor``."""
    shown, size, epsilon = terms.core(divisor.node), node.meta["val"].shape[-1], _epsilon(divisor, times)
    another = _another_epsilon(divisor, epsilon, node.meta["val"])
    if not terms.same_number(math.sqrt(times), scale):
        if scale != 1.0:  # a number behind the norm is what follows it, and the norm is asked by itself
            return Unlike(shown, _MORE) if len(terms.core(node).all_input_nodes) > 1 else None
        once = f"weight = weight / {size} ** 0.5   # once, when the model is made; of ones where there is no weight\n"
        lines = once + _call(size, "weight", epsilon) if terms.same_number(times, size) else ""
        reason = f"{ADDED_UP}: the root is of {times:.6g} times their mean"
        return Unlike(shown, f"{reason}; {another}" if lines and another else reason, lines=lines)
    if another:
        return Unlike(shown, another, _by_torch(inputs, node, epsilon, from_one=from_one))
    return Proposal(inputs, (node,), (_build(epsilon, node.meta["val"].shape, from_one=from_one),))


def _operand(x: fx.Node, result: torch.Tensor) -> fx.Node | None:
    """What the operator reads: ``x`` before casts and reshapes, of the dtype of the result, and of its shape where there is one."""
    there = [one for one in terms.same_rows(x) if one.meta["val"].dtype == result.dtype]
    alike = [one for one in there if same_numbers(one.meta["val"].shape, result.shape)]
    same_number = [one for one in there if terms.same_size(one.meta["val"].numel(), result.numel())]
    return next((one for one in (*alike, *same_number) if can_be_reshaped(one, result.shape)), None)


class _RmsNorm:
    """The form."""

    name = "lift_rms_norm"
    ends_with = frozenset({*terms.MULTIPLYING, *terms.ADDING, _aten._to_copy.default})  # noqa: SLF001 - its name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The norm that ends with ``node``."""
        refusal: Unlike | None = None
        whole, counted = _counted_from_one(node) or (terms.Product(1.0, (node,)), None)
        for found in row_divisors(terms.product(whole, inside=terms.row_core)):
            answer = self._of(node, found, whole, counted) if isinstance(found, RowDivisor) else found
            if isinstance(answer, Proposal):
                return answer
            refusal = refusal or answer
        return refusal

    def _of(
        self, node: fx.Node, divisor: RowDivisor, product: terms.Product, counted: fx.Node | None
    ) -> Proposal | Unlike | None:
        value, square, shown = node.meta["val"], divisor.square, terms.core(divisor.node)
        whole, size, times = terms.row_core(square.x), value.shape[-1], square.times
        if divisor.over_others:
            return Unlike(shown, divisor.over_others)
        # The square may be of a product.
        kept = {terms.core(square.x), whole}
        parts = terms.product(
            product, lambda one: terms.core(one) in kept or one is divisor.node, inside=terms.row_core
        )
        if _of_the_norm(parts, divisor.node):
            return None
        weight = _weight_of(parts, square.x, divisor.node)
        if counted is not None and isinstance(weight, _Weight):
            weight = _Weight(counted, from_one=True) if weight.node is None else _MORE
        if isinstance(weight, str):
            return Unlike(shown, weight)
        x = _operand(square.x, value)
        if x is None or value.dtype not in _TAKEN:
            return Unlike(shown, f"the result is {value.dtype} and the input {whole.meta['val'].dtype}")
        if not isinstance(size, int) or times is None:
            return Unlike(shown, f"the size of the last dimension is the symbol {size}")
        gamma = None if weight.node is None else vector(weight.node, size, value.dtype)
        if gamma is None and weight.node is not None:
            given = weight.node.meta["val"]
            return Unlike(
                shown,
                f"the weight is {given.dtype}{list(given.shape)}; the operator takes a {value.dtype} vector of {size}",
                lines="weight = weight.to(x.dtype)   # once, when the model is made"
                if given.dtype != value.dtype
                else "",
            )
        inputs = (x,) if gamma is None else (x, gamma)
        return _proposal(node, divisor, times, parts.scale, inputs, from_one=weight.from_one)


FORM = _RmsNorm()
