"""Reads arithmetic in normal form: what a value is over the real numbers, however the program spells it.

A cast between floating-point dtypes changes nothing there, nor does a copy; products have no order; a quotient is a product
with an inverse. What roundings these make is for the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from npugraph_ex.graph.memory.aliases import named_arguments
from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.graph.operators import is_view
from npugraph_ex.lifting.trials import on_real_values, uniform

_aten = torch.ops.aten

_CASTS = frozenset({
    _aten._to_copy.default, torch.ops.prims.convert_element_type.default,  # noqa: SLF001 - the operator's name
    _aten.clone.default, _aten.alias.default, _aten.detach.default,
})  # fmt: skip
_NPU_CASTS = frozenset({"npu._npu_dtype_cast.default", "npu.npu_dtype_cast.default"})
"""By name, because torch_npu defines them."""
_PRODUCTS = frozenset({_aten.mul.Tensor, _aten.mul.Scalar})
_QUOTIENTS = frozenset({_aten.div.Tensor, _aten.div.Scalar})
_SUMS = frozenset({_aten.add.Tensor, _aten.add.Scalar})
_DIFFERENCES = frozenset({_aten.sub.Tensor, _aten.sub.Scalar})
_SUMS_WITH_PRODUCTS = frozenset({_aten.addcmul.default, _aten.addcdiv.default})
MULTIPLYING = _PRODUCTS | _QUOTIENTS | _SUMS_WITH_PRODUCTS
"""What a product may end with, but for a cast."""
ADDING = _SUMS | _DIFFERENCES | _SUMS_WITH_PRODUCTS
"""What a sum may end with, but for a cast."""
_ZEROS = frozenset({_aten.zeros_like.default, _aten.zeros.default, _aten.new_zeros.default})
_FILLED: dict[Any, int] = {
    _aten.scalar_tensor.default: 0, _aten.full.default: 1, _aten.full_like.default: 1, _aten.fill.Scalar: 1,
}  # fmt: skip
"""Operators that give a tensor of one number, and which argument that is."""
RESHAPES = frozenset({
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default,  # noqa: SLF001 - the operator's name
    _aten.unsqueeze.default, _aten.squeeze.dim,
})  # fmt: skip
_SQUARE = 2
_DEEPEST = 6
"""Products in products that are taken apart: the longest spelling of a norm has five."""


def calls(node: object, *targets: OpOverload) -> TypeGuard[fx.Node]:
    """Whether ``node`` calls one of these operators."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of a node that makes one; None for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a call passes, by the names of the operator's schema."""
    return named_arguments(node.target, node.args, node.kwargs)  # type: ignore[arg-type]


def casts(node: fx.Node) -> Iterator[fx.Node]:
    """The node and what it is a copy or a floating-point cast of, on the same device, down to what is neither."""
    yield node
    while (calls(node, *_CASTS) or str(node.target) in _NPU_CASTS) and isinstance(node.args[0], fx.Node):
        new, old = tensor(node), tensor(node.args[0])
        if new is None or old is None or not (new.is_floating_point() and old.is_floating_point()):
            return
        if new.device != old.device:
            return
        node = node.args[0]
        yield node


def core(node: fx.Node) -> fx.Node:
    """What ``node`` is a cast or a copy of."""
    return list(casts(node))[-1]


