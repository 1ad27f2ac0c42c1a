"""Reads the logarithm of each row's softmax at one class, as programs choose it by `gather`.

::

    log_softmax(x)[target]
    x[target] - logsumexp(x)         where a logit of another class is infinite, this is so, too, and the operator gives NaN
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Unlike

_aten = torch.ops.aten
LOG_SOFTMAX = _aten._log_softmax.default  # noqa: SLF001 - the operator's name
INSTEAD = 'loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")'


@dataclass(frozen=True)
class ChosenLogarithm:
    """``sign`` times the logarithms, one a row of ``x``; ``target`` has the classes, with a last dimension of one element."""

    x: fx.Node
    target: fx.Node
    sign: int = 1


def chosen_logarithm(node: fx.Node) -> ChosenLogarithm | Unlike | None:
    """What ``node`` is, if it is a view of such logarithms, or of what is minus them."""
    sign = 1
    inner = terms.core(node)
    while True:
        minus = minus_of(inner)
        viewed = inner.args[0] if minus is None and _keeps_elements(inner) else minus
        if not isinstance(viewed, fx.Node):
            break
        sign, inner = (-sign if minus is not None else sign), terms.core(viewed)
    found = _gathered(inner) or _weighed(inner) or _difference(inner)
    return replace(found, sign=sign) if isinstance(found, ChosenLogarithm) else found


def minus_of(node: fx.Node) -> fx.Node | None:
    """``x`` where ``node`` is ``-x``."""
    negative = terms.calls(node, _aten.mul.Tensor) and terms.number(node.args[1]) == -1.0
    return node.args[0] if negative or terms.calls(node, _aten.neg.default) else None  # type: ignore[return-value]


def _keeps_elements(node: fx.Node) -> bool:
    """Whether it is a view with the same elements in the same order."""
    if terms.calls(node, *terms.RESHAPES):
        return True
    if not terms.calls(node, _aten.select.int):
        return False
    given = terms.arguments(node)
    return terms.same_size(given["self"].meta["val"].shape[given["dim"]], 1)


def _viewed(node: object) -> Iterator[fx.Node]:
    """The node and what it is a view of, with the same elements in the same order."""
    while isinstance(node, fx.Node):
        node = terms.core(node)
        yield node
        node = node.args[0] if _keeps_elements(node) else None


def _gathered(node: fx.Node) -> ChosenLogarithm | Unlike | None:
    """One class of each row of a logarithm of a softmax."""
    if terms.calls(node, _aten.index.Tensor):
        softmax, indices = node.args
        of_each = terms.calls(terms.core(softmax), LOG_SOFTMAX) and len(indices) == softmax.meta["val"].dim()  # type: ignore[arg-type,union-attr]
        reason = "the class of each row is chosen by indices of rows, too; it is read where gather chooses it"
        return Unlike(node, reason, lines=INSTEAD) if of_each and None not in indices else None  # type: ignore[operator]
    picked = _picked(node)
    if picked is None:
        return None
    source = terms.core(picked.x)
    if terms.calls(source, _aten.log.default) and terms.calls(
        terms.core(source.args[0]),  # type: ignore[arg-type]
        _aten._softmax.default,  # noqa: SLF001 - the operator's name
    ):
        return Unlike(node, f"the loss is of {source.name}, which is no logarithm of a softmax", lines=INSTEAD)
    if not terms.calls(source, LOG_SOFTMAX):
        return None
    if not terms.is_last(source.args[1], source):
        return Unlike(node, "the softmax is not over the last dimension")
    return replace(picked, x=source.args[0])  # type: ignore[arg-type]


def _picked(node: fx.Node) -> ChosenLogarithm | None:
    """One element of each row of ``x``."""
    if not terms.calls(node, _aten.gather.default):
        return None
    given = terms.arguments(node)
    x, index = given["self"], given["index"]
    values, places = terms.tensor(x), terms.tensor(index)
    if values is None or places is None or not values.dim() or not terms.is_last(given["dim"], x):
        return None
    one_of_each = same_numbers(places.shape, (*values.shape[:-1], 1))
    return ChosenLogarithm(x, index) if one_of_each else None


def _difference(node: fx.Node) -> Unlike | None:
    """Why an element of each row without the logarithm of the row's sum of exponentials, or the other way round, stays."""
    if not terms.calls(node, _aten.sub.Tensor) or node.kwargs:
        return None
    for total, other in (node.args, node.args[::-1]):
        sums = next((one for one in _viewed(total) if terms.calls(one, _aten.logsumexp.default)), None)
        picked = next(filter(None, map(_picked, _viewed(other))), None)
        if sums is not None and picked is not None and terms.core(sums.args[0]) is terms.core(picked.x):  # type: ignore[arg-type]
            reason = "where a logit is infinite this difference is infinite, and the operator gives NaN"
            return Unlike(node, reason, lines=INSTEAD)
    return None


def _weighed(node: fx.Node) -> Unlike | None:
    """Why a sum over the logarithms of all classes, each with a weight, stays."""
    if not terms.calls(node, _aten.sum.dim_IntList):
        return None
    given = terms.arguments(node)
    product, dims = terms.core(given["self"]), [*(given.get("dim") or ())]
    if not terms.calls(product, _aten.mul.Tensor) or len(dims) != 1 or not terms.is_last(dims[0], product):
        return None
    for one, other in (product.args, product.args[::-1]):
        if isinstance(one, fx.Node) and isinstance(other, fx.Node) and terms.calls(terms.core(one), LOG_SOFTMAX):
            reason = f"each class has a weight of its own, {other.name}; the operator takes the number of a class"
            return Unlike(node, reason, lines=INSTEAD if _is_one_hot(other) else "")
    return None


def _is_one_hot(node: fx.Node) -> bool:
    while terms.calls(node, _aten._to_copy.default):  # noqa: SLF001 - the operator's name
        node = node.args[0]  # type: ignore[assignment]
    return terms.calls(node, _aten.one_hot.default)
