"""Copies each token once for each of its experts, where a map of bools says which those are; and the gradient.

Formula (CANN operator documentation, aclnnMoeTokenPermuteWithRoutingMap and its Grad), for N tokens and E experts::

    drop_and_pad False:  the rows are the pairs (expert, token) that routing_map marks, expert by expert
                         sorted_indices[i] = row of the i-th marked pair, token by token
    drop_and_pad True:   each expert has capacity = num_out_tokens // E rows: its marked tokens, then the others
                         sorted_indices[row] = the row's token
    permuted_tokens[row] = tokens[token of row];   permuted_probs[row] = probs[token, expert of row]

A gradient adds each row to the token, and the place of probs, that it was taken from.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_moe_token_permute_with_routing_map"


def chosen_of(probs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The element of ``probs`` [N, E] at each place expert * N + token."""
    return probs.t().reshape(-1)[places]


def marked(routing_map: torch.Tensor) -> torch.Tensor:
    """The places expert * N + token that ``routing_map`` [N, E] marks, expert by expert."""
    return routing_map.t().reshape(-1).nonzero().squeeze(1)


def _map() -> torch.Tensor:
    return torch.tensor([[True, False, True], [True, True, False]])


@Operator(
    name="npu::npu_moe_token_permute_with_routing_map",
    source="CANN operator documentation, aclnnMoeTokenPermuteWithRoutingMap",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("tokens", "probs")),
    examples=(
        lambda: call(torch.randn(2, 4).half(), _map(), probs=torch.rand(2, 3).half(), num_out_tokens=4),
        lambda: call(torch.randn(2, 4), _map(), probs=torch.rand(2, 3), num_out_tokens=6, drop_and_pad=True),
    ),
)
def npu_moe_token_permute_with_routing_map(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """``(permuted_tokens, permuted_probs, sorted_indices)``: [rows, H], [rows] where there are probs, [rows] int32.

    tokens: [N, H]; routing_map: [N, E] bool or int8, as many experts for each token; probs: [N, E].
    """
    n, experts = routing_map.shape
    wanted = tokens.shape[0] if num_out_tokens is None else num_out_tokens
    if drop_and_pad:
        by_expert = routing_map.t().to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : wanted // experts]
        places = (torch.arange(experts).unsqueeze(1) * n + by_expert).reshape(-1)
        index = by_expert.reshape(-1)
    else:
        places = marked(routing_map)
        rows = wanted // n * n
        if places.numel() != rows:
            raise ValueError(
                f"{_NAME}: routing_map must mark num_out_tokens = {rows} pairs; it marks {places.numel()}."
            )
        index = (places % n).argsort(stable=True)
    permuted = None if probs is None else chosen_of(probs, places)
    return tokens[places % n], permuted, index.to(torch.int32)


@Operator(
    name="npu::npu_moe_token_permute_with_routing_map_grad",
    source="CANN operator documentation, aclnnMoeTokenPermuteWithRoutingMapGrad",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("permuted_token_out_grad", "probs_grad")),
    examples=(
        lambda: call(
            torch.randn(4, 4).half(),
            torch.randn(4).half(),
            torch.tensor([0, 3, 1, 2], dtype=torch.int32),
            _map(),
            3,
            2,
            False,
        ),
        lambda: call(
            torch.randn(3, 4).half(),
            torch.randn(3).half(),
            torch.tensor([0, 1, 0], dtype=torch.int32),
            _map(),
            3,
            2,
            True,
        ),
    ),
)
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: torch.Tensor,
    probs_grad: torch.Tensor | None,
    sorted_indices: torch.Tensor,
    routing_map: torch.Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(grad of tokens [tokens_num, H], grad of probs [tokens_num, experts_num])``; the second where there is one of the rows."""
    if drop_and_pad:
        capacity = sorted_indices.numel() // experts_num
        places = torch.arange(experts_num).repeat_interleave(capacity) * tokens_num + sorted_indices.long()
    else:
        places = marked(routing_map)
    wide = permuted_token_out_grad.to(compute_dtype(permuted_token_out_grad))
    to_tokens = wide.new_zeros(tokens_num, wide.shape[1]).index_add_(0, places % tokens_num, wide)
    to_probs = None
    if probs_grad is not None:
        flat = probs_grad.new_zeros(experts_num * tokens_num).index_copy_(0, places, probs_grad)
        to_probs = flat.reshape(experts_num, tokens_num).t().contiguous()
    return to_tokens.to(permuted_token_out_grad.dtype), to_probs
