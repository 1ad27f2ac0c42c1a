"""The router of experts that weighs with a sigmoid and chooses with a bias => `npu_moe_gating_top_k`, as DeepSeek-V3 has it.

::

    weights = sigmoid(x);   choice = weights + bias
    groups  = sum of the two largest of each group's choice, or its largest one;   the best groups stay
    experts = topk(choice, minus infinity in the other groups)
    weights = weights[experts] / sum(weights[experts]) * factor

Bias, groups and factor may be missing. The form reads the numbers that the operator needs; whether what makes the mask does what
the operator does is for the judge. The limits are those of the CANN operator documentation, aclnnMoeGatingTopK.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms.gating import MOST_EXPERTS, TAKEN, cast, chosen_by, share_of
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_FEWEST_OF_A_GROUP = 3
_ALIGNED = 32
_TWO = 2


@dataclass(frozen=True)
class _ExpertGroups:
    """How many there are, how many stay, and whether two experts stand for one (1) or the best alone (0)."""

    count: int = 1
    kept: int = 1
    mode: int = 0


def _groups(ranked: fx.Node, choice: fx.Node) -> _ExpertGroups | Unlike:
    """Between what is ranked and the choice of all experts, which it is a masked copy of."""
    if not terms.calls(ranked, _aten.masked_fill.Scalar, _aten.where.self, _aten.masked_fill.Tensor):
        return Unlike(ranked, f"experts are ranked by {ranked.name}, which is no sum of the sigmoid and a bias")
    fill = terms.constant(ranked.args[2])
    if fill is not None and fill != -torch.inf:
        return Unlike(ranked, f"experts of other groups have {fill}, and the operator minus infinity")
    for topk in _behind(ranked, choice):
        given = terms.arguments(topk)
        if not given.get("largest", True):
            return Unlike(topk, "the groups that stay are not the best ones")
        values, kept = terms.tensor(topk.args[0]), given["k"]
        summed, largest = terms.core(topk.args[0]), None  # type: ignore[arg-type]
        if terms.calls(summed, _aten.sum.dim_IntList):
            largest = terms.core(summed.args[0])  # type: ignore[arg-type]
        of_two = largest is not None and largest.target is getitem and terms.arguments(largest.args[0])["k"] == _TWO  # type: ignore[arg-type]
        of_one = terms.calls(summed, _aten.amax.default) or (summed.target is getitem and summed.args[1] == 0)
        if values is not None and isinstance(values.shape[-1], int) and (of_two or of_one):
            return _ExpertGroups(values.shape[-1], kept, int(of_two))
    return Unlike(ranked, "no choice of groups is known that makes this mask")


def _behind(ranked: fx.Node, choice: fx.Node) -> list[fx.Node]:
    """Calls of topk that lie between the two, the last first."""
    found, waiting, seen = [], list(ranked.all_input_nodes), {choice}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(node.all_input_nodes)
            if terms.calls(node, _aten.topk.default):
                found.append(node)
    return sorted(found, reverse=True)


@dataclass(frozen=True)
class _Numbers:
    """What the operator is called with."""

    k: int
    groups: _ExpertGroups
    factor: float
    epsilon: float
    dtype: torch.dtype


def _build(numbers: _Numbers) -> Build:
    def build(emit: Emit, x: fx.Node, *bias: fx.Node) -> tuple[fx.Node, ...]:
        wide = torch.promote_types(x.meta["val"].dtype, numbers.dtype)
        made = emit(
            torch.ops.npu.npu_moe_gating_top_k.default,
            cast(emit, x, wide),
            numbers.k,
            bias=cast(emit, bias[0], wide) if bias else None,
            k_group=numbers.groups.kept,
            group_count=numbers.groups.count,
            group_select_mode=numbers.groups.mode,
            norm_type=1,
            routed_scaling_factor=numbers.factor,
            eps=numbers.epsilon,
        )
        weights, experts = (emit(getitem, made, number) for number in range(2))
        return cast(emit, weights, numbers.dtype), cast(emit, experts, torch.int64)

    return build


class _SigmoidGating:
    """The form."""

    name = "lift_sigmoid_gating"
    ends_with: frozenset[Any] = frozenset({_aten._to_copy.default, _aten.mul.Tensor, _aten.div.Tensor})  # noqa: SLF001 - the operator's name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The router whose weights are ``node``."""
        value, share = terms.tensor(node), share_of(node)
        chosen = None if share is None else chosen_by(share.of)
        if value is None or share is None or chosen is None or value.dtype not in TAKEN:
            return None
        scores = terms.core(chosen.scores)
        if not terms.calls(scores, _aten.sigmoid.default):
            return None
        x, choice = terms.core(scores.args[0]), terms.core(chosen.ranked)  # type: ignore[arg-type]
        groups: _ExpertGroups | Unlike = _ExpertGroups()
        added = _bias(choice, scores)
        if added is None and choice is not scores:
            choice = next(
                (one for one in choice.all_input_nodes if _bias(one, scores) or terms.core(one) is scores), choice
            )
            groups, added = _groups(terms.core(chosen.ranked), choice), _bias(choice, scores)
        if isinstance(groups, Unlike):
            return groups
        numbers = _Numbers(chosen.k, groups, share.scale, share.epsilon, value.dtype)
        reason = chosen.against() or _unfit(x, added, numbers)
        if reason or chosen.places is None:
            return Unlike(chosen.call, reason or "nobody asks which experts are chosen")
        operands = (x,) if added is None else (x, added)
        return Proposal(operands, (node, chosen.places), (_build(numbers),), ranked=chosen.ranked, dense=True)


def _bias(node: fx.Node, scores: fx.Node) -> fx.Node | None:
    """What ``node`` adds to the scores."""
    inner = terms.core(node)
    if not terms.calls(inner, _aten.add.Tensor) or inner.kwargs or len(inner.args) > _TWO:
        return None
    for one, other in (inner.args, inner.args[::-1]):
        if isinstance(one, fx.Node) and isinstance(other, fx.Node) and terms.core(one) is scores:
            return terms.core(other)
    return None


def _unfit(x: fx.Node, bias: fx.Node | None, numbers: _Numbers) -> str:
    """Why the operator does not take these."""
    known, groups, k = x.meta["val"], numbers.groups, numbers.k
    experts = known.shape[-1]
    if known.dim() != _TWO or known.dtype not in TAKEN or not isinstance(experts, int) or experts > MOST_EXPERTS:
        return (
            f"experts are chosen in {known.dtype}{list(known.shape)}; the operator takes rows of up to {MOST_EXPERTS}"
        )
    if bias is not None and (tuple(bias.meta["val"].shape) != (experts,) or bias.meta["val"].dtype not in TAKEN):
        return f"the bias is {bias.meta['val'].dtype}{list(bias.meta['val'].shape)}, and there are {experts} experts"
    of_each = experts // groups.count
    rounded = -(-of_each // _ALIGNED) * _ALIGNED * groups.count
    fits = groups.count == 1 or (of_each >= _FEWEST_OF_A_GROUP and rounded <= MOST_EXPERTS)
    if not fits or not isinstance(k, int) or not isinstance(groups.kept, int) or not 0 < k <= groups.kept * of_each:
        return f"{k} are chosen in {groups.kept} of {groups.count} groups of {of_each} experts, which the operator does not take"
    return ""


FORM = _SigmoidGating()
