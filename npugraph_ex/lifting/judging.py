"""Decides whether an operator may take the place of a subgraph, by values: eager mode's and its own beside those of float64.

The subgraph runs on the CPU as eager mode rounds it, and in float64; the operator runs by the formula of its record, which
rounds as the device documents. ``judged``: on every kind of input the operator is no farther from float64 than eager mode, in its
worst element and on average, or as near as one rounding of the right value is; and no value is infinite or NaN that is not so in
float64 or in eager mode. ``exact``: every bit is eager mode's.

What was decided is kept: the layers of a model are alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import trials
from npugraph_ex.lifting.proposal import Proposal
from npugraph_ex.lifting.subgraph import Subgraph
from npugraph_ex.operators import FORMATS, CpuInterpreter, ulp

_ONE_ROUNDING = 0.5 + 2.0**-7
"""In ulps: the right value rounded once, from float32."""
_ONE_ROUNDING_ON_AVERAGE = 0.3
"""In ulps: the root mean square of one rounding is 1/sqrt(12)."""
_SUM = 2.0**-22
"""Of the largest element of a row: what float32 cannot tell apart in its sums, two roundings each way."""
_SAME_AVERAGE = 1 + 2.0**-7
"""Two averages over so few elements that differ by less are the same: one element was rounded the other way."""
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
    parts: list[object] = [str(proposal.sizes)]
    for nodes, given in ((subgraph.nodes, subgraph.inputs), (replacement.nodes, ())):
        number = {node: position for position, node in enumerate((*given, *nodes))}
        parts += [(str(node.target), _numbered(node, number)) for node in nodes]
    for node in subgraph.inputs:
        value = node.meta["val"]
        shown = (
            (value.dtype, str(value.shape), str(value.stride())) if isinstance(value, torch.Tensor) else (str(value),)
        )
        parts.append(shown)
    return tuple(parts)


def _numbered(node: fx.Node, number: Mapping[fx.Node, int]) -> str:
    """The arguments of a call, with numbers for nodes."""
    return str(fx.map_arg((node.args, node.kwargs), lambda one: f"%{number[one]}"))


def _judged(proposal: Proposal, subgraph: Subgraph, replacement: fx.Graph, *, exact: bool) -> Ruling:
    worst = worst_eager = 0.0
    for at in trials.sizes(subgraph.inputs, proposal.sizes):
        spelled = subgraph.alone(at.of)
        operator = fx.GraphModule({}, replacement)
        for kind, inputs in trials.drawn(subgraph.inputs, at, few=proposal.rounds_alike):
            try:
                eager = _run(spelled, inputs)
                truth = _run(spelled, inputs, wide=True)
                lifted = _run(operator, inputs[: len(proposal.inputs)])
            except Exception as error:  # noqa: BLE001 - whatever cannot be judged is not admitted
                message = str(error).strip().split("\n")[0]
                return Ruling(f"it cannot be judged: with {kind}, {type(error).__name__}: {message}")
            for result in zip(lifted, eager, truth, strict=True):
                compared = _Compared.of(*result, sums_rows=proposal.sums_rows)
                reason = compared.bits if exact else compared.reason
                if reason:
                    return Ruling(f"with {kind}, {reason}", compared.worst, compared.worst_eager)
                if kind.startswith("ordinary"):
                    worst, worst_eager = max(worst, compared.worst), max(worst_eager, compared.worst_eager)
    return Ruling("", worst, worst_eager)


def _run(gm: fx.GraphModule, inputs: Sequence[Any], *, wide: bool = False) -> list[torch.Tensor]:
    given = [
        one.double() if wide and isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in inputs
    ]
    return list(CpuInterpreter(gm, wide=wide).run(*given))


@dataclass(frozen=True)
class _Compared:
    """One result of the operator beside eager mode's: ``reason`` against it, ``bits`` for one that wants every bit."""

    reason: str = ""
    bits: str = ""
    worst: float = 0.0
    worst_eager: float = 0.0

    @classmethod
    def of(
        cls, lifted: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, *, sums_rows: bool = False
    ) -> _Compared:
        """Compare them."""
        if lifted.dtype != eager.dtype or lifted.shape != eager.shape:
            reason = f"it gives {lifted.dtype}{list(lifted.shape)} for {eager.dtype}{list(eager.shape)}"
            return cls(reason, reason)
        same = (lifted == eager) & (lifted.signbit() == eager.signbit()) | (lifted.isnan() & eager.isnan())
        bits = "" if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} elements are not eager mode's"
        if eager.dtype not in FORMATS:
            return cls(bits, bits)
        odd = _odd(lifted, truth) & ~_odd(eager, truth) & ~same
        if bool(odd.any()):
            return cls("it is infinite or NaN, or finite, where float64 and eager mode are not", bits)
        far, far_eager = (_distances(one, truth, sums_rows=sums_rows) for one in (lifted, eager))
        measured = far.isfinite() & far_eager.isfinite()
        worst, worst_eager = (_largest(one[measured]) for one in (far, far_eager))
        usual, usual_eager = (_root_mean_square(one[measured]) for one in (far, far_eager))
        if worst > max(worst_eager, _ONE_ROUNDING) or usual > max(
            usual_eager * _SAME_AVERAGE, _ONE_ROUNDING_ON_AVERAGE
        ):
            reason = (
                f"it is farther from float64 than eager mode: {worst:.3g} ulp at worst and {usual:.3g} on average, "
                f"eager mode {worst_eager:.3g} and {usual_eager:.3g}"
            )
            return cls(reason, bits, worst, worst_eager)
        return cls("", bits, worst, worst_eager)


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


def _distances(values: torch.Tensor, truth: torch.Tensor, *, sums_rows: bool) -> torch.Tensor:
    """Distances from the true values in ulps; NaN where either is not finite or beyond the format's range."""
    known = truth.isfinite() & (truth.abs() < FORMATS[values.dtype].largest) & values.isfinite()
    far = (values.double() - truth).abs()
    if sums_rows and values.dtype != torch.float32:
        far = (far - _SUM * truth.abs().nan_to_num(0.0, 0.0).amax(-1, keepdim=True)).clamp(min=0)
    return torch.where(known, far / ulp(truth, values.dtype), torch.nan)


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def forget() -> None:
    """Judge everything anew."""
    _KEPT.clear()
