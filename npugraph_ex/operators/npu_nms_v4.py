"""Non-maximum suppression: the boxes of the highest scores, without those that overlap a better one too much.

Formula (operator documentation of ``torch_npu.npu_nms_v4``; CANN's operator is TensorFlow's NonMaxSuppressionV4): of the boxes
with a score above ``scores_threshold`` the best is selected, all whose intersection over union with it is above
``iou_threshold`` are dropped, and so on, up to ``max_output_size`` times. Two opposite corners give a box, in any order.

The result always has ``max_output_size`` places, as op-plugin allocates it; those behind the last selected box are 0.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_nms_v4",
    source="operator documentation of torch_npu.npu_nms_v4; TensorFlow's NonMaxSuppressionV4",
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.rand(9, 4), torch.rand(9), 6, torch.tensor(0.2), torch.tensor(0.3)),),
)
def npu_nms_v4(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    scores: torch.Tensor,
    max_output_size: float,
    iou_threshold: torch.Tensor,
    scores_threshold: torch.Tensor,
    pad_to_max_output_size: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [max_output_size] and their number [], both int32, of boxes [N, 4] with scores [N]; the thresholds are []."""
    del pad_to_max_output_size
    wide = compute_dtype(input, scores)
    low, high = input.to(wide).unflatten(-1, (2, 2)).aminmax(dim=1)
    area = (high - low).prod(-1)
    sides = torch.minimum(high.unsqueeze(1), high) - torch.maximum(low.unsqueeze(1), low)
    inter = sides.clamp(min=0).prod(-1)
    overlapping = inter / (area.unsqueeze(1) + area - inter) > iou_threshold.to(wide)
    overlapping = overlapping | torch.eye(len(area), dtype=torch.bool, device=input.device)
    dropped = scores.to(wide) <= scores_threshold.to(wide)
    selected = torch.zeros(int(max_output_size), dtype=torch.int32, device=input.device)
    number = torch.zeros((), dtype=torch.int32, device=input.device)
    for place in range(len(selected)):
        best = torch.where(dropped, -torch.inf, scores.to(wide)).argmax()
        selected[place] = best  # the first of equals: 0 where no box is left
        number += ~dropped.all()
        dropped = dropped | overlapping[best]
    return selected, number
