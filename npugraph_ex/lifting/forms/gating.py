"""The router of experts => `npu_moe_gating_top_k_softmax`, or its second version where the chosen weights add up to one.

::

    weights, experts = topk(softmax(x), k)                            as it is
    weights, experts = topk(softmax(x), k);   weights / sum(weights)  = softmax of the chosen elements of x:
    values,  experts = topk(x, k);            softmax(values)         the second version, with ``renorm=1``

The weights may be gathered by ``experts``, too, and the first k of a sort are a choice of the largest. The operators give
``experts`` as int32, so a cast stands behind them. Their limits are those of the CANN operator documentation,
aclnnMoeGatingTopKSoftmax and aclnnMoeGatingTopKSoftmaxV2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import reductions, terms
from npugraph_ex.lifting.forms.softmax import softmax_of
from npugraph_ex.lifting.parts import part_of
from npugraph_ex.lifting.proposal import Build, Change, Emit, Proposal, Unlike

_aten = torch.ops.aten
_CAST = _aten._to_copy.default  # noqa: SLF001 - the operator's name
_SOFTMAXES = (_aten._softmax.default, _aten.softmax.int)  # noqa: SLF001 - the operator's name
TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_SORTS = (_aten.sort.default, _aten.sort.stable)
_RANKS = (2, 3)
_MOST_CHOSEN, MOST_EXPERTS = 1024, 2048
# Over 200,000 rows of 4, 8 and 128 experts: 0.530, 0.530 and 0.818 ulp; eager mode 0.498, 0.516 and 0.816. One row may hide it.
_FARTHER = (
    "in float32 a softmax of the chosen is on average farther from float64 than eager mode's quotient; "
    "cast the weights to the dtype of the experts"
)
_UNASKED = "nobody asks which experts are chosen"


@dataclass(frozen=True)
class Chosen:
    """The ``k`` largest elements of each row of ``ranked``, or the elements of ``scores`` in their places.

    Attributes:
        scores: of which elements are chosen.
        ranked: by which they are.
        call: of topk, or of a sort of which the first are taken.
        k: how many.
    """

    scores: fx.Node
    ranked: fx.Node
    call: fx.Node
    k: Any

    def against(self) -> str:
        """Why no router chooses so."""
        given = terms.arguments(self.call)
        largest = (
            given.get("largest", True) if terms.calls(self.call, _aten.topk.default) else given.get("descending", False)
        )
        if not terms.is_last(given.get("dim", -1), self.ranked) or not largest:
            return "experts are not the largest of each row"
        return ""

    @property
    def places(self) -> fx.Node | None:
        """Which elements they are; None where nobody asks."""
        results = [user for user in self.call.users if user.args[1] == 1]
        cut = [user for one in results for user in one.users if _first_of(user) == (one, self.k)]
        return next(iter(results if terms.calls(self.call, _aten.topk.default) else cut), None)


def chosen_by(node: fx.Node) -> Chosen | None:
    """What ``node`` chooses; None where it is no choice."""
    inner = terms.core(node)
    if terms.calls(inner, _aten.gather.default):
        given = terms.arguments(inner)
        found = _result(given["index"], 1)
        scores = given["self"] if terms.is_last(given["dim"], given["self"]) else None
    else:
        found = _result(inner, 0)
        scores = found and found[0].args[0]
    return None if found is None or scores is None else Chosen(scores, found[0].args[0], *found)  # type: ignore[arg-type]


def _result(node: fx.Node, number: int) -> tuple[fx.Node, Any] | None:
    """``(call, k)`` where ``node`` has the first ``k`` of each row of a result of topk, or of a sort."""
    first = _first_of(node)
    result = node if first is None else first[0]
    call = result.args[0] if result.target is getitem and result.args[1] == number else None
    if terms.calls(call, _aten.topk.default) and first is None:
        return call, terms.arguments(call)["k"]
    return (call, first[1]) if terms.calls(call, *_SORTS) and first is not None else None


def _first_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """``(x, k)`` where ``node`` is the first ``k`` elements of the last dimension of x."""
    part = part_of(node) if terms.calls(node, _aten.slice.Tensor) else None
    return (part[0], part[2]) if part is not None and (part[1], part[3]) == (0, 1) else None


def _under_softmax(node: fx.Node) -> fx.Node | None:
    """``x`` where ``node`` is its softmax over the last dimension."""
    inner = terms.core(node)
    found = inner.args[:2] if terms.calls(inner, *_SOFTMAXES) else softmax_of(node)
    return found[0] if isinstance(found, tuple) and terms.is_last(found[1], inner) else None  # type: ignore[return-value]


@dataclass(frozen=True)
class ChosenShare:
    """``scale * of / (sum(of) + epsilon)`` over the last dimension."""

    of: fx.Node
    scale: float
    epsilon: float


def share_of(node: fx.Node) -> ChosenShare | None:
    """``node`` as a share; None where it is none."""
    parts = terms.product(node)
    if len(parts.factors) != 1 or len(parts.divisors) != 1:
        return None
    under, epsilon = terms.plus_number(parts.divisors[0]) or (parts.divisors[0], 0.0)
    total, values = reductions.mean(under), terms.tensor(parts.factors[0])
    if total is None or values is None or total.dims != (values.dim() - 1,):
        return None
    if not terms.same_number(total.times, values.shape[-1]):
        return None
    same = terms.core(total.of) is terms.core(parts.factors[0])
    return ChosenShare(parts.factors[0], parts.scale, epsilon) if same else None


def cast(emit: Emit, operand: fx.Node, to: torch.dtype) -> fx.Node:
    """The operand in a dtype."""
    return operand if operand.meta["val"].dtype == to else emit(_CAST, operand, dtype=to)


def _build(k: int, dtype: torch.dtype, *, shared: bool) -> Build:
    def build(emit: Emit, x: fx.Node) -> tuple[fx.Node, ...]:
        wide = cast(emit, x, torch.promote_types(x.meta["val"].dtype, dtype))
        if shared:
            made = emit(torch.ops.npu.npu_moe_gating_top_k_softmax_v2.default, wide, k=k, renorm=1)
        else:
            made = emit(torch.ops.npu.npu_moe_gating_top_k_softmax.default, wide, None, k)
        weights, experts = (emit(getitem, made, number) for number in range(2))
        return cast(emit, weights, dtype), cast(emit, experts, torch.int64)

    return build


class _Gating:
    """The form."""

    name = "lift_gating"
    ends_with: frozenset[Any] = frozenset(
        {_CAST, *terms.MULTIPLYING, _aten.gather.default, _aten.slice.Tensor, getitem, *_SOFTMAXES}
    )

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The router whose weights are ``node``."""
        value = terms.tensor(node)
        if value is None or value.dtype not in TAKEN:
            return None
        behind, shares = _under_softmax(node), share_of(node)
        shares = shares if shares and shares.scale == 1.0 else None
        chosen = chosen_by(behind or (shares.of if shares else node))
        if chosen is None:
            return _by_max(node)
        inside, ranked = _under_softmax(chosen.scores), _under_softmax(chosen.ranked)
        if inside is None and behind is None:
            return _masked(chosen)
        x = inside or chosen.scores
        if terms.core(ranked or chosen.ranked) is not terms.core(x):
            return Unlike(chosen.call, f"experts are ranked by {chosen.ranked.name}, and the softmax is of {x.name}")
        if inside is not None and behind is not None:
            return Unlike(chosen.call, "there is a softmax in front of the choice, and one behind it")
        return _router(node, chosen, x, shared=behind is not None, divided=shares is not None)


