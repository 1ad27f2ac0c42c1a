"""What a box is beside its anchor, as YOLO learns it.

Formula (op-plugin, test/test_base_ops/test_yolo_boxes_encode.py, whose numbers it gives; MMDetection, YOLOBBoxCoder), with middle c
and size s of anchor and box and the stride of each::

    code = clamp((c_box - c_anchor) / stride + 0.5, 1e-6, 1 - 1e-6),  log(max(s_box / s_anchor, 1e-6))
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_EPSILON = 1e-6


def _box() -> torch.Tensor:
    low = torch.rand(3, 2) * 9
    return torch.cat([low, low + torch.rand(3, 2) * 9 + 1], 1)


@Operator(
    name="npu::npu_yolo_boxes_encode",
    source="op-plugin, test/test_base_ops/test_yolo_boxes_encode.py; MMDetection, YOLOBBoxCoder",
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(_box(), _box(), torch.tensor([4, 8, 16], dtype=torch.int32)),),
)
def npu_yolo_boxes_encode(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    gt_bboxes: torch.Tensor,
    stride: torch.Tensor,
    performance_mode: bool = False,
) -> torch.Tensor:
    """[N, 4] in the anchors' dtype, of anchors and boxes [N, 4] as x1, y1, x2, y2 and strides [N], int32."""
    del performance_mode
    dtype = compute_dtype(input, gt_bboxes)
    low, high = input.to(dtype).split(2, 1)
    to_low, to_high = gt_bboxes.to(dtype).split(2, 1)
    middle = (to_low + to_high - low - high) / 2 / stride.unsqueeze(1) + 0.5
    size = (to_high - to_low) / (high - low)
    return torch.cat([middle.clamp(_EPSILON, 1 - _EPSILON), torch.log(size.clamp(min=_EPSILON))], 1).to(input.dtype)
