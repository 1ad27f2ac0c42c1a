"""Decides whether an operator may take the place of a subgraph, by values: eager mode's and its own beside those of float64.

The subgraph runs on the CPU as eager mode rounds it, and in float64; the operator runs by the formula of its record, which
rounds as the device documents. ``judged``: on every kind of input, over the same draws, no element of the operator's is farther
from float64 than eager mode's farthest, unless it is the right value rounded once (half an ulp), nor is it farther on average by
more than chance; and no value is infinite or NaN that is not so in float64 or in eager mode. ``exact``: every bit is eager mode's,
also where both compute in float32 throughout. A result of 16 bits hides a difference in the last bit of float32 but for one element
in thousands.

What was decided is kept: the layers of a model are alike.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.lifting import trials
from npugraph_ex.lifting.distances import Compared, compare, compare_dequantised, different_bits, same_bits
from npugraph_ex.lifting.fewer_rows import FewerRows, fewer
from npugraph_ex.lifting.proposal import Proposal
from npugraph_ex.lifting.subgraph import Subgraph, sized
from npugraph_ex.operators import PreparedGraph, record_of

_UNKNOWN_ORDER = "its sums over rows have no documented order, so no trial can show that every bit is eager mode's"
_ANY_OF_EQUALS = (
    "topk has no documented order among equal elements, so no trial can show that the choice is eager mode's"
)
_ROUNDED_ELSEWHERE = (
    "the operator may not round where the spelling does, so no trial can show that every bit is eager mode's"
)
_MOST_KEPT = 1024
_MOST_DRAWS = 256
"""Of one kind of inputs: an operator that is no farther than eager mode may be so in some of them by chance."""
_MOST_ELEMENTS = 1 << 26
"""Of an input: half a GiB in float64."""


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
        proposal: says how it is judged.
        subgraph: what is there.
        replacement: what takes its place; its placeholders are the proposal's inputs.
        exact: whether every bit must be eager mode's.
    """
    if exact and proposal.sums_rows:
        return Ruling(_UNKNOWN_ORDER)
    if exact and proposal.rounds_elsewhere:
        return Ruling(_ROUNDED_ELSEWHERE)
    if exact and proposal.ranked is not None:
        return Ruling(_ANY_OF_EQUALS)
    exact = exact or proposal.rounds_alike
    key = (exact, *signature(proposal, subgraph, replacement))
    if key not in _KEPT:
        with trials.on_real_values():
            _KEPT[key] = _judged(proposal, subgraph, replacement, exact=exact)
        if len(_KEPT) > _MOST_KEPT:
            _KEPT.popitem(last=False)
    return _KEPT[key]


def signature(proposal: Proposal, subgraph: Subgraph, replacement: fx.Graph) -> tuple[object, ...]:
    """Equal for two proposals on which nothing can differ: operators, arguments, and metadata of the inputs."""
    parts: list[object] = [str(proposal.named)]
    assumed = proposal.assumed
    if assumed is not None:  # of scores that each layer has under another name
        scores = (*subgraph.inputs, *subgraph.nodes).index(assumed.scores)
        parts.append((scores, assumed.least, assumed.order, assumed.result))
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
    for own in trials.sizes(subgraph.inputs):
        rows = _rows(proposal, subgraph, replacement, own)
        at = replace(own, shapes=dict(zip(subgraph.inputs, rows.shapes, strict=True)))
        elements = max((math.prod(shape) for shape in rows.shapes if shape is not None), default=0)
        if elements > _MOST_ELEMENTS:
            return Ruling(f"it cannot be judged at its own size: {elements} elements of one input meet each other")
        pair = _Pair(rows.graphs[0], rows.graphs[1], proposal)
        for kind in trials.kinds(subgraph.inputs, at, few=proposal.rounds_alike, places=proposal.places):
            try:
                found = _of_kind(pair, kind, exact=exact)
            except Exception as error:  # noqa: BLE001 - whatever cannot be judged is not admitted
                message = str(error).strip().split("\n")[0]
                return Ruling(f"it cannot be judged: with {kind.name}, {type(error).__name__}: {message}")
            if found.reason:
                return replace(found, reason=f"with {kind.name}, {found.reason}")
            worst, worst_eager = max(worst, found.ulps), max(worst_eager, found.eager_ulps)
        if exact and not proposal.rounds_alike:
            different = pair.in_float32(trials.ordinary(subgraph.inputs, at, proposal.places))
            if different:
                return Ruling(different)
    return Ruling("", worst, worst_eager)