def of_dtype(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The first of ``casts(node)`` that has this dtype."""
    return next((one for one in casts(node) if one.meta["val"].dtype == dtype), None)


def before_a_cast_back(node: fx.Node) -> fx.Node:
    """What ``node`` casts to a narrower dtype; ``node`` where it does not."""
    new, inner = tensor(node), core(node)
    old = tensor(inner)
    narrows = new is not None and old is not None and new.dtype.itemsize < old.dtype.itemsize
    return inner if narrows else node


def reshaped_from(node: fx.Node) -> Iterator[fx.Node]:
    """The node and what it is a cast or a reshape of: the same elements in the same order."""
    yield node
    while True:
        inner = core(node)
        source = inner.args[0] if calls(inner, *RESHAPES) else None
        if inner is not node:
            yield inner
        if not isinstance(source, fx.Node):
            return
        yield source
        node = source


def same_rows(node: fx.Node) -> Iterator[fx.Node]:
    """The node and what it is a cast or a reshape of, as long as the last dimension stays: the same rows in the same order."""
    while True:
        last = node
        for last in casts(node):
            yield last
        source = last.args[0] if calls(last, *RESHAPES) else None
        if not isinstance(source, fx.Node) or not keeps_rows(last, source):
            return
        node = source


def keeps_rows(new: fx.Node, old: fx.Node) -> bool:
    """Whether the rows of the one are as long as those of the other, which it reshapes."""
    sizes = [tuple(value.shape[-1:]) for value in map(tensor, (new, old)) if value is not None]
    return len(sizes) == 2 and sizes[0] != () and same_numbers(*sizes)


def row_core(node: fx.Node) -> fx.Node:
    """The last one of ``same_rows(node)``."""
    return list(same_rows(node))[-1]


def number(value: object) -> float | None:
    """A plain number; None for anything else, a symbol or a bool too."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def same_number(left: float | None, right: float) -> bool:
    """Whether two numbers are equal but for the roundings of a program that computes them."""
    return left is not None and math.isclose(left, right, rel_tol=1e-12)


@dataclass(frozen=True)
class Product:
    """``scale * product(factors) / product(divisors)``."""

    scale: float
    factors: tuple[fx.Node, ...]
    divisors: tuple[fx.Node, ...] = ()

    @property
    def alone(self) -> fx.Node | None:
        """Its only factor, where it is nothing else."""
        return self.factors[0] if (self.scale, len(self.factors), self.divisors) == (1.0, 1, ()) else None

    def times(self, other: Product) -> Product:
        """The product of the two."""
        return Product(self.scale * other.scale, self.factors + other.factors, self.divisors + other.divisors)

    def inverse(self) -> Product:
        """One divided by it."""
        return Product(1 / self.scale if self.scale else math.nan, self.divisors, self.factors)


def product(
    value: object,
    is_whole: Callable[[fx.Node], bool] = lambda _: False,
    depth: int = _DEEPEST,
    inside: Callable[[fx.Node], fx.Node] = core,
) -> Product:
    """``value`` as a product of nodes that are none themselves.

    Args:
        value: a node, a number, or a product whose factors may be products themselves.
        is_whole: nodes that are not taken apart.
        depth: how many products in products are taken apart.
        inside: what a product is looked for behind: casts, or with ``row_core`` reshapes, too. Then the nodes may be of several
            shapes, and belong to each other as their rows do.
    """
    if isinstance(value, Product):
        whole = Product(value.scale, ())
        for factor in value.factors:
            whole = whole.times(product(factor, is_whole, depth, inside))
        for divisor in value.divisors:
            whole = whole.times(product(divisor, is_whole, depth, inside).inverse())
        return whole
    if not isinstance(value, fx.Node):
        return _factor(value)
    inner = inside(value)
    if not depth or is_whole(value) or is_whole(inner):
        return Product(1.0, (value,))
    outer = outermost(inner)
    return Product(1.0, (value,)) if outer is None else product(outer, is_whole, depth - 1, inside)


def outermost(node: fx.Node) -> Product | None:
    """The product that ``node`` itself computes; None where it computes none."""
    if calls(node, _aten.neg.default):
        return Product(-1.0, node.args)  # type: ignore[arg-type]
    if calls(node, _aten.reciprocal.default):
        return Product(1.0, (), node.args)  # type: ignore[arg-type]
    if calls(node, *_PRODUCTS) or (calls(node, *_QUOTIENTS) and not node.kwargs):
        one, other = map(_factor, node.args[:2])
        return one.times(other.inverse() if calls(node, *_QUOTIENTS) else other)
    summed = summands(node) if calls(node, *_SUMS_WITH_PRODUCTS) else None
    return summed[1] if summed is not None and all(constant(one) == 0 for one in summed[0].factors) else None


def _factor(value: object) -> Product:
    """A node, or a number; of a symbol nothing is known."""
    if isinstance(value, fx.Node):
        return Product(1.0, (value,))
    known = number(value)
    return Product(math.nan if known is None else known, ())


def summands(node: fx.Node) -> tuple[Product, Product] | None:
    """The two products whose sum ``node`` is, as its operator has them; None where it is no sum.

    The factors may be products themselves, which `product` takes apart.
    """
    total = core(node)
    if not calls(total, *_SUMS, *_DIFFERENCES, *_SUMS_WITH_PRODUCTS):
        return None
    first, *others = (_factor(one) for one in total.args[:3])
    given = total.kwargs
    if calls(total, *_SUMS_WITH_PRODUCTS):
        one, other = others
        second = one.times(other.inverse() if calls(total, _aten.addcdiv.default) else other)
        return first, second.times(_factor(given.get("value", 1)))
    sign = -1.0 if calls(total, *_DIFFERENCES) else 1.0
    alpha = total.args[2] if len(total.args) > 2 else given.get("alpha", 1)
    return first, others[0].times(_factor(alpha)).times(Product(sign, ()))


def constant(value: object) -> float | None:
    """A plain number, or that of a tensor that has one number everywhere, in its dtype; None for anything else."""
    made = tensor(value)
    if not isinstance(value, fx.Node) or made is None:
        return number(value)
    with on_real_values():
        if calls(value, *_CASTS) or (is_view(value) and value.args):
            given = constant(value.args[0])
        elif calls(value, *_ZEROS):
            given = 0.0
        elif calls(value, *_FILLED):
            given = number(value.args[_FILLED[value.target]])
        else:
            known = uniform(value)
            given = None if known is None else float(known)
        return None if given is None else float(torch.tensor(given, dtype=torch.float64).to(made.dtype))


def plus_number(node: fx.Node) -> tuple[fx.Node, float] | None:
    """``(x, c)`` where ``node`` is ``x + c`` or ``c + x``; None where it is no such sum."""
    node = core(node)
    if not calls(node, *_SUMS) or node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
        return None
    left, right = node.args
    if isinstance(left, fx.Node) and number(right) is not None:
        return left, float(right)  # type: ignore[arg-type]
    if isinstance(right, fx.Node) and number(left) is not None:
        return right, float(left)  # type: ignore[arg-type]
    return None


def square_of(node: fx.Node) -> fx.Node | None:
    """``x`` where ``node`` is its square, or that of its magnitude."""
    node = core(node)
    if (calls(node, _aten.pow.Tensor_Scalar) and node.args[1] == _SQUARE) or calls(node, _aten.square.default):
        return _signed(node.args[0])  # type: ignore[arg-type]
    if calls(node, _aten.mul.Tensor) and all(isinstance(argument, fx.Node) for argument in node.args):
        left, right = map(_signed, node.args)  # type: ignore[arg-type]
        both_or_none = (left is node.args[0]) == (right is node.args[1])
        return left if core(left) is core(right) and both_or_none else None
    return None


def _signed(node: fx.Node) -> fx.Node:
    """What ``node`` is the magnitude of; ``node`` where it is none. Its square is the same."""
    inner = core(node)
    return inner.args[0] if calls(inner, _aten.abs.default) and not inner.args[0].meta["val"].is_complex() else node  # type: ignore[return-value,union-attr]


def at_least(node: fx.Node) -> tuple[fx.Node, float] | None:
    """``(x, c)`` where ``node`` is the larger one of x and the number c; None where it is no such bound."""
    node = core(node)
    if not calls(node, _aten.clamp_min.default, _aten.clamp.default):
        return None
    given = arguments(node)
    least = number(given["min"])
    return (given["self"], least) if least is not None and given.get("max") is None else None


def is_last(dim: object, of: fx.Node) -> bool:
    """Whether ``dim``, counted from either end, is the last dimension of a node."""
    value = tensor(of)
    return value is not None and dim in {-1, value.dim() - 1}


def same_size(left: object, right: object) -> bool:
    """Whether two sizes are equal for all values of their symbols."""
    return statically_known_true(left == right)


IS_A_SYMBOL = "is a symbol, not a number: dynamic=True makes symbols of a model's numbers, and dynamic=None keeps them"


def is_symbol(number: fx.Node) -> bool:
    """Whether all that it is computed of are inputs such as Dynamo makes of numbers: float64, without dimensions."""
    if number.op == "placeholder":
        value = tensor(number)
        return value is not None and value.dtype == torch.float64 and not value.dim()
    inputs = number.all_input_nodes
    return number.op == "call_function" and (not inputs or all(map(is_symbol, inputs)))
