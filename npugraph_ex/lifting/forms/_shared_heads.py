"""Heads of keys and values that several heads of queries share, and that a model repeats for them."""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms

_aten = torch.ops.aten


def shared_heads(heads: fx.Node, dim: int = 1) -> fx.Node | None:
    """``x`` where ``heads``, of four dimensions, repeats each head of it for N / M consecutive ones.

    ``dim`` is the dimension of the heads: 1 of x [B, M, S, D], or 2 of x [B, S, M, D].
    """
    inner = terms.core(heads)
    if terms.calls(inner, _aten.repeat_interleave.self_int):
        return inner.args[0] if inner.args[2:3] in {(dim,), (dim - 4,)} else None  # type: ignore[return-value]
    made = (_aten.expand.default, _aten.repeat.default)
    repeated = next((one for one in terms.reshaped_from(heads) if terms.calls(one, *made)), None)
    if repeated is None or not isinstance(repeated.args[0], fx.Node):
        return None
    wide, narrow, whole = (terms.tensor(one) for one in (repeated, repeated.args[0], heads))
    if wide is None or narrow is None or whole is None or wide.dim() != 5 or narrow.dim() != 5 or whole.dim() != 4:
        return None
    lead, (shared, times), rest = wide.shape[:dim], wide.shape[dim : dim + 2], wide.shape[dim + 2 :]
    if not same_numbers(narrow.shape, (*lead, shared, 1, *rest)):
        return None
    if not same_numbers(whole.shape, (*lead, shared * times, *rest)):
        return None
    wanted = (*lead, shared, *rest)
    sources = ((one, terms.tensor(one)) for one in terms.reshaped_from(repeated.args[0]))
    return next((one for one, value in sources if value is not None and same_numbers(value.shape, wanted)), None)
