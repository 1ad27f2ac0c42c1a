"""Adds up the rows of each token's experts, weighted; and the gradients.

Formula (CANN operator documentation, aclnnMoeTokenUnpermute and aclnnMoeTokenUnpermuteGrad), for ``K`` experts a token::

    row(t, k)                       = sorted_indices[t * K + k]
    unpermuted_tokens[t]            = sum over k of probs[t, k] * permuted_tokens[row(t, k)]
    grad_permuted_tokens[row(t, k)] = probs[t, k] * grad[t]
    grad_probs[t, k]                = sum(permuted_tokens[row(t, k)] * grad[t])

Without ``probs`` K is 1 and each weight 1. Rows behind the last one, which a limited permutation cut off, count as zeros.

Not covered: ``padded_mode``; ``restore_shape``, which belongs to it, is not read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_moe_token_permute import blocks, rows_of_choices

_NAME = "npu_moe_token_unpermute"
_SOURCE = "CANN operator documentation, aclnnMoeTokenUnpermute"
_GRAD_SOURCE = "CANN operator documentation, aclnnMoeTokenUnpermuteGrad"


def _refuse_padding(name: str, padded_mode: bool) -> None:
    if padded_mode:
        raise unsupported(name, "padded_mode", True, "False")


def _chosen() -> torch.Tensor:
    return torch.tensor([2, 0, 4, 3, 1, 5], dtype=torch.int32)


def _example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4).half(), _chosen(), torch.rand(3, 2).half()


@Operator(
    name="npu::npu_moe_token_unpermute",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(*_example()),),
)
def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """[N, H] like permuted_tokens [rows, H]; sorted_indices: [N * K] int32; probs: [N, K]."""
    _refuse_padding(_NAME, padded_mode)
    k, width = 1 if probs is None else probs.shape[1], permuted_tokens.shape[1]
    out = permuted_tokens.new_empty(sorted_indices.numel() // k, width)
    for tokens, choices in blocks(out.shape[0], k, width):
        rows = rows_of_choices(permuted_tokens, sorted_indices[choices])
        if probs is not None:
            weights = probs[tokens].to(compute_dtype(permuted_tokens, probs))
            rows = (rows.reshape(*weights.shape, width) * weights.unsqueeze(-1)).sum(1)
        out[tokens] = rows
    return out


@Operator(
    name="npu::_npu_moe_token_unpermute",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(*_example()),),
)
def _npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of ``npu_moe_token_unpermute``, and ``permuted_tokens`` itself for the gradient."""
    out = npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)
    return out, permuted_tokens


def _gradients(
    permuted: torch.Tensor | None,
    grad: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None,
    size: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(grad_permuted_tokens [size, H] of dtype, grad_probs)``."""
    if probs is not None and permuted is None:
        raise ValueError(f"{_NAME}_grad: the gradient of probs takes permuted_tokens; they are None.")
    k, width = 1 if probs is None else probs.shape[1], grad.shape[1]
    places = sorted_indices.long().clamp(max=size)
    to_rows = grad.new_zeros(size + 1, width, dtype=dtype)
    to_probs = None if probs is None else torch.empty_like(probs)
    for tokens, choices in blocks(grad.shape[0], k, width):
        each = grad[tokens].to(compute_dtype(grad, probs)).unsqueeze(1)
        if probs is not None and permuted is not None and to_probs is not None:
            rows = rows_of_choices(permuted, sorted_indices[choices]).reshape(-1, k, width)
            to_probs[tokens] = (rows * each).sum(-1).to(probs.dtype)
            each = each * probs[tokens].to(each.dtype).unsqueeze(-1)
        to_rows[places[choices]] = each.flatten(0, 1).to(dtype)
    return to_rows[:size], to_probs


@Operator(
    name="npu::npu_moe_token_unpermute_grad",
    source=_GRAD_SOURCE,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("permuted_tokens", "grad_unpermuted_tokens")),
    examples=(lambda: call(torch.randn(6, 4).half(), torch.randn(3, 4).half(), _chosen(), torch.rand(3, 2).half()),),
)
def npu_moe_token_unpermute_grad(
    permuted_tokens: torch.Tensor,
    grad_unpermuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(grad_permuted_tokens, grad_probs)``, each like what it is the gradient of."""
    _refuse_padding(f"{_NAME}_grad", padded_mode)
    size, dtype = permuted_tokens.shape[0], permuted_tokens.dtype
    return _gradients(permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs, size, dtype)


@Operator(
    name="npu::npu_moe_token_unpermute_grad_v2",
    source=_GRAD_SOURCE,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("grad_unpermuted_tokens", "permuted_tokens")),
    examples=(
        lambda: call(
            torch.randn(3, 4).half(),
            _chosen(),
            6,
            torch.float16,
            torch.rand(3, 2).half(),
            permuted_tokens=torch.randn(6, 4).half(),
        ),
    ),
)
def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
    permuted_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(grad_permuted_tokens, grad_probs)``: [permuted_tokens_size_0, H] of the dtype given, and like probs."""
    name = f"{_NAME}_grad_v2"
    _refuse_padding(name, padded_mode)
    dtype = dtype_of(permuted_tokens_dtype, name, "permuted_tokens_dtype")
    return _gradients(permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs, permuted_tokens_size_0, dtype)