def _masked(chosen: Chosen) -> Unlike | None:
    """Why a choice in groups stays, as DeepSeek-V2 has it: weights of a softmax of which a mask leaves some."""
    masked = terms.core(chosen.scores)
    if not terms.calls(masked, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.where.self):
        return None
    of_a_softmax = any(_under_softmax(one) is not None for one in masked.all_input_nodes)
    return (
        Unlike(chosen.call, "a mask hides some weights of the softmax; the operator chooses among all experts")
        if of_a_softmax
        else None
    )


def _by_max(node: fx.Node) -> Unlike | None:
    """Why the choice of one expert by `max` stays, as Switch Transformers have it."""
    inner = terms.core(node)
    call = inner.args[0] if inner.target is getitem and inner.args[1] == 0 else None
    if not terms.calls(call, _aten.max.dim) or len(call.users) < 2:
        return None
    weights = call.args[0]
    if not terms.is_last(terms.arguments(call)["dim"], weights) or _under_softmax(weights) is None:  # type: ignore[arg-type]
        return None
    lines = "weights, experts = torch.topk(scores, 1)   # each with a last dimension of one element"
    return Unlike(call, "the largest one is taken by max; the form reads a choice by topk", lines=lines)


def _router(node: fx.Node, chosen: Chosen, x: fx.Node, *, shared: bool, divided: bool) -> Proposal | Unlike:
    value, k = node.meta["val"], chosen.k
    reason = chosen.against()
    if reason:
        return Unlike(chosen.call, reason)
    if divided and value.dtype == torch.float32:
        return Unlike(chosen.call, _FARTHER)
    operand = terms.core(x)
    known = operand.meta["val"]
    experts = known.shape[-1]
    fits = known.dim() in _RANKS and isinstance(k, int) and isinstance(experts, int)
    if not fits or known.dtype not in TAKEN or not 0 < k <= _MOST_CHOSEN or experts > MOST_EXPERTS:
        return Unlike(
            chosen.call,
            f"{k} are chosen in {known.dtype}{list(known.shape)}; the operator takes two or three dimensions, "
            f"up to {MOST_EXPERTS} experts and chooses up to {_MOST_CHOSEN}",
        )
    places = chosen.places
    if places is None:
        all_of_them = any(user.args[1] == 1 for user in chosen.call.users)
        asked = "the places of all experts are used, and not of the first alone" if all_of_them else _UNASKED
        return Unlike(chosen.call, asked)
    build = _build(k, value.dtype, shared=shared or divided)
    proposal = Proposal((operand,), (node, places), (build,), ranked=chosen.ranked, dense=True)
    whole = [user for one in chosen.call.users for user in one.users if _first_of(user) != (one, k)]
    if whole or terms.calls(chosen.call, _aten.topk.default):
        return proposal
    wide = chosen.ranked.meta["val"].dtype

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if shared:
            largest, experts = x.to(wide).topk(k)
            return torch.softmax(largest, -1).to(value.dtype), experts
        weights, experts = torch.softmax(x.to(wide), -1).topk(k)
        return (weights / weights.sum(-1, keepdim=True) if divided else weights).to(value.dtype), experts

    change = Change(
        proposal, "topk", program, "take the largest by topk, whose results lie densely",
        f"weights, experts = torch.topk(scores, {k})   # in the place of the sort and of its first {k}",
    )  # fmt: skip
    return replace(proposal, otherwise=Unlike(chosen.call, "", change))


FORM = _Gating()
