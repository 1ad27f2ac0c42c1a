"""Batched matrix product with permuted operands and a permuted result.

Formula (CANN operator documentation, aclnnTransposeBatchMatMul)::

    a   = permute(input, perm_x1)                   (B, M, K)
    b   = permute(weight, perm_x2)                  (B, K, N)
    out = permute(a @ b, perm_y)                    (M, B, N)

With ``batch_split_factor`` f > 1 the batches are dealt out to f groups: out is (f, M, B * N / f), whose group g holds
the batches g * B/f up to (g + 1) * B/f side by side.

With ``scale`` (B * N), int64 of ``npu_trans_quant_param``, out is round(out * scale) in int8, of shape (M, 1, B * N).

Covered: the documented permutations, float16, bfloat16, float32 (and float64). Not covered: ``bias``, which the
documentation reserves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._integers import scale_of
from npugraph_ex.operators._precision import compute_dtype, refused, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_transpose_batchmatmul"
_PERMUTATIONS = {"perm_x1": ((0, 1, 2), (1, 0, 2)), "perm_x2": ((0, 1, 2), (0, 2, 1)), "perm_y": ((1, 0, 2),)}
_DEFAULTS = {"perm_x1": (0, 1, 2), "perm_x2": (0, 1, 2), "perm_y": (1, 0, 2)}


def _permutation(name: str, given: Sequence[int] | None) -> tuple[int, ...]:
    order = tuple(given) if given else _DEFAULTS[name]
    if order not in _PERMUTATIONS[name]:
        allowed = " or ".join(str(list(permutation)) for permutation in _PERMUTATIONS[name])
        raise refused(_NAME, name, list(order), allowed)
    return order


@Operator(
    name="npu::npu_transpose_batchmatmul",
    source="CANN operator documentation, aclnnTransposeBatchMatMul",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    first_factor=0,
    examples=(
        lambda: call(
            torch.randn(3, 2, 16).half(),
            torch.randn(2, 16, 8).half(),
            perm_x1=[1, 0, 2],
            perm_x2=[0, 1, 2],
            perm_y=[1, 0, 2],
        ),
        lambda: call(
            torch.randn(2, 3, 16).half(),
            torch.randn(2, 16, 8).half(),
            scale=(torch.rand(16) * 9).view(torch.int32).long(),
            perm_y=[1, 0, 2],
        ),
    ),
)
def npu_transpose_batchmatmul(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """Contiguous, of the dtype of ``input``: (M, B, N), or (f, M, B * N / f) for ``batch_split_factor`` f; int8 with scale."""
    if bias is not None:
        raise unsupported(_NAME, "bias", "a tensor", "None")
    if torch.bfloat16 in {input.dtype, weight.dtype} and input.dtype != weight.dtype:
        raise refused(_NAME, "weight", weight.dtype, f"of the dtype of input, {input.dtype}")
    if input.dim() != 3 or weight.dim() != 3:
        raise ValueError(
            f"{_NAME}: input and weight must have 3 dimensions; they have shapes "
            f"{tuple(input.shape)} and {tuple(weight.shape)}."
        )
    left = input.permute(_permutation("perm_x1", perm_x1))
    right = weight.permute(_permutation("perm_x2", perm_x2))
    dtype = compute_dtype(input, weight)
    product = torch.bmm(left.to(dtype), right.to(dtype))
    wide = product.permute(_permutation("perm_y", perm_y))
    if scale is not None:
        return round_to_int8(wide.reshape(wide.shape[0], 1, -1) * scale_of(scale).to(dtype))
    out = wide.to(input.dtype).contiguous()
    factor = batch_split_factor or 1
    if factor == 1:
        return out
    m, batches, n = out.shape
    if factor < 1 or batches % factor:
        raise ValueError(f"{_NAME}: batch_split_factor must divide the {batches} batches; it is {factor}.")
    return out.view(m, factor, batches * n // factor).transpose(0, 1).contiguous()
