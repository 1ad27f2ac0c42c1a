"""Copies each token once for each of its experts, in the order of the experts; and the gradient.

Formula (CANN operator documentation, aclnnMoeTokenPermute and aclnnMoeTokenPermuteGrad), for ``K`` experts a token::

    order               = argsort(indices)                 by expert, the earlier choice first
    permuted_tokens[i]  = tokens[order[i] // K]            the first num_out_tokens; a number below 1 is counted from the end
    sorted_indices      = argsort(order)                   the row of each choice
    grad_tokens[t]      = sum over k of grad_permuted_tokens[sorted_indices[t * K + k]]     rows that were cut off count as 0

Not covered: ``padded_mode``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from npugraph_ex.operators._precision import compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_moe_token_permute"
_GRAD, _GRAD_V2 = f"{_NAME}_grad", f"{_NAME}_grad_v2"


def _refuse_padding(name: str, padded_mode: bool) -> None:
    if padded_mode:
        raise unsupported(name, "padded_mode", True, "False")


_BLOCK = 1 << 22
"""Elements that are widened at a time: all rows of a model in float32 take several times the memory that they have."""


def blocks(tokens: int, k: int, width: int) -> Iterator[tuple[slice, slice]]:
    """The tokens in blocks, each as a slice of the tokens and one of their choices, for rows of a width."""
    step = max(1, _BLOCK // max(1, k * width))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        yield slice(start, stop), slice(start * k, stop * k)


def rows_of_choices(rows: torch.Tensor, sorted_indices: torch.Tensor) -> torch.Tensor:
    """The row of each choice, in float32 or float64; zeros where the row was cut off."""
    if not rows.shape[0]:
        return rows.new_zeros(sorted_indices.numel(), rows.shape[1], dtype=compute_dtype(rows))
    places, last = sorted_indices.long(), rows.shape[0] - 1
    return rows[places.clamp(max=last)].to(compute_dtype(rows)).masked_fill_((places > last).unsqueeze(1), 0)


@Operator(
    name="npu::npu_moe_token_permute",
    source="CANN operator documentation, aclnnMoeTokenPermute",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(
        lambda: call(torch.randn(3, 4).half(), torch.tensor([[1, 0], [2, 1], [0, 2]])),
        lambda: call(torch.randn(3, 4), torch.tensor([1, 2, 0]), 2),
    ),
)
def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(permuted_tokens, sorted_indices)``: [rows, H] like tokens, [N * K] int32.

    tokens: [N, H]; indices: [N] or [N, K] whole numbers, the experts of each token.
    """
    _refuse_padding(_NAME, padded_mode)
    k = 1 if indices.dim() == 1 else indices.shape[1]
    order = indices.reshape(-1).argsort(stable=True)
    given = num_out_tokens or 0
    rows = min(given, order.numel()) if given > 0 else given + order.numel()
    return tokens[order[:rows] // k], order.argsort().to(torch.int32)


def _gradient(grad: torch.Tensor, sorted_indices: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    width = grad.shape[1]
    out = grad.new_empty(sorted_indices.numel() // k, width, dtype=dtype)
    for tokens, choices in blocks(out.shape[0], k, width):
        out[tokens] = rows_of_choices(grad, sorted_indices[choices]).reshape(-1, k, width).sum(1)
    return out


def _chosen() -> torch.Tensor:
    return torch.tensor([2, 0, 4, 3, 1, 5], dtype=torch.int32)


@Operator(
    name="npu::npu_moe_token_permute_grad",
    source="CANN operator documentation, aclnnMoeTokenPermuteGrad",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(
        lambda: call(
            torch.randn(3, 4).half(), torch.randn(6, 4).half(), torch.tensor([[1, 0], [2, 1], [0, 2]]), _chosen()
        ),
    ),
)
def npu_moe_token_permute_grad(
    tokens: torch.Tensor,
    grad_permuted_tokens: torch.Tensor,
    indices: torch.Tensor,
    sorted_indices: torch.Tensor,
    padded_mode: bool = False,
) -> torch.Tensor:
    """The gradient of ``tokens``, [N, H] of their dtype."""
    _refuse_padding(_GRAD, padded_mode)
    k = 1 if indices.dim() == 1 else indices.shape[1]
    return _gradient(grad_permuted_tokens, sorted_indices, k, tokens.dtype)


@Operator(
    name="npu::npu_moe_token_permute_grad_v2",
    source="CANN operator documentation, aclnnMoeTokenPermuteGrad",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(6, 4).half(), _chosen(), 3, torch.float16, 2),),
)
def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool = False,
) -> torch.Tensor:
    """The gradient of ``tokens``, [tokens_size_0, H] of ``tokens_dtype``."""
    _refuse_padding(_GRAD_V2, padded_mode)
    if tokens_size_0 * num_topK != sorted_indices.numel():
        raise refused(
            _GRAD_V2, "tokens_size_0", tokens_size_0, f"{sorted_indices.numel()} choices / num_topK {num_topK}"
        )
    dtype = dtype_of(tokens_dtype, _GRAD_V2, "tokens_dtype")
    return _gradient(grad_permuted_tokens, sorted_indices, num_topK, dtype)
