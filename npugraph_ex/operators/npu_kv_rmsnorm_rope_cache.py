"""Norm and rotary embedding of keys and values, written to their caches. What it computes is not written down yet.

Its documentation calls the caches updated in place, and op-plugin returns the very tensors it was given;
the schema marks neither. ``npu_kv_rmsnorm_rope_cache_v2`` tells the truth and needs no record.
"""

from __future__ import annotations

from npugraph_ex.operators._record import Operator
from npugraph_ex.operators._registry import OPERATORS

OPERATORS.add(
    Operator(
        name="npu::npu_kv_rmsnorm_rope_cache",
        source="operator documentation of torch_npu.npu_kv_rmsnorm_rope_cache; op-plugin",
        writes=("k_cache", "ckv_cache"),
    )
)
