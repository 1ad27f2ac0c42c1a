"""Dynamic quantisation with zero points. What it computes is not written down yet."""

from __future__ import annotations

from npugraph_ex.operators._record import Operator
from npugraph_ex.operators._registry import OPERATORS

OPERATORS.add(
    Operator(
        name="npu::npu_dynamic_quant_asymmetric",
        source="operator documentation of torch_npu.npu_dynamic_quant_asymmetric",
        synonyms={"dst_type": {1: None}},
    )
)
