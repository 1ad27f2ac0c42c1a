"""Rotary embedding and quantisation of keys and values, written to their caches. What it computes is not written down yet.

Its documentation calls the caches updated in place, and op-plugin returns the very tensors it was given;
the schema marks neither.
"""

from __future__ import annotations

from npugraph_ex.operators._record import Operator
from npugraph_ex.operators._registry import OPERATORS

OPERATORS.add(
    Operator(
        name="npu::npu_rope_quant_kvcache",
        source="operator documentation of torch_npu.npu_rope_quant_kvcache; op-plugin",
        writes=("k_cache", "v_cache"),
    )
)
