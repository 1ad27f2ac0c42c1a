"""Attention over a paged cache, of the ATB library. What it computes is not written down yet."""

from __future__ import annotations

from npugraph_ex.operators._record import Operator
from npugraph_ex.operators._registry import OPERATORS

OPERATORS.add(
    Operator(
        name="atb::_npu_paged_attention",
        source="operator documentation of torch_npu._npu_paged_attention",
        host_arguments=("context_lens",),
    )
)
