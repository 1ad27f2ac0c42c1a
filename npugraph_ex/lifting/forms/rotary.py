"""Rotary position embedding => `npu_rotary_mul`.

::

    y = x * cos + turned(x) * sin

``turned`` is ``cat(-second_half, first_half)`` of the last dimension, or each pair ``(a, b)`` of it as ``(-b, a)``. What is written
part by part, with tables of half the width, is read by `_parted_rotary.py`. The operator
takes cosines and sines of the dtype of ``x``, and a last dimension that is even and at most 896 (operator documentation of
``torch_npu.npu_rotary_mul``). It turns pairs by tables that have one of the dimensions of ``x`` before the last. Where cosines
and sines are in a wider dtype, ``x`` is cast to it and the result back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._parted_rotary import RotaryTables, RotaryTerm, parted_rotary, rotary_terms, signed
from npugraph_ex.lifting.forms.swiglu import SYMBOLIC
from npugraph_ex.lifting.parts import cut_by_a_symbol, part_of
from npugraph_ex.lifting.proposal import Build, Change, Emit, Proposal, Unlike
from npugraph_ex.operators.npu_rotary_mul import along_one_dimension

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 896
_RANKS = (3, 4)
_CAST = _aten._to_copy.default  # noqa: SLF001 - the operator's name
_COMPLEX = (
    "a product of complex numbers is one kernel, as the operator is, which also needs tables of cosines and sines; "
    "rounded to the dtype of x, these tables are farther from float64"
)
_PAIRS = "y = x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin"
_MATRICES = "each pair is multiplied by a matrix of its own, which nothing says is a rotation; the operator has cosines and sines"


@dataclass(frozen=True)
class _Turned:
    """``sign`` times ``x`` turned by a quarter."""

    sign: float
    x: fx.Node
    mode: str


def _turned(node: fx.Node) -> _Turned | str | None:
    """What ``node`` is, if it turns something by a quarter; a reason where it nearly does."""
    node = terms.core(node)
    joined = terms.calls(node, _aten.cat.default)
    stacked = next((one for one in terms.reshaped_from(node) if terms.calls(one, _aten.stack.default)), None)
    if not joined and stacked is None:
        return None
    joint = node if stacked is None else stacked
    given = terms.arguments(joint)
    parts, value = given["tensors"], terms.tensor(joint)
    if value is None or len(parts) != 2:
        return None
    behind = value.dim() - 1 - given.get("dim", 0) % value.dim()
    if behind > (joint is stacked):  # stacked in front of the last dimension, they are halves
        return None
    (sign, negated), (other_sign, other) = map(signed, parts)
    first, second = part_of(terms.core(negated)), part_of(terms.core(other))
    if first is None or second is None or sign == other_sign:
        return SYMBOLIC if sign != other_sign and cut_by_a_symbol(negated, other) else None
    if terms.core(first[0]) is not terms.core(second[0]):
        return "the two parts are of different tensors"
    found = _mode(second[0], first[1:], second[1:], stacked=joint is stacked and not behind, whole=node)
    return found if isinstance(found, str) else _Turned(other_sign, *found)


def _mode(
    x: fx.Node, first: tuple[int, int, int], second: tuple[int, int, int], *, stacked: bool, whole: fx.Node
) -> tuple[fx.Node, str] | str:
    """The name of the turn by where its parts lie in the last dimension."""
    value, result = terms.tensor(x), terms.tensor(whole)
    if value is None or result is None or not same_numbers(value.shape, result.shape):
        return "the turned tensor has another shape"
    size = value.shape[-1]
    if not stacked and first == (size // 2, size, 1) and second == (0, size // 2, 1):
        return x, "half"
    if stacked and first == (1, size, 2) and second == (0, size, 2):
        return x, "interleave"
    return f"the parts are the elements {slice(*first)} and {slice(*second)} of {size}, neither halves nor pairs"


def _turned_as_complex(node: fx.Node) -> Unlike | None:
    """Why an embedding by complex numbers stays, where ``node`` is one."""
    pairs = next((one for one in terms.reshaped_from(node) if terms.calls(one, _aten.view_as_real.default)), None)
    product = pairs and pairs.args[0]
    if not terms.calls(product, _aten.mul.Tensor):
        return None
    of_pairs = any(terms.calls(one, _aten.view_as_complex.default) for one in product.args)
    return Unlike(product, _COMPLEX) if of_pairs else None


def _column_of(node: fx.Node) -> tuple[fx.Node, Any] | None:
    """``(x, place)`` where ``node`` is one place of the last dimension of x, of two dimensions or more."""
    inner = terms.core(node)
    if not terms.calls(inner, _aten.select.int):
        return None
    x, dim, place = inner.args
    value = terms.tensor(x)
    found = isinstance(x, fx.Node) and value is not None and value.dim() > 1 and terms.is_last(dim, x)
    return (x, place) if found else None  # type: ignore[return-value]


def _by_matrices(node: fx.Node) -> Unlike | None:
    """Why an embedding stays that multiplies each pair by a matrix of two rows and two columns, as Flux has it."""
    total = next((one for one in terms.reshaped_from(node) if terms.calls(one, *terms.ADDING)), None)
    both = None if total is None else terms.summands(total)
    columns = [list(filter(None, map(_column_of, terms.product(product).factors))) for product in both or ()]
    if total is None or [len(cuts) for cuts in columns] != [2, 2]:
        return None
    sources = [{x for x, _ in cuts} for cuts in columns]
    places = sorted(str([place for _, place in cuts]) for cuts in columns)
    shapes = sorted(str([*x.meta["val"].shape[-2:]]) for x in sources[0])
    wanted = sources[0] == sources[1] and places == ["[0, 0]", "[1, 1]"] and shapes == ["[1, 2]", "[2, 2]"]
    return Unlike(total, _MATRICES, lines=_PAIRS) if wanted else None


@dataclass(frozen=True)
class _Swapped:
    """``x`` with its halves, or the two of each pair, in each other's place, times ``sign`` and the tensors ``signs``."""

    x: fx.Node
    mode: str
    signs: tuple[fx.Node, ...] = ()
    sign: float = 1.0


