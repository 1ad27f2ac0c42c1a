"""The projections before multi-head latent attention, two versions. What they compute is not written down yet.

Its documentation calls the caches updated in place, and op-plugin returns the very tensors it was given;
the schema marks neither.
"""

from __future__ import annotations

from npugraph_ex.operators._record import Operator
from npugraph_ex.operators._registry import OPERATORS

OPERATORS.add(
    Operator(
        name="npu::npu_mla_prolog",
        source="operator documentation of torch_npu.npu_mla_prolog; op-plugin",
        writes=("kv_cache", "kr_cache"),
    )
)

OPERATORS.add(
    Operator(
        name="npu::npu_mla_prolog_v2",
        source="operator documentation of torch_npu.npu_mla_prolog_v2; op-plugin",
        writes=("kv_cache", "kr_cache"),
    )
)
