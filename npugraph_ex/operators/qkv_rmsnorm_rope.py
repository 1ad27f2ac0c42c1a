"""Splits a fused projection into query, key and value, normalises the heads of the first two and embeds positions.

``vllm::qkv_rmsnorm_rope`` is a custom operator of vLLM-Ascend, not of torch_npu. Formula (its source,
vllm_ascend/ops/triton/linearnorm/split_qkv_rmsnorm_rope.py)::

    q, k, v = split of the last dimension of input
    q       = rope(rms_norm(q, q_weight, eps) + q_bias), head by head; k likewise
    v       = v

The norm, with its bias, is rounded once before it is embedded. The published kernel rounds it to bfloat16 whatever
the dtype of the input is; this reference rounds to the input's dtype, which for bfloat16 is the same. The kernel also
embeds in bfloat16, where this rounds once more at the end only: the last digit may differ.
"""

from __future__ import annotations

from typing import Any

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_rms_norm import normalise
from npugraph_ex.operators.npu_rotary_embedding import embed


def _example() -> Call:
    angles, weights = torch.rand(8, 8), torch.rand(2, 16) + 0.5
    table = torch.cat((angles.cos(), angles.sin()), -1)
    return call(torch.randn(3, 128), table, torch.tensor([3, 0, 5]), *weights, 64, 32, 16, 1e-6)


def _fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    x, q_size, kv_size = arguments[0], arguments[5], arguments[6]
    return tuple(x.new_empty(x.shape[0], size) for size in (q_size, kv_size, kv_size))


@Operator(
    name="vllm::qkv_rmsnorm_rope",
    source="vllm_ascend/ops/triton/linearnorm/split_qkv_rmsnorm_rope.py",
    schema=(
        "(Tensor input, Tensor cos_sin_cache, Tensor positions, Tensor q_weight, Tensor k_weight, SymInt q_hidden_size, "
        "SymInt kv_hidden_size, SymInt head_dim, float eps, Tensor? q_bias=None, Tensor? k_bias=None"
        ") -> (Tensor, Tensor, Tensor)"
    ),
    fake=_fake,
    examples=(_example,),
)
def qkv_rmsnorm_rope(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(q, k, v)``, contiguous, dtype of ``input``: (tokens, q_hidden_size) and twice (tokens, kv_hidden_size).

    ``input``: (tokens, q_hidden_size + 2 * kv_hidden_size); weights and biases: (head_dim,); the other two as in
    ``npu_rotary_embedding``, whose rotated part is as wide as ``cos_sin_cache``.
    """
    if input.dim() != 2 or input.shape[-1] != q_hidden_size + 2 * kv_hidden_size:
        raise ValueError(
            f"qkv_rmsnorm_rope: input must have shape (tokens, {q_hidden_size} + 2 * {kv_hidden_size}); "
            f"it has shape {tuple(input.shape)}."
        )
    q, k, v = input.split([q_hidden_size, kv_hidden_size, kv_hidden_size], dim=-1)
    embedded = []
    for x, weight, bias in ((q, q_weight, q_bias), (k, k_weight, k_bias)):
        heads = x.reshape(x.shape[0], x.shape[1] // head_dim, head_dim)
        normed, _ = normalise(heads, weight, eps, compute_dtype(heads, weight))
        normed = normed if bias is None else normed + bias
        embedded.append(embed(normed.to(input.dtype), positions, cos_sin_cache).to(input.dtype).reshape(x.shape))
    return embedded[0], embedded[1], v.clone(memory_format=torch.contiguous_format)
