"""Rotary position embedding of queries and keys in place.

Formula (operator documentation of ``torch_npu.npu_apply_rotary_pos_emb``), that of ``npu_rotary_mul`` for both::

    x = cos * x + sin * rotated(x)          in the first elements of the last dimension, as many as cos has

The schema marks neither query nor key, and the results are the very tensors that were given.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_rotary_mul import rotated

_HEADS = {"BSND": 2, "SBND": 2, "BNSD": 1, "TND": 1}


def _example() -> Call:
    angle = torch.rand(2, 3, 1, 16)
    return call(
        torch.randn(2, 3, 4, 16).half(), torch.randn(2, 3, 2, 16).half(), angle.cos().half(), angle.sin().half()
    )


@Operator(
    name="npu::npu_apply_rotary_pos_emb",
    source="operator documentation of torch_npu.npu_apply_rotary_pos_emb; op-plugin; aclnnApplyRotaryPosEmb",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    floats_only=True,
    writes=("query", "key"),
    returns_written=(0, 1),
    alike=Alike(shape=("cos", "sin"), dtype=("query", "key", "cos", "sin")),
    examples=(_example,),
)
def npu_apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(query, key)``, changed: [B, S, N, D] or as ``layout`` says; ``cos`` and ``sin`` likewise with one head, or as [T, D]."""
    if layout not in _HEADS:
        raise unsupported("npu_apply_rotary_pos_emb", "layout", layout, ", ".join(_HEADS))
    dtype = compute_dtype(query, key, cos, sin)
    for x in (query, key):
        cosine, sine = (
            (factor if factor.dim() == x.dim() else factor.unsqueeze(_HEADS[layout])).to(dtype) for factor in (cos, sin)
        )
        part = x[..., : cos.shape[-1]]
        part.copy_(cosine * part.to(dtype) + sine * rotated(part.to(dtype), rotary_mode))
    return query, key
