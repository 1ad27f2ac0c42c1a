"""The rows of all ranks, gathered and multiplied by this rank's matrix.

Formula (operator documentation of ``torch_npu.npu_all_gather_base_mm``)::

    gathered = the ranks' input, one below the other
    floating:  out = gathered @ x2
    int8:      out = (the ranks' x1_scale) * x2_scale * (gathered @ x2)

Without ``gather_output`` the second result is empty.

``bias``, which the document allows only as zeros, adds nothing.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import refused
from npugraph_ex.operators._ranks import Exchange, Ranks, Steps
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_mm_all_reduce_base import check_plain, check_product
from npugraph_ex.operators.npu_mm_reduce_scatter_base import (
    check_bias,
    check_inner,
    check_mode,
    check_ranks,
    scaled_product,
)

_NAME = "npu_all_gather_base_mm"


def _halves(*size: int) -> torch.Tensor:
    return torch.randn(size).half() / 16


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_all_gather_base_mm",
    source="operator documentation of torch_npu.npu_all_gather_base_mm",
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(_halves(3, 256), _halves(256, 8), "group", 2, bias=torch.zeros(8).half()),
        lambda: call(_halves(3, 256), _halves(8, 256).t(), "group", 4, gather_output=False),
        lambda: call(
            _small(3, 256), _small(256, 8), "group", 2, x1_scale=torch.rand(3, 1), x2_scale=torch.rand(1, 8), comm_mode="aiv",
            output_dtype=torch.float16,
        ),
    ),
)  # fmt: skip
def npu_all_gather_base_mm(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> Steps:
    """``(out [m * world_size, n], gathered [m * world_size, k])``. input: [m, k]; x2: [k, n]; int8 ones with scales."""
    check_ranks(_NAME, world_size)
    check_plain(_NAME, comm_turn=comm_turn)
    check_product(_NAME, input, x2)
    check_inner(_NAME, x2.shape[0])
    check_mode(_NAME, input, x2, x1_scale, x2_scale, comm_mode)
    if gather_index != 0:
        raise refused(_NAME, "gather_index", gather_index, "0")
    check_bias(_NAME, bias)
    everyone: Ranks = yield Exchange(hcom, (input,) if x1_scale is None else (input, x1_scale), ranks=world_size)
    gathered = torch.cat([given[0] for given in everyone.parts])
    scale = None if x1_scale is None else torch.cat([given[1] for given in everyone.parts])
    out = scaled_product(gathered, x2, scale, x2_scale, output_dtype)
    return out, gathered if gather_output else input.new_empty(0)
