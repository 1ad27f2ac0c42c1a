"""Decides whether an operator may take the place of a subgraph, by values: eager mode's and its own beside those of float64.

The subgraph runs on the CPU as eager mode rounds it, and in float64; the operator runs by the formula of its record, which
rounds as the device documents. ``judged``: on every kind of input the operator is no farther from float64 than eager mode, in its
worst element and on average, or as near as one rounding of the right value is; and no value is infinite or NaN that is not so in
float64 or in eager mode. ``exact``: every bit is eager mode's, also where both compute in float32 throughout. A result of 16 bits
hides a difference in the last bit of float32 but for one element in thousands.

What was decided is kept: the layers of a model are alike.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.lifting import trials
from npugraph_ex.lifting.proposal import Proposal
from npugraph_ex.lifting.subgraph import Subgraph, sized
from npugraph_ex.operators import FORMATS, PreparedGraph, record_of, ulp

_ONE_ROUNDING = 0.5 + 2.0**-7
"""In ulps: the right value rounded once, from float32."""
_ONE_ROUNDING_ON_AVERAGE = 0.3
"""In ulps: the root mean square of one rounding is 1/sqrt(12)."""
_SUM = 2.0**-22
"""Of the largest element of a row: what float32 cannot tell apart in its sums, two roundings each way."""
_SAME_AVERAGE = 1 + 2.0**-7
"""Two averages over so few elements that differ by less are the same: one element was rounded the other way."""
_UNKNOWN_ORDER = "its sums over rows have no documented order, so no trial can show that every bit is eager mode's"
_ANY_OF_EQUALS = (
    "topk has no documented order among equal elements, so no trial can show that the choice is eager mode's"
)
_MOST_KEPT = 1024


@dataclass(frozen=True)
class Ruling:
    """What was decided.

    Attributes:
        reason: against the operator; empty where it is admitted.
        ulps: its largest distance from float64 on ordinary inputs, in ulps of the result.
        eager_ulps: eager mode's.
    """

    reason: str = ""
    ulps: float = 0.0
    eager_ulps: float = 0.0


_KEPT: OrderedDict[object, Ruling] = OrderedDict()


def judge(proposal: Proposal, subgraph: Subgraph, replacement: fx.Graph, *, exact: bool) -> Ruling:
    """Compare the two on all trials.

    Args:
        proposal: names the sizes that stay.
        subgraph: what is there.
        replacement: what takes its place; its placeholders are the proposal's inputs.
        exact: whether every bit must be eager mode's.
    """
    if exact and proposal.sums_rows:
        return Ruling(_UNKNOWN_ORDER)
    if exact and proposal.ranked is not None:
        return Ruling(_ANY_OF_EQUALS)
    exact = exact or proposal.rounds_alike
    key = (exact, *_signature(proposal, subgraph, replacement))
    if key not in _KEPT:
        with trials.on_real_values():
            _KEPT[key] = _judged(proposal, subgraph, replacement, exact=exact)
        if len(_KEPT) > _MOST_KEPT:
            _KEPT.popitem(last=False)
    return _KEPT[key]


def _signature(proposal: Proposal, subgraph: Subgraph, replacement: fx.Graph) -> tuple[object, ...]:
    """Equal for two proposals on which nothing can differ: operators, arguments, and metadata of the inputs."""
    parts: list[object] = [str(proposal.sizes), str(proposal.assumed)]
    for nodes, given in ((subgraph.nodes, subgraph.inputs), (replacement.nodes, ())):
        number = {node: position for position, node in enumerate((*given, *nodes))}
        parts += [(str(node.target), _numbered(node, number)) for node in nodes]
    for node in subgraph.inputs:
        value, known = node.meta["val"], trials.uniform(node)
        shown = (
            (str(known),)
            if known is not None
            else (
                (value.dtype, str(value.shape), str(value.stride()))
                if isinstance(value, torch.Tensor)
                else (str(value),)
            )
        )
        parts.append(shown)
    return tuple(parts)


def _numbered(node: fx.Node, number: Mapping[fx.Node, int]) -> str:
    """The arguments of a call, with numbers for nodes."""
    return str(fx.map_arg((node.args, node.kwargs), lambda one: f"%{number[one]}"))


def _judged(proposal: Proposal, subgraph: Subgraph, replacement: fx.Graph, *, exact: bool) -> Ruling:
    worst = worst_eager = 0.0
    for at in trials.sizes(subgraph.inputs, proposal.sizes):
        further = [] if proposal.ranked is None else [proposal.ranked]
        further += [] if proposal.assumed is None else [proposal.assumed.scores]
        pair = _Pair(subgraph.alone(at.of, *further), sized(replacement, at.of), proposal)
        for kind, inputs in trials.drawn(subgraph.inputs, at, few=proposal.rounds_alike, places=proposal.places):
            try:
                found = list(pair.compared(inputs, exact=exact, measured=kind.startswith("ordinary")))
            except Exception as error:  # noqa: BLE001 - whatever cannot be judged is not admitted
                message = str(error).strip().split("\n")[0]
                return Ruling(f"it cannot be judged: with {kind}, {type(error).__name__}: {message}")
            for one in found:
                if one.reason:
                    return Ruling(f"with {kind}, {one.reason}", one.worst, one.worst_eager)
                worst, worst_eager = max(worst, one.worst), max(worst_eager, one.worst_eager)
        if exact and not proposal.rounds_alike:
            different = pair.in_float32(trials.ordinary(subgraph.inputs, at, proposal.places))
            if different:
                return Ruling(different)
    return Ruling("", worst, worst_eager)


@dataclass(frozen=True)
class _Compared:
    """One result of the operator beside eager mode's: a reason against it, and both distances where they were measured."""

    reason: str = ""
    worst: float = 0.0
    worst_eager: float = 0.0


