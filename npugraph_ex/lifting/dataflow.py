"""Along which axes operators mix elements: each ATen operator says it, those in the formulas of npu operators too.

The graph runs on tensors without values. Each operator that is dispatched tells which axes its results have, and which it mixes:

====================================  ==================================================================
element by element                    operands have the axes of the result
reshapes, permutations, expansions    the axes go along
along dimensions                      mixes those, as a softmax, a sum, a sort or a slice does
concatenations, splits                the axes of the parts follow each other
products of matrices                  mix what is summed over; rows, columns and batches go along
choices by an index                   rows go along; numbers that were computed mix what they count
anything else                         mixes all axes of its operands and results
====================================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from npugraph_ex import _torch_private
from npugraph_ex.graph.operators import named_arguments
from npugraph_ex.lifting.axes import Axis, address, cut, follow, mix, regrouped, same
from npugraph_ex.operators import PreparedGraph

Axes = tuple[Axis, ...]

_META = torch.device("meta")
_ELEMENTWISE = frozenset({"_to_copy", "copy", "fill", "zero", "masked_fill", "alias", "detach", "lift_fresh"})
"""Besides those that torch tags as such."""
_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias", "flatten"})
_ALONG = frozenset(
    {
        *("sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "var", "std", "var_mean", "logsumexp"),
        *(
            "_softmax",
            "_safe_softmax",
            "_log_softmax",
            "cumsum",
            "cumprod",
            "sort",
            "topk",
            "argmax",
            "argmin",
            "linalg_vector_norm",
        ),
        *("slice", "select", "split", "unbind", "flip"),
    }
)
"""Operators of one tensor that work along the dimensions in the argument ``dim``, or along all without one."""
_UNIFORM = frozenset(
    {
        *("full", "ones", "zeros", "empty", "scalar_tensor", "empty_strided"),
        *("new_full", "new_ones", "new_zeros", "new_empty"),
    }
)
_LIKE = frozenset({"ones_like", "zeros_like", "full_like", "empty_like"})


_BY_NUMBERS = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


class Dataflow(TorchDispatchMode):
    """Runs graphs without values, and knows the axes of each tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[torch.Tensor, Axes]] = {}  # the tensors too, so that no id comes twice

    def input(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with axes of its own."""
        value = torch.empty(tuple(shape), dtype=dtype, device=_META)
        self._learn(value, tuple(map(Axis, shape)))
        return value

    def run(self, graph: fx.Graph, inputs: Sequence[Any]) -> Any:
        """The graph's results for these inputs.

        Raises:
            Exception: whatever an operator raises that needs values.
        """
        with _META, self:
            return PreparedGraph(graph).run(*inputs)

    def axes(self, value: torch.Tensor) -> Axes:
        """Those of each dimension."""
        if id(value) not in self._known:  # it comes from outside, such as a number as a tensor
            self._learn(value, tuple(map(_mixed, value.shape)))
        return self._known[id(value)][1]

    def _learn(self, value: torch.Tensor, axes: Axes) -> None:
        self._known[id(value)] = value, axes

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator, and tell the axes of its results."""
        del types
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        if func.overloadpacket in _BY_NUMBERS:
            args = (args[0], [*map(_numbers, args[1])], *args[2:])
        result = func(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        call = _Dispatched(self, func, named_arguments(func, args, kwargs), given, made)
        found = call.axes()
        if found is None or any(
            [axis.size for axis in axes] != [*value.shape] for axes, value in zip(found, made, strict=True)
        ):
            mix(*(axis for value in given for axis in self.axes(value)))
            found = [tuple(map(_mixed, value.shape)) for value in made]
        for value, axes in zip(made, found, strict=True):
            if not any(value is one for one in given):  # what is written in place keeps its axes
                self._learn(value, axes)
        return result


def _numbers(index: torch.Tensor | None) -> torch.Tensor | None:
    """The places of the truth values that are true, which may be any, as numbers."""
    if index is None or index.dtype != torch.bool or index.dim() != 1:
        return index
    return torch.empty(index.shape, dtype=torch.int64, device=_META)


def _mixed(size: int) -> Axis:
    return Axis(size, mixed=True)


class _Dispatched:
    """One call of an operator: its arguments by name, the tensors among them, and its results."""

    def __init__(
        self, flow: Dataflow, func: OpOverload, named: Mapping[str, Any], given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:  # fmt: skip
        self.flow, self.func, self.named, self.given, self.made = flow, func, named, given, made
        self.name = _torch_private.schema(func).name.split("::")[1].removesuffix("_")

    def axes(self) -> list[Axes] | None:
        """The axes of each result; None where the operator is not known."""
        if torch.Tag.pointwise in self.func.tags or self.name in _ELEMENTWISE:
            return self.elementwise()
        for names, rule in _RULES:
            if self.name in names:
                return rule(self)
        return None

    def of(self, name: str) -> Axes:
        """The axes of an argument."""
        return self.flow.axes(self.named[name])

    def elementwise(self) -> list[Axes] | None:
        """Dimensions of one size are the same, counted from the last; those of size 1 are repeated."""
        found = []
        for value in self.made:
            axes = [Axis(size) for size in value.shape]
            for operand in map(self.flow.axes, self.given):
                if len(operand) > len(axes):
                    return None
                for axis, own in zip(axes[len(axes) - len(operand) :], operand, strict=True):
                    if own.size != 1:
                        same(axis, own)
            found.append(tuple(axes))
        return found

    def reshaped(self) -> list[Axes] | None:
        taken = regrouped(self.flow.axes(self.given[0]), self.made[0].shape)
        return None if taken is None else [tuple(taken)]

    def permuted(self) -> list[Axes] | None:
        axes = [*self.of("self")]
        if self.name == "permute":
            return [tuple(axes[dim] for dim in self.named["dims"])]
        if len(axes) > 1:
            first, second = (0, 1) if self.name == "t" else (self.named["dim0"], self.named["dim1"])
            axes[first], axes[second] = axes[second], axes[first]
        return [tuple(axes)]

    def along(self) -> list[Axes] | None:
        axes = self.of("self")
        dims = self.named.get("dim", self.named.get("dims", self._default("dim")))
        if isinstance(dims, (list, tuple)) and not dims:
            dims = None
        chosen = range(len(axes)) if dims is None else [dims] if isinstance(dims, int) else dims
        along = {dim % max(len(axes), 1) for dim in chosen}
        mix(*(axis for dim, axis in enumerate(axes) if dim in along))
        found = []
        for value in self.made:
            keeps = value.dim() == len(axes)
            found.append(
                tuple(
                    _mixed(value.shape[dim]) if dim in along else axis
                    for dim, axis in enumerate(axes)
                    if keeps or dim not in along
                )
            )
        return found

    def _default(self, name: str) -> Any:
        return next((one.default_value for one in _torch_private.schema(self.func).arguments if one.name == name), None)

    def expanded(self) -> list[Axes]:
        shape, own = self.made[0].shape, self.of("self")
        new = len(shape) - len(own)
        return [
            tuple(
                own[dim - new] if dim >= new and own[dim - new].size == size else Axis(size)
                for dim, size in enumerate(shape)
            )
        ]

    def joined(self) -> list[Axes]:
        tensors = [one for one in self.named["tensors"] if one.shape != (0,)]
        dim = self.named.get("dim", 0) % self.made[0].dim()
        operands = [self.flow.axes(one) for one in tensors]
        if self.name == "stack":
            operands = [(*axes[:dim], _mixed(1), *axes[dim:]) for axes in operands]
        for other in operands[1:]:
            for at, (left, right) in enumerate(zip(operands[0], other, strict=True)):
                if at != dim:
                    same(left, right)
        along = follow([axes[dim] for axes in operands])
        return [tuple(along if at == dim else axis for at, axis in enumerate(operands[0]))]

    def split(self) -> list[Axes]:
        axes = self.of("self")
        dim = self.named.get("dim", 0) % len(axes)
        parts = cut(axes[dim], self.named["split_sizes"])
        if parts is None:
            return self.along()  # type: ignore[return-value]  # it knows each
        return [tuple(part if at == dim else axis for at, axis in enumerate(axes)) for part in parts]

    def product(self) -> list[Axes]:
        """Of the last two operands; what is added first is repeated where it has one row or no rows."""
        *added, left, right = map(self.flow.axes, self.given)
        for one, other in zip(left[:-2], right[:-2], strict=True):
            same(one, other)
        same(left[-1], right[-2])
        mix(left[-1])
        result = (*left[:-1], right[-1])
        for axes in added:
            for axis, own in zip(result[len(result) - len(axes) :], axes, strict=True):
                if own.size != 1:
                    same(axis, own)
        return [result]

    def normed(self) -> list[Axes]:
        axes = self.of("input")
        last = len(self.named["normalized_shape"])
        mix(*axes[len(axes) - last :])
        for name in ("weight", "bias"):
            if self.named.get(name) is not None:
                mix(*self.of(name))
        statistics = (*axes[: len(axes) - last], *(_mixed(1) for _ in range(last)))
        return [axes, statistics, statistics][: len(self.made)]

    def gathered(self) -> list[Axes]:
        axes, places = self.of("self"), self.of("index")
        dim = self.named["dim"] % max(len(axes), 1)
        for at, (own, place) in enumerate(zip(axes, places, strict=True)):
            if at == dim:
                mix(own, place)
            else:
                same(own, place)
        return [places]

    def written(self) -> list[Axes]:
        """`index_copy`: rows of the source take the place of some of the tensor's."""
        axes, rows, places = self.of("self"), self.of("source"), self.of("index")
        dim = self.named["dim"] % len(axes)
        address(axes[dim], places)
        for at, (own, row) in enumerate(zip(axes, rows, strict=True)):
            same(places[0] if at == dim and places else own, row)
        return [axes]

    def chosen(self) -> list[Axes] | None:
        """Rows by numbers for the first dimensions: `index`, `index_put`, `embedding`."""
        if self.name == "embedding":
            axes, indices = self.of("weight"), [self.named["indices"]]
        else:
            axes, indices = self.of("self"), [one for one in self.named["indices"] if one is not None]
            if self.named["indices"][: len(indices)] != indices:
                return None
        places = self.flow.axes(indices[0])
        for axis, index in zip(axes, indices, strict=False):
            for one, other in zip(places, self.flow.axes(index), strict=True):
                same(one, other)
            address(axis, places)
        rows = (*places, *axes[len(indices) :])
        if self.name != "index_put":
            return [rows]
        values = self.of("values")
        for one, own in zip(rows[len(rows) - len(values) :], values, strict=True):
            if own.size != 1:
                same(one, own)
        return [axes]

    def normed_in_groups(self) -> list[Axes]:
        batch, *others = axes = self.of("input")
        mix(
            *others,
            *(axis for name in ("weight", "bias") if self.named.get(name) is not None for axis in self.of(name)),
        )
        statistics = (batch, *(_mixed(size) for size in self.made[1].shape[1:]))
        return [axes, statistics, statistics]

    def uniform(self) -> list[Axes]:
        return [tuple(map(Axis, value.shape)) for value in self.made]

    def counted(self) -> list[Axes]:
        return [tuple(map(_mixed, value.shape)) for value in self.made]

    def like(self) -> list[Axes]:
        return [self.flow.axes(self.given[0])]


_RULES: tuple[tuple[frozenset[str], Callable[[_Dispatched], list[Axes] | None]], ...] = (
    (_RESHAPES, _Dispatched.reshaped),
    (frozenset({"permute", "transpose", "t"}), _Dispatched.permuted),
    (_ALONG, _Dispatched.along),
    (frozenset({"expand"}), _Dispatched.expanded),
    (frozenset({"cat", "stack"}), _Dispatched.joined),
    (frozenset({"split_with_sizes"}), _Dispatched.split),
    (frozenset({"mm", "bmm", "addmm", "baddbmm", "_int_mm"}), _Dispatched.product),
    (frozenset({"native_layer_norm"}), _Dispatched.normed),
    (frozenset({"native_group_norm"}), _Dispatched.normed_in_groups),
    (frozenset({"gather"}), _Dispatched.gathered),
    (frozenset({"index_copy"}), _Dispatched.written),
    (frozenset({"index", "index_put", "embedding"}), _Dispatched.chosen),
    (_UNIFORM, _Dispatched.uniform),
    (frozenset({"arange", "eye"}), _Dispatched.counted),
    (_LIKE, _Dispatched.like),
)
