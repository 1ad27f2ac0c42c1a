"""Non-maximum suppression of rotated boxes: those of the highest scores, without any that overlaps a better one too much.

Formula (operator documentation of ``torch_npu.npu_nms_rotated``; op-plugin's test): the boxes in the order of their scores, the
first of equals first, are kept if their score is above ``scores_threshold`` and their intersection over union with each kept
box is at most ``iou_threshold``, up to ``max_output_size`` of them, if that is not -1. With mode 1 a box is x1, y1, x2, y2, t, and
turned the other way.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_rotated_iou import overlaps


@Operator(
    name="npu::npu_nms_rotated",
    source="operator documentation of torch_npu.npu_nms_rotated; op-plugin, test/test_base_ops/test_nms_rotated.py",
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.rand(9, 5) * 9, torch.rand(9), 0.2),),
)
def npu_nms_rotated(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    scores: torch.Tensor,
    iou_threshold: float,
    scores_threshold: float = 0,
    max_output_size: int = -1,
    mode: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [M] and their number [1], both int32, of boxes [N, 5] with scores [N]."""
    if mode not in {0, 1}:
        raise unsupported("npu_nms_rotated", "mode", mode, "0 (x, y, w, h, t) and 1 (x1, y1, x2, y2, t)")
    boxes = input.double()
    if mode:
        low, high, angle = boxes[:, :2], boxes[:, 2:4], boxes[:, 4:]
        boxes = torch.cat([(low + high) / 2, high - low, -angle], 1)
    areas = boxes[:, 2:4].prod(-1)
    common = overlaps(boxes.unsqueeze(1), boxes)
    share = (common / (areas.unsqueeze(1) + areas - common)).nan_to_num(0.0)
    kept: list[int] = []
    for place in scores.double().argsort(descending=True, stable=True).tolist():
        if len(kept) == max_output_size or scores[place] <= scores_threshold:
            break
        if not kept or bool((share[place, kept] <= iou_threshold).all()):
            kept.append(place)
    return torch.tensor(kept, dtype=torch.int32), torch.tensor([len(kept)], dtype=torch.int32)
