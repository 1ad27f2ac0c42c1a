"""A softmax that is spelled out => `softmax`, one kernel, which later forms read.

::

    e = exp(x - max(x));   y = e / sum(e)      over one dimension
    y = exp(log_softmax(x))

Where the largest element is infinite or NaN, both give NaN. An exponential of an element as it is may overflow, where that of the
difference does not, so that the quotient is NaN and the softmax a number.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import reductions, terms
from npugraph_ex.lifting.forms._attention_scores import MATMULS
from npugraph_ex.lifting.proposal import Emit, Proposal, Unlike

_aten = torch.ops.aten
_SOFTMAX, _LOG_SOFTMAX = _aten._softmax.default, _aten._log_softmax.default  # noqa: SLF001 - the operators' names
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_AS_IT_IS = (
    "nothing is taken from the exponents: where an exponential overflows this gives NaN, and the softmax a number"
)
_NOT_LARGEST = "what is taken from the exponents is not the largest element of what is added up"
_ADDED = "{} is added to the sum, so that the weights of a row are less than one together"
_BEHIND = "the weights are divided by their sum behind their product with values"


def softmax_of(node: fx.Node) -> tuple[fx.Node, int] | Unlike | None:
    """``(x, dim)`` where ``node`` spells a softmax of x, or casts one; what nearly is one says why not."""
    inner = terms.core(node)
    if terms.calls(inner, _aten.exp.default):
        logarithm = terms.core(inner.args[0])  # type: ignore[arg-type]
        return logarithm.args[:2] if terms.calls(logarithm, _LOG_SOFTMAX) else None  # type: ignore[return-value]
    parts = terms.product(node)
    if (len(parts.factors), len(parts.divisors), parts.scale) != (1, 1, 1.0):
        return None
    added = terms.plus_number(parts.divisors[0])
    weights = terms.core(parts.factors[0])
    total = reductions.over_one_dimension((added or parts.divisors)[0], _aten.sum.dim_IntList)
    exponential = None if total is None else terms.core(total[0])
    if total is None or not terms.calls(exponential, _aten.exp.default):
        return None
    if weights is exponential and added is not None:
        return Unlike(exponential, _ADDED.format(added[1]), lines=f"y = torch.softmax(x, {total[1]})")
    if weights is exponential:
        return _exponents(exponential, total[1])
    behind = terms.calls(weights, *MATMULS) and terms.core(weights.args[0]) is exponential  # type: ignore[arg-type]
    return Unlike(exponential, _BEHIND, lines="weights = torch.softmax(scores, -1)") if behind else None


def _exponents(exponential: fx.Node, dim: int) -> tuple[fx.Node, int] | Unlike:
    """What an exponential is of, but for the largest of the elements that are added up over ``dim``."""
    lines = f"y = torch.softmax(x, {dim})"
    shifted = terms.core(exponential.args[0])  # type: ignore[arg-type]
    if not terms.calls(shifted, _aten.sub.Tensor) or shifted.kwargs:
        return Unlike(exponential, _AS_IT_IS, lines=lines)
    x, taken = shifted.args
    maxima = (_aten.amax.default, _aten.max.dim)
    largest = reductions.over_one_dimension(taken, *maxima) if isinstance(taken, fx.Node) else None
    if largest is None or terms.core(largest[0]) is not terms.core(x) or largest[1] != dim:  # type: ignore[arg-type]
        return Unlike(exponential, _NOT_LARGEST, lines=lines)
    return x, dim  # type: ignore[return-value]


class _SpelledSoftmax:
    """The form."""

    name = "lift_softmax"
    ends_with = frozenset({_aten.exp.default, _aten.div.Tensor, _aten.mul.Tensor, _aten._to_copy.default})  # noqa: SLF001 - its name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The softmax that ends with ``node``, if the result and what it is of have one dtype and shape."""
        found, value = softmax_of(node), terms.tensor(node)
        if found is None or isinstance(found, Unlike) or value is None:
            return found if isinstance(found, Unlike) else None
        x, dim = found
        operand = terms.of_dtype(x, value.dtype)
        if operand is None or value.dtype not in _TAKEN or not same_numbers(operand.meta["val"].shape, value.shape):
            return None

        def build(emit: Emit, given: fx.Node) -> tuple[fx.Node, ...]:
            return (emit(_SOFTMAX, given, dim, False),)  # noqa: FBT003 - the schema's

        # No document says where the device rounds inside its operator.
        return Proposal((operand,), (node,), (build,), sums_rows=True, rounds_elsewhere=True)


FORM = _SpelledSoftmax()
