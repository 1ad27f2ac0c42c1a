"""Boxes from proposals and the changes that a detector predicts, and those changes from boxes.

Formulas (operator documentation of ``torch_npu.npu_bounding_box_decode`` and ``npu_bounding_box_encode``; the numbers of its
examples tell that a side counts both its ends), with centre c and side s = x1 - x0 + 1 of a box in each direction::

    encode: d = (C - c) / s, log(S / s), each (d - mean) / std
    decode: d = delta * std + mean;  C = c + s * d;  S = s * exp(d), d within +-|log(wh_ratio_clip)|
            corners C -+ (S - 1) / 2, within 0 and max_shape - 1
"""

from __future__ import annotations

import math

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_DTYPES = (torch.float16, torch.float32)


def _centre_and_side(boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [N, 2], of corners [N, 4]."""
    return (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2] + 1


@Operator(
    name="npu::npu_bounding_box_decode",
    source="operator documentation of torch_npu.npu_bounding_box_decode",
    dtypes=_DTYPES,
    examples=(lambda: call(torch.rand(3, 4), torch.rand(3, 4), 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.5, [10, 8], 0.1),),
)
def npu_bounding_box_decode(
    rois: torch.Tensor,
    deltas: torch.Tensor,
    means0: float,
    means1: float,
    means2: float,
    means3: float,
    stds0: float,
    stds1: float,
    stds2: float,
    stds3: float,
    max_shape: list[int],
    wh_ratio_clip: float,
) -> torch.Tensor:
    """[N, 4] in rois' dtype: x0, y0, x1, y1, as ``rois`` [N, 4]; deltas [N, 4]; ``max_shape`` is height and width."""
    wide = rois.to(compute_dtype(rois, deltas))
    stds, means = (wide.new_tensor(each) for each in ((stds0, stds1, stds2, stds3), (means0, means1, means2, means3)))
    change = deltas.to(wide.dtype) * stds + means
    centre, side = _centre_and_side(wide)
    limit = abs(math.log(wh_ratio_clip))
    centre = centre + side * change[:, :2]
    reach = (side * change[:, 2:].clamp(-limit, limit).exp() - 1) / 2
    largest = wide.new_tensor([max_shape[1] - 1, max_shape[0] - 1] * 2)
    corners = torch.cat((centre - reach, centre + reach), 1)
    return torch.minimum(corners.clamp(min=0), largest).to(rois.dtype)


@Operator(
    name="npu::npu_bounding_box_encode",
    source="operator documentation of torch_npu.npu_bounding_box_encode",
    dtypes=_DTYPES,
    examples=(lambda: call(torch.rand(3, 4), torch.rand(3, 4), 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.5),),
)
def npu_bounding_box_encode(
    anchor_box: torch.Tensor,
    ground_truth_box: torch.Tensor,
    means0: float,
    means1: float,
    means2: float,
    means3: float,
    stds0: float,
    stds1: float,
    stds2: float,
    stds3: float,
) -> torch.Tensor:
    """[N, 4] in the boxes' dtype: the changes of centre and side, x then y; NaN for a truth of negative side."""
    wide = anchor_box.to(compute_dtype(anchor_box, ground_truth_box))
    centre, side = _centre_and_side(wide)
    wanted, wanted_side = _centre_and_side(ground_truth_box.to(wide.dtype))
    change = torch.cat(((wanted - centre) / side, torch.log(wanted_side / side)), 1)
    stds, means = (wide.new_tensor(each) for each in ((stds0, stds1, stds2, stds3), (means0, means1, means2, means3)))
    return ((change - means) / stds).to(anchor_box.dtype)