def _swapped(node: fx.Node) -> _Swapped | None:
    """What ``node`` is, if it only exchanges parts of a last dimension: by a flip, by a roll, or by their names."""
    sign, node = signed(node)
    if sign < 0:
        found = _swapped(node)
        return found and replace(found, sign=-found.sign)
    node = terms.core(node)
    if terms.calls(node, _aten.mul.Tensor) and all(isinstance(one, fx.Node) for one in node.args):
        for one, other in (node.args, node.args[::-1]):
            found = _swapped(one)  # type: ignore[arg-type]
            if found is not None:
                return replace(found, signs=(*found.signs, other))  # type: ignore[arg-type]
        return None
    if terms.calls(node, *terms.RESHAPES):
        return _swapped(node.args[0])  # type: ignore[arg-type]
    return _flipped(node) if terms.calls(node, _aten.flip.default) else _exchanged(node)


def _exchanged(node: fx.Node) -> _Swapped | None:
    """The halves of x, by a roll or a concatenation."""
    value = terms.tensor(node)
    size = None if value is None or not value.dim() else value.shape[-1]
    if not isinstance(size, int) or size % 2:
        return None
    if terms.calls(node, _aten.roll.default):
        given = terms.arguments(node)
        by_half = [one % size for one in given["shifts"] if isinstance(one, int)] == [size // 2]
        dims = given.get("dims", ())
        last = len(dims) == 1 and terms.is_last(dims[0], node)
        return _Swapped(given["self"], "half") if by_half and last else None
    given = terms.arguments(node) if terms.calls(node, _aten.cat.default) else {}
    parts = [part_of(terms.core(one)) for one in given.get("tensors", ())]
    if [part and part[1:] for part in parts] != [(size // 2, size, 1), (0, size // 2, 1)]:
        return None
    (first, *_), (second, *_) = filter(None, parts)
    last = terms.is_last(given.get("dim", 0), node)
    return _Swapped(first, "half") if last and terms.core(first) is terms.core(second) else None


def _flipped(node: fx.Node) -> _Swapped | None:
    """The last dimension of x was cut in two, or into pairs, and these are turned round."""
    value, dims = node.meta["val"], node.args[1]
    places = [dim % value.dim() for dim in dims]  # type: ignore[union-attr]
    if value.dim() < 2 or len(places) != 1 or places[0] < value.dim() - 2 or value.shape[places[0]] != 2:
        return None
    wanted = (*value.shape[:-2], value.shape[-2] * value.shape[-1])
    sources = ((one, terms.tensor(one)) for one in terms.reshaped_from(node.args[0]))  # type: ignore[arg-type]
    x = next((one for one, whole in sources if whole is not None and same_numbers(whole.shape, wanted)), None)
    return None if x is None else _Swapped(x, "half" if places[0] == value.dim() - 2 else "interleave")


def _turned_by(x: torch.Tensor, mode: str) -> torch.Tensor:
    """``x`` turned by a quarter, as the lines of a near-miss do it."""
    if mode == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _signed_elsewhere(node: fx.Node, swapped: _Swapped, cosine: fx.Node, sine: fx.Node, sign: float) -> Unlike:
    """Why parts that only change places stay: the signs are in a tensor, or in the sines. ``sign`` is that of their product."""
    half, halves = node.meta["val"].shape[-1] // 2, swapped.mode == "half"
    one, other = ("-", "") if sign > 0 else ("", "-")

    def program(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return (x * cos + _turned_by(x, swapped.mode) * sin).to(node.meta["val"].dtype)

    lines = _PAIRS
    signs = f"sin = torch.stack(({one}sin[..., ::2], {other}sin[..., 1::2]), dim=-1).flatten(-2)"
    if halves:
        lines = "first, second = x.chunk(2, dim=-1)\ny = x * cos + torch.cat((-second, first), dim=-1) * sin"
        signs = f"sin = torch.cat(({one}sin[..., :{half}], {other}sin[..., {half}:]), dim=-1)"
    what, where = ("halves", "half") if halves else ("elements of each pair", "element")
    mend = f"give the sign to the {where} of x{', if the signs are -1 and 1' if swapped.signs else ''}"
    if not swapped.signs:
        lines = f"{signs}   # once, before the layers: without its signs\n{lines}"
    operands = (*map(terms.core, (swapped.x, cosine, sine)), *swapped.signs)
    change = Change(Proposal(operands, (node,), ()), "the turned x", program, mend, lines)
    there = "which a tensor has" if swapped.signs else "which is in the sines"
    return Unlike(terms.core(node), f"the {what} change places without a sign, {there}", change)


def _other_factor(term: RotaryTerm, of: fx.Node) -> fx.Node | None:
    """``y`` where the term is ``of * y``."""
    pairs = term.pairs()
    return next((other for one, other in pairs if term.sign > 0 and terms.core(one) is terms.core(of)), None)


def _of_dtype(x: fx.Node, cosine: fx.Node, sine: fx.Node, *, dtype: torch.dtype) -> tuple[fx.Node, ...] | None:
    """All three in this dtype; None where one is not."""
    found = [terms.of_dtype(operand, dtype) for operand in (x, cosine, sine)]
    return tuple(operand for operand in found if operand is not None) if None not in found else None


def _widened(x: fx.Node, cosine: fx.Node, sine: fx.Node, *, dtype: torch.dtype) -> tuple[fx.Node, ...] | None:
    """Cosines and sines in the wider dtype that the sum is computed in, and x before it is cast to it."""
    factors = _of_dtype(cosine, cosine, sine, dtype=dtype)
    return None if factors is None else (terms.core(x), *factors[1:])


def _doubled(emit: Emit, table: fx.Node, mode: str) -> fx.Node:
    """A table of half the width, for both parts."""
    both = emit(_aten.stack.default, [table, table], -2 if mode == "half" else -1)
    *lead, width = (size if isinstance(size, int) else -1 for size in table.meta["val"].shape)
    return emit(_aten.view.default, both, [*lead, 2 * width])


def _build(mode: str, dtype: torch.dtype, *, turned: bool, given: RotaryTables) -> Build:
    """The operator on tensors of four dimensions; ``turned``: heads and positions change places around it.

    It computes in the dtype of the cosines; the result gets ``dtype``.
    """

    def cast(emit: Emit, operand: fx.Node, to: torch.dtype) -> fx.Node:
        return operand if operand.meta["val"].dtype == to else emit(_CAST, operand, dtype=to)

    def build(emit: Emit, x: fx.Node, *factors: fx.Node) -> tuple[fx.Node, ...]:
        tables = factors if given.cut is None else [emit(_aten.slice.Tensor, one, -1, *given.cut) for one in factors]
        tables = [_doubled(emit, one, mode) for one in tables] if given.doubled else tables
        operands = (cast(emit, x, factors[0].meta["val"].dtype), *tables)
        rank = x.meta["val"].dim()
        made = []
        for operand in operands:
            for _ in range(4 - operand.meta["val"].dim()):
                operand = emit(_aten.unsqueeze.default, operand, 0)  # noqa: PLW2901 - step by step
            made.append(emit(_aten.transpose.int, operand, 1, 2) if turned else operand)
        result = emit(torch.ops.npu.npu_rotary_mul.default, *made, *([] if mode == "half" else [mode]))
        result = cast(emit, emit(_aten.transpose.int, result, 1, 2) if turned else result, dtype)
        return (emit(_aten.squeeze.dim, result, 0) if rank < 4 else result,)

    return build


def _unfit(x: torch.Tensor, factor: Sequence[Any]) -> str | None:
    """Why cosines or sines of this shape do not fit."""
    if not factor or len(factor) > x.dim() or not terms.same_size(factor[-1], x.shape[-1]):
        return f"cosines or sines are {list(factor)} and x {list(x.shape)}"
    pairs = zip(reversed(factor), reversed(x.shape), strict=False)
    if not all(terms.same_size(size, 1) or terms.same_size(size, whole) for size, whole in pairs):
        return f"cosines or sines of {list(factor)} do not broadcast to x, {list(x.shape)}"
    return None


class _Rotary:
    """The form."""

    name = "lift_rotary"
    ends_with = frozenset(
        {
            *(*terms.ADDING, _aten.cat.default, _aten.slice_scatter.default),
            *(_aten.view.default, _aten.reshape.default, _CAST),
        }
    )

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The embedding that ends with ``node``."""
        total = terms.core(node)
        parted = parted_rotary(node)
        if parted is not None:
            mode = _mode(parted.x, parted.second, parted.first, stacked=parted.stacked, whole=node)
            if isinstance(mode, str):
                return Unlike(total, mode)
            return _proposal(node, parted.total, mode, parted.tables)
        both = rotary_terms(total)
        for plain, other in (both, both[::-1]) if both else ():
            for factor, sine in other.pairs():
                found = _turned(factor)
                if found is not None:
                    return (
                        Unlike(total, found)
                        if isinstance(found, str)
                        else _embedding(node, plain, found, other.sign, sine)
                    )
                swapped = _swapped(factor)
                cosine = None if swapped is None else _other_factor(plain, swapped.x)
                if swapped is not None and cosine is not None:
                    return _signed_elsewhere(node, swapped, cosine, sine, other.sign * swapped.sign)
        return _turned_as_complex(node) or _by_matrices(node)


def _four(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The shape as the operator gets it."""
    return (1,) * (4 - len(shape)) + tuple(shape)


def _embedding(node: fx.Node, plain: RotaryTerm, turned: _Turned, sign: float, sine: fx.Node) -> Proposal | Unlike:
    """The sum of ``plain`` and of ``sign`` times what is turned and the sine."""
    total = terms.core(node)
    cosine = _other_factor(plain, turned.x)
    if cosine is None:
        return Unlike(total, f"the other term is no product with {turned.x.name}, which is turned in this one")
    if sign * turned.sign < 0:
        return Unlike(total, "the first of the two parts is not the negated one")
    return _proposal(node, total, (turned.x, turned.mode), RotaryTables(cosine, sine))


def _proposal(node: fx.Node, total: fx.Node, turned: tuple[fx.Node, str], tables: RotaryTables) -> Proposal | Unlike:
    """``turned`` in its mode, by cosines and sines. The sum is computed in ``total``."""
    value, wide, cosine, sine = node.meta["val"], total.meta["val"].dtype, tables.cosine, tables.sine
    operands = _of_dtype(turned[0], cosine, sine, dtype=value.dtype) or _widened(turned[0], cosine, sine, dtype=wide)
    if operands is None or value.dtype not in _TAKEN or wide not in _TAKEN:
        dtypes = ", ".join(str(operand.meta["val"].dtype) for operand in (turned[0], cosine, sine))
        reason = f"x, cosines and sines are {dtypes}; the operator takes {value.dtype} for all three"
        return Unlike(total, reason, lines="cos, sin = cos.to(x.dtype), sin.to(x.dtype)   # once, before the layers")
    x, *factors = (operand.meta["val"] for operand in operands)
    size = x.shape[-1]
    if x.dim() not in _RANKS or not isinstance(size, int) or size % 2 or size > _WIDEST:
        return Unlike(
            total, f"x is {list(x.shape)}; the operator takes 4 dimensions, the last even and up to {_WIDEST}"
        )
    cosines, sines = ([*one.shape[:-1], *map(tables.width, one.shape[-1:])] for one in factors)
    unfit = _unfit(x, cosines) or _unfit(x, sines)
    if (
        unfit is None
        and turned[1] == "interleave"
        and not along_one_dimension(_four(x.shape), _four(cosines), terms.same_size)
    ):
        unfit = f"pairs of {list(x.shape)} are turned by {cosines}; the operator takes tables along one dimension"
    if unfit is None and tables.doubled and sum(not isinstance(one, int) for one in cosines) > 1:
        unfit = f"cosines are {cosines}, of several symbols"
    if unfit is not None:
        return Unlike(total, unfit)
    builds = tuple(_build(turned[1], value.dtype, turned=around, given=tables) for around in (False, True))
    return Proposal(operands, (node,), builds)


FORM = _Rotary()
