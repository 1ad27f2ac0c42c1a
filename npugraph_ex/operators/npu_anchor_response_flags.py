"""Which anchors of a feature map are responsible for a true box: those of the cell in which the box's centre lies.

Formula: operator documentation of ``torch_npu.npu_anchor_response_flags``.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_anchor_response_flags",
    source="operator documentation of torch_npu.npu_anchor_response_flags",
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.rand(5, 4) * 20, [4, 6], [5, 5], 3),),
)
def npu_anchor_response_flags(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    featmap_size: list[int],
    stride: list[int],
    num_base_anchors: int,
) -> torch.Tensor:
    """[height * width * num_base_anchors] of uint8, from boxes [N, 4] by corners; ``featmap_size`` is height and width.

    ``stride[0]`` divides x and ``stride[1]`` y, as the document's reference has it.
    """
    height, width = featmap_size
    wide = input.to(compute_dtype(input))
    x, y = ((wide[:, axis] + wide[:, axis + 2]) * 0.5 / stride[axis] for axis in (0, 1))
    cell = y.floor().long().clamp(0, height - 1) * width + x.floor().long().clamp(0, width - 1)
    flags = torch.zeros(height * width, dtype=torch.uint8, device=input.device)
    return flags.index_fill(0, cell, 1).repeat_interleave(num_base_anchors)
