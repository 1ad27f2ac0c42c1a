"""Adds up the rows of each token's experts, where a map of bools says which those are; and the gradients.

Formula (CANN operator documentation, aclnnMoeTokenUnpermuteWithRoutingMap and its Grad), for N tokens and E experts::

    drop_and_pad False:  the i-th pair that routing_map marks, token by token, has the row sorted_indices[i]
    drop_and_pad True:   row r belongs to the token sorted_indices[r] and to the expert r // (rows / E)
    unpermuted_tokens[t] = sum over the rows r of t of probs[t, expert of r] * permuted_tokens[r]        weight 1 without probs

The operator with the leading underscore gives three more results for the gradient: with ``drop_and_pad`` the rows in the order of
their tokens and those tokens, else two that the device leaves unwritten and that are zeros here; and the weights that were used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_moe_token_unpermute_with_routing_map"
_SOURCE = "CANN operator documentation, aclnnMoeTokenUnpermuteWithRoutingMap"


def _map() -> torch.Tensor:
    return torch.tensor([[True, False, True], [True, True, False]])


def _rows() -> torch.Tensor:
    return torch.tensor([0, 3, 1, 2], dtype=torch.int32)


def _marked(routing_map: torch.Tensor | None, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(tokens, experts)`` of the marked pairs, token by token."""
    if routing_map is None or routing_map.shape[0] != n:
        raise ValueError(f"{_NAME}: without drop_and_pad routing_map must be [{n}, experts]; it is {routing_map}.")
    tokens, experts = routing_map.nonzero().unbind(1)
    return tokens, experts


def _pairs(
    sorted_indices: torch.Tensor,
    routing_map: torch.Tensor | None,
    probs: torch.Tensor | None,
    drop_and_pad: bool,
    n: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """For each pair its row, its token, and its expert where probs are read."""
    given = sorted_indices.long()
    if not drop_and_pad:
        tokens, experts = _marked(routing_map, n)
        return given, tokens, experts
    rows = torch.arange(given.numel())
    return rows, given, None if probs is None else rows // (given.numel() // probs.shape[1])


def _forward(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: Sequence[int],
    probs: torch.Tensor | None,
    routing_map: torch.Tensor | None,
    drop_and_pad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(unpermuted_tokens, the weight of each pair)``."""
    rows, tokens, experts = _pairs(sorted_indices, routing_map, probs, drop_and_pad, restore_shape[0])
    parts = permuted_tokens.to(compute_dtype(permuted_tokens, probs))[rows]
    weights = None if probs is None or experts is None else probs[tokens, experts]
    if weights is not None:
        parts = parts * weights.to(parts.dtype).unsqueeze(-1)
    out = parts.new_zeros(tuple(restore_shape)).index_add_(0, tokens, parts)
    return out.to(permuted_tokens.dtype), weights


@Operator(
    name="npu::npu_moe_token_unpermute_with_routing_map",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("permuted_tokens", "probs")),
    examples=(
        lambda: call(torch.randn(4, 4).half(), _rows(), [2, 4], probs=torch.rand(2, 3).half(), routing_map=_map()),
    ),
)
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: Sequence[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    """``restore_shape`` = [N, H], like permuted_tokens [rows, H]; sorted_indices: [rows] int32; probs, routing_map: [N, E]."""
    return _forward(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)[0]


@Operator(
    name="npu::_npu_moe_token_unpermute_with_routing_map",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("permuted_tokens", "probs")),
    examples=(
        lambda: call(torch.randn(4, 4).half(), _rows(), [2, 4], probs=torch.rand(2, 3).half(), routing_map=_map()),
        lambda: call(
            torch.randn(3, 4).half(), torch.tensor([1, 0, 1], dtype=torch.int32), [2, 4],
            probs=torch.rand(2, 3).half(), drop_and_pad=True,
        ),
    ),
)  # fmt: skip
def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: Sequence[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``(unpermuted_tokens, out_index, permuted_token_id, permute_probs)``; the last three have one element for each row."""
    out, weights = _forward(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)
    if not drop_and_pad:
        return out, torch.zeros_like(sorted_indices), torch.zeros_like(sorted_indices), weights
    tokens, rows = sorted_indices.sort(stable=True)
    return out, rows.to(sorted_indices.dtype), tokens, weights


@Operator(
    name="npu::npu_moe_token_unpermute_with_routing_map_grad",
    source="CANN operator documentation, aclnnMoeTokenUnpermuteWithRoutingMapGrad; ops-transformer, moe",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("unpermuted_tokens_grad", "permuted_tokens", "probs")),
    examples=(
        lambda: call(
            torch.randn(2, 4).half(), _rows(), _rows(), _map(), torch.randn(4, 4).half(), torch.rand(2, 3).half(),
            False, [2, 4],
        ),
        lambda: call(
            torch.randn(2, 4).half(), torch.tensor([1, 0, 2], dtype=torch.int32),
            torch.tensor([0, 1, 1], dtype=torch.int32), _map(), torch.randn(3, 4).half(), torch.rand(2, 3).half(), True, [2, 4],
        ),
    ),
)  # fmt: skip
def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: torch.Tensor,
    out_index: torch.Tensor,
    permuted_token_id: torch.Tensor,
    routing_map: torch.Tensor | None,
    permuted_tokens: torch.Tensor | None,
    probs: torch.Tensor | None,
    drop_and_pad: bool,
    restore_shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(grad of permuted_tokens, grad of probs)``, of the dtype of the gradient given; the second where there are probs.

    out_index, permuted_token_id: [rows], of the forward call with ``drop_and_pad``, else both its ``sorted_indices``.
    """
    by_row = out_index
    if drop_and_pad:
        by_row = torch.empty_like(out_index).index_copy_(0, out_index.long(), permuted_token_id)
    rows, tokens, experts = _pairs(by_row, routing_map, probs, drop_and_pad, restore_shape[0])
    grad = unpermuted_tokens_grad.to(compute_dtype(unpermuted_tokens_grad, probs))[tokens]
    weighted = grad
    to_probs = None
    if probs is not None and experts is not None:
        if permuted_tokens is None:
            raise ValueError(f"{_NAME}_grad: the gradient of probs takes permuted_tokens; they are None.")
        weighted = grad * probs[tokens, experts].to(grad.dtype).unsqueeze(-1)
        each = (permuted_tokens.to(grad.dtype)[rows] * grad).sum(-1)
        places = (tokens, experts)
        to_probs = grad.new_zeros(probs.shape).index_put_(places, each, accumulate=True)
        to_probs = to_probs.to(unpermuted_tokens_grad.dtype)
    to_rows = grad.new_zeros(out_index.numel(), grad.shape[1]).index_copy_(0, rows, weighted)
    return to_rows.to(unpermuted_tokens_grad.dtype), to_probs
