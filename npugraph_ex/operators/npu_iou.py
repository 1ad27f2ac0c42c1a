"""Overlap of two sets of boxes: intersection over union, or over the second box.

Formula (operator documentation of ``torch_npu.npu_iou``; op-plugin passes epsilon, and its test's numbers tell where it is added)::

    inter = (min(x2, X2) - max(x1, X1)) * (min(y2, Y2) - max(y1, Y1))      0 where one of the factors is below 0
    area  = (x2 - x1 + 0.01) * (y2 - y1 + 0.01)
    IoU   = inter / (area + AREA - inter)          IoF = inter / AREA

That is the formula of the chips before the 950; those add epsilon to the intersection's sides, too, and are not covered. Boxes are
rounded to float16 first, as op-plugin does.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call

_EPSILON = 0.01
_SOURCE = "operator documentation of torch_npu.npu_iou; op-plugin"
_DTYPES = (torch.float16,)


def _boxes(count: int) -> torch.Tensor:
    corner = torch.rand(count, 2) * 20
    return torch.cat((corner, corner + torch.rand(count, 2) * 20), 1).half()


@Operator(name="npu::npu_iou", source=_SOURCE, dtypes=_DTYPES, examples=(lambda: call(_boxes(3), _boxes(4)),))
def npu_iou(bboxes: torch.Tensor, gtboxes: torch.Tensor, mode: int = 0) -> torch.Tensor:
    """[M, N] in bboxes' dtype, of boxes ``bboxes`` [N, 4] and ``gtboxes`` [M, 4] as x1, y1, x2, y2; ``mode`` 0 is IoU, 1 IoF."""
    if mode not in {0, 1}:
        raise unsupported("npu_iou", "mode", mode, "0 (IoU) and 1 (IoF)")
    dtype = compute_dtype(bboxes, gtboxes)
    given = (bboxes, gtboxes) if dtype == torch.float64 else (bboxes.half(), gtboxes.half())
    box, truth = given[0].to(dtype).unsqueeze(0), given[1].to(dtype).unsqueeze(1)
    sides = torch.minimum(box[..., 2:], truth[..., 2:]) - torch.maximum(box[..., :2], truth[..., :2])
    inter = sides.clamp(min=0).prod(-1)
    area, wanted = ((corners[..., 2:] - corners[..., :2] + _EPSILON).prod(-1) for corners in (box, truth))
    return (inter / (wanted if mode else area + wanted - inter)).to(bboxes.dtype)


@Operator(name="npu::npu_ptiou", source=_SOURCE, dtypes=_DTYPES, examples=(lambda: call(_boxes(3), _boxes(4), 1),))
def npu_ptiou(bboxes: torch.Tensor, gtboxes: torch.Tensor, mode: int = 0) -> torch.Tensor:
    """As ``npu_iou``: op-plugin calls it."""
    return npu_iou(bboxes, gtboxes, mode)
