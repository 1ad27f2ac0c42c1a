"""Experts' products in int8 with SwiGLU: vLLM-Ascend's own copy of ``npu_grouped_matmul_swiglu_quant`` (csrc/gmm).

Same formula. Not covered: ``swiglu_limit``.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_grouped_matmul_swiglu_quant import npu_grouped_matmul_swiglu_quant

_NAME = "_C_ascend::grouped_matmul_swiglu_quant_weight_nz"


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del weight, group_list, bias, offset, swiglu_limit
    output = x.new_empty(x.shape[0], weight_scale.shape[-1] // 2, dtype=torch.int8)
    return output, x_scale.new_empty(x.shape[0], dtype=torch.float32), x_scale.new_empty((), dtype=torch.float32)


@Operator(
    name=_NAME,
    source="vLLM-Ascend, csrc/torch_binding.cpp and csrc/gmm/grouped_matmul_swiglu_quant",
    dtypes=(torch.float32,),
    schema=(
        "(Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale, Tensor group_list, *, Tensor? bias=None, "
        "Tensor? offset=None, float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale, Tensor output_offset)"
    ),
    fake=_fake,
    examples=(
        lambda: call(
            *(torch.randint(-8, 8, size, dtype=torch.int8) for size in ((5, 16), (2, 16, 8))),
            torch.rand(2, 8), torch.rand(5), torch.tensor([2, 5]),
        ),
    ),
)  # fmt: skip
def grouped_matmul_swiglu_quant_weight_nz(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``npu_grouped_matmul_swiglu_quant``."""
    if swiglu_limit:
        raise unsupported(_NAME, "swiglu_limit", swiglu_limit, "0.0, no limit")
    return npu_grouped_matmul_swiglu_quant(x, weight, group_list, weight_scale, x_scale, bias=bias, offset=offset)