def _rows(proposal: Proposal, subgraph: Subgraph, replacement: fx.Graph, at: trials.Sizes) -> FewerRows:
    """The two graphs at these sizes, of as many rows as are needed."""
    further = [] if proposal.ranked is None else [proposal.ranked]
    further += [] if proposal.assumed is None else [proposal.assumed.scores]
    graphs = subgraph.alone(at.of, *further), sized(replacement, at.of)
    given = [node.meta["val"] for node in subgraph.inputs]
    values = [
        torch.empty([at.of(size) for size in value.shape], dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else at.of(value)
        for value in given
    ]
    return fewer(graphs, values, [at.of(size) for size in proposal.named])


def _of_kind(pair: _Pair, kind: trials.InputKind, *, exact: bool) -> Ruling:
    """Draw inputs of one kind until the operator is no farther than eager mode, surely not by as much as counts, or often enough.

    Of two that are equally near, either is the farther one in a few draws, and which one it is changes as more are drawn. One that
    is farther by its nature stays so.
    """
    total: list[Compared] = []
    for again in range(_MOST_DRAWS):
        measured = again > 0 or kind.name.startswith("ordinary")
        found = list(pair.compared(kind.draw(again), exact=exact, measured=measured))
        reason = next(filter(None, (one.reason for one in found)), "")
        if reason:
            break
        total = found if not total else [old.and_(new) for old, new in zip(total, found, strict=True)]
        if not any(one.farther for one in total) or (again and any(one.surely_farther for one in total)):
            break
        if all(one.surely_as_near for one in total):
            break
    far = [str(one) for one in total if one.beyond_eager or one.surely_farther or one.farther_on_average]
    largest = (
        max((far(one) for one in total), default=0.0) for far in (attrgetter("worst"), attrgetter("worst_eager"))
    )
    return Ruling(next(iter(far), reason), *largest)


@dataclass(frozen=True)
class _Pair:
    """A spelling, and the operator in its place."""

    spelled: fx.Graph
    operator: fx.Graph
    proposal: Proposal

    def compared(self, inputs: Sequence[Any], *, exact: bool, measured: bool) -> Iterator[Compared]:
        """Each result; distances where bits differ, or where they are ``measured`` in any case."""
        lifted, eager, compared = self._run(inputs)
        if exact:
            yield from map(Compared, map(different_bits, lifted, eager))
        if measured or not (exact or all(map(same_bits, lifted, eager))):
            truth = list(self._in_float64.run(*_cast(inputs, torch.float64)))
            if compared is not None:
                truth = [value.where(compared, 0.0) for value in truth[: len(lifted)]]
            if self.proposal.ranked is not None:
                lifted, eager, truth = _elements_for_places(lifted, eager, truth[:-1], of=truth[-1])
            yield from (
                compare(*result, sums_rows=self.proposal.sums_rows) for result in zip(lifted, eager, truth, strict=True)
            )
            if self.proposal.rounds and len(truth) > 1:  # the caller multiplies one by the other
                yield compare_dequantised(lifted, eager, truth)

    def in_float32(self, draws: Iterable[Sequence[Any]]) -> str:
        """What differs where nothing is rounded to fewer bits: that two roundings are equal may be chance."""
        before = _unrounded if self.proposal.rounds else lambda graph: graph
        twins = _Pair(_single(before(self.spelled)), _single(before(self.operator)), self.proposal)
        for inputs in draws:
            lifted, eager, _ = twins._run(_cast(inputs, torch.float32))
            bits = filter(None, map(different_bits, *map(self._within_int8, (lifted, eager))))
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
        rows = self.proposal.assumed.holds(eager[-1], eager[0])
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


def forget() -> None:
    """Judge everything anew."""
    _KEPT.clear()