@dataclass(frozen=True)
class _Pair:
    """A spelling, and the operator in its place."""

    spelled: fx.Graph
    operator: fx.Graph
    proposal: Proposal

    def compared(self, inputs: Sequence[Any], *, exact: bool, measured: bool) -> Iterator[_Compared]:
        """Each result; distances where bits differ, or where they are ``measured`` in any case."""
        lifted, eager, compared = self._run(inputs)
        if exact:
            yield from map(_Compared, map(_different_bits, lifted, eager))
        if measured or not (exact or all(map(_same_bits, lifted, eager))):
            truth = list(self._in_float64.run(*_cast(inputs, torch.float64)))
            if compared is not None:
                truth = [value.where(compared, 0.0) for value in truth[: len(lifted)]]
            if self.proposal.ranked is not None:
                lifted, eager, truth = _elements_for_places(lifted, eager, truth[:-1], of=truth[-1])
            yield from (
                _compared(*result, sums_rows=self.proposal.sums_rows)
                for result in zip(lifted, eager, truth, strict=True)
            )

    def in_float32(self, draws: Iterable[Sequence[Any]]) -> str:
        """What differs where nothing is rounded to fewer bits: that two roundings are equal may be chance."""
        before = _unrounded if self.proposal.rounds else lambda graph: graph
        twins = _Pair(_single(before(self.spelled)), _single(before(self.operator)), self.proposal)
        for inputs in draws:
            lifted, eager, _ = twins._run(_cast(inputs, torch.float32))
            bits = filter(None, map(_different_bits, *map(self._within_int8, (lifted, eager))))
            for different in bits:
                return f"computed in float32 throughout, {different}"
        return ""

    def _within_int8(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, those that are int8 after rounding within its range: what is beyond it becomes one number."""
        whole = [node.meta["val"].dtype == torch.int8 for node in self.proposal.outputs]
        return [value.clamp(-127, 127) if one else value for value, one in zip(results, whole, strict=True)]

    def _run(self, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        """The operator's results, eager mode's, and which rows are compared: others are 0. None for all."""
        lifted = list(self._operator.run(*inputs[: len(self.proposal.inputs)]))
        eager = list(self._eager.run(*inputs))
        if self.proposal.assumed is None:
            return lifted, eager[: len(lifted)], None
        rows = ~(eager[-1].amax(-1, keepdim=True) <= self.proposal.assumed.least)  # one that is NaN is compared
        return [value.where(rows, 0.0) for value in lifted], [value.where(rows, 0.0) for value in eager[:-1]], rows

    @cached_property
    def _operator(self) -> PreparedGraph:
        return PreparedGraph(self.operator)

    @cached_property
    def _eager(self) -> PreparedGraph:
        return PreparedGraph(self.spelled)

    @cached_property
    def _in_float64(self) -> PreparedGraph:
        return PreparedGraph(_unrounded(self.spelled) if self.proposal.rounds else self.spelled, wide=True)


def _elements_for_places(*results: list[torch.Tensor], of: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """In the place of whole numbers, what they choose in the rows of ``of``; NaN for a place that is chosen twice."""
    for number, values in enumerate(results):
        found = []
        for value in values:
            if not value.is_floating_point():
                places = value.long()
                twice = (places.unsqueeze(-1) == places.unsqueeze(-2)).sum(-1) > 1
                value = of.gather(-1, places).masked_fill(twice, torch.nan)  # noqa: PLW2901 - what it stands for
                value = value if number == len(results) - 1 else value.float()  # noqa: PLW2901 - the right one stays
            found.append(value)
        yield found


def _cast(inputs: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    return [one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in inputs]


def _single(graph: fx.Graph) -> fx.Graph:
    """A copy with float32 in place of every floating-point dtype."""
    twin = copy.deepcopy(graph)
    for node in twin.nodes:
        node.args, node.kwargs = pytree.tree_map(_float32_for, (node.args, node.kwargs))
    return twin


def _unrounded(graph: fx.Graph) -> fx.Graph:
    """A copy that gives the values before they are rounded to int8."""
    twin = copy.deepcopy(graph)
    for node in twin.nodes:
        if node.target is torch.ops.aten.round.default:
            node.replace_all_uses_with(node.args[0])
        elif node.kwargs.get("dtype") == torch.int8:
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
        record = record_of(node.target)
        if record is not None and record.before_rounding is not None:
            node.target = record.before_rounding
    return twin


def _float32_for(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _different_bits(lifted: torch.Tensor, eager: torch.Tensor) -> str:
    """How many elements are not the same number with the same sign, or both NaN; empty where none is."""
    if lifted.dtype != eager.dtype or lifted.shape != eager.shape:
        return f"it gives {lifted.dtype}{list(lifted.shape)} for {eager.dtype}{list(eager.shape)}"
    if _same_bits(lifted, eager):
        return ""
    same = (lifted == eager) & (lifted.signbit() == eager.signbit()) | (lifted.isnan() & eager.isnan())
    return "" if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} elements are not eager mode's"


def _same_bits(lifted: torch.Tensor, eager: torch.Tensor) -> bool:
    """Whether each bit is the same, a NaN's too."""
    if lifted.dtype != eager.dtype:
        return False
    whole = _WHOLE[lifted.element_size()]
    return torch.equal(lifted.view(whole), eager.view(whole))


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes, of which each pattern of bits is one and equals itself."""


def _compared(lifted: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, *, sums_rows: bool) -> _Compared:
    """The distances of the two from float64, and a reason if the operator's is larger."""
    if lifted.dtype == eager.dtype == torch.int8 and truth.is_floating_point():
        unknown = truth.isnan()
        if bool((lifted != eager)[unknown].any()):
            return _Compared("it rounds NaN to another number than eager mode")
        return _no_farther(_known((torch.stack((lifted, eager)).double() - truth).abs()))
    if eager.dtype not in FORMATS or lifted.dtype != eager.dtype or lifted.shape != eager.shape:
        return _Compared(_different_bits(lifted, eager))
    both = torch.stack((lifted, eager))
    if _all_finite(both, truth):  # as with most inputs
        return _no_farther(_distances(both, truth, sums_rows=sums_rows).reshape(2, -1))
    odd, odd_eager = _odd(both, truth)
    more = odd & ~odd_eager
    if sums_rows and bool(more.any()):
        more &= ~_overflows_by_chance(more, truth, both.dtype)
    if bool(more.any()):
        return _Compared("it is infinite or NaN, or finite, where float64 and eager mode are not")
    within = truth.isfinite() & (truth.abs() < FORMATS[both.dtype].largest) & both.isfinite()
    return _no_farther(_known(_distances(both, truth, sums_rows=sums_rows).where(within, torch.nan)))


def _all_finite(values: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether nothing is infinite, NaN or beyond the format's range."""
    least, most = truth.aminmax() if truth.numel() else (truth.sum(), truth.sum())
    largest = FORMATS[values.dtype].largest
    return -largest < float(least) and float(most) < largest and bool(values.isfinite().all())


def _odd(values: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Where a value is infinite, NaN or finite, and the true one is something else."""
    beyond = truth.abs() >= FORMATS[values.dtype].largest
    infinite = values.isinf() & (values.signbit() == truth.signbit())
    return torch.where(
        truth.isnan(),
        ~values.isnan(),
        torch.where(
            beyond, ~infinite & (values.abs() < FORMATS[values.dtype].largest) | values.isnan(), ~values.isfinite()
        ),
    )


def _overflows_by_chance(odd: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Elements whose partial sums leave the range of float32 in one order of summation and stay in it in another.

    A dtype with float32's range has no room above it for a sum, and a processor chooses the order. Such elements are few, and lie
    in rows that come near the end of the range.
    """
    largest = FORMATS[dtype].largest
    if largest < FORMATS[torch.bfloat16].largest:
        return torch.zeros_like(odd)
    near = (truth.abs().nan_to_num(largest, largest).amax(-1, keepdim=True) >= largest / _NEAR).expand_as(odd)
    few = (odd & near).sum() <= _BY_CHANCE * near.sum()
    return odd & near & few


_NEAR = 8.0
"""How much larger a partial sum may be than the largest sum of its row."""
_BY_CHANCE = 0.05


def _distances(values: torch.Tensor, truth: torch.Tensor, *, sums_rows: bool) -> torch.Tensor:
    """Distances from the true values in ulps."""
    far = (values.double() - truth).abs()
    if sums_rows and values.dtype != torch.float32:
        far = (far - _SUM * truth.abs().nan_to_num(0.0, 0.0).amax(-1, keepdim=True)).clamp(min=0)
    return far / ulp(truth, values.dtype)


def _known(far: torch.Tensor) -> torch.Tensor:
    """The distances [2, n] of the elements of which both are known."""
    return far[:, far.isfinite().all(0)]


def _no_farther(far: torch.Tensor) -> _Compared:
    """The distances of the two, [2, n], and a reason if the first is larger."""
    if not far.numel():
        return _Compared()
    worst, worst_eager = far.amax(1).tolist()
    usual, usual_eager = far.square().mean(1).sqrt().tolist()
    reason = ""
    if worst > max(worst_eager, _ONE_ROUNDING) or usual > max(usual_eager * _SAME_AVERAGE, _ONE_ROUNDING_ON_AVERAGE):
        most = far[0].kthvalue(max(1, far.shape[1] * 9 // 10)).values.item()
        reason = (
            f"it is farther from float64 than eager mode: {worst:.3g} ulp at worst and {usual:.3g} on average, "
            f"eager mode {worst_eager:.3g} and {usual_eager:.3g}; nine elements in ten are within {most:.3g}"
        )
    return _Compared(reason, worst, worst_eager)


def forget() -> None:
    """Judge everything anew."""
    _KEPT.clear()
