"""Overlap of two sets of rotated boxes: the area of the intersection, and its share of the union.

Formula (operator documentation of ``torch_npu.npu_rotated_iou``; op-plugin's tests of it, of the overlaps and of the rotated
suppression): a box x, y, w, h, t is the rectangle of width w and height h around (x, y), turned by t degrees from the first axis
to the second; with ``trans`` it is given by its corners before the turn, x1, y1, x2, y2, t. The intersection of two is the convex
polygon of the corners that lie in the other box and of the points where edges cross. A box without positive area overlaps nothing.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Operator, call

__all__ = ["npu_rotated_iou", "npu_rotated_overlaps", "overlaps"]

_DTYPES = (torch.float16, torch.float32)
_SOURCE = "operator documentation of torch_npu.{0}; op-plugin, test/test_base_ops/test_{1}.py"
_NEAR = 1e-12
"""How far outside an edge, or parallel, a point or edge may be, in the unit of the longest side."""


def _boxes(count: int) -> torch.Tensor:
    return torch.cat([torch.rand(1, count, 2) * 9, torch.rand(1, count, 2) * 9 + 1, torch.rand(1, count, 1) * 180], -1)


def _corners(boxes: torch.Tensor) -> torch.Tensor:
    """The corners [..., 4, 2] of boxes [..., 5], one behind the other around the box."""
    sides = boxes.new_tensor([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
    at = sides * boxes[..., None, 2:4]
    angle = torch.deg2rad(boxes[..., 4])
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    turned = torch.stack([at[..., 0] * cos - at[..., 1] * sin, at[..., 0] * sin + at[..., 1] * cos], -1)
    return turned + boxes[..., None, :2]


def _cross(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def _inside(points: torch.Tensor, start: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
    """Which of ``points`` [..., 4, 2] lie left of all edges [..., 4, 2] from ``start``."""
    return (_cross(edge.unsqueeze(-3), points.unsqueeze(-2) - start.unsqueeze(-3)) >= -_NEAR).all(-1)


def overlaps(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The area of the intersection of boxes [..., 5], float64."""
    first, second = torch.broadcast_tensors(first.double(), second.double())
    unit = (
        torch.maximum(first.abs(), second.abs())[..., 2:4]
        .amax(-1)
        .clamp(min=torch.finfo(torch.float32).tiny)[..., None, None]
    )
    middle = ((first + second) / 2)[..., None, :2]
    p, q = ((_corners(boxes) - middle) / unit for boxes in (first, second))
    r, s = (corners.roll(-1, -2) - corners for corners in (p, q))
    between = q.unsqueeze(-3) - p.unsqueeze(-2)
    slope = _cross(r.unsqueeze(-2), s.unsqueeze(-3))
    along = _cross(between, s.unsqueeze(-3)) / slope
    other = _cross(between, r.unsqueeze(-2)) / slope
    meets = (slope.abs() > _NEAR) & (along >= 0) & (along <= 1) & (other >= 0) & (other <= 1)
    crossings = p.unsqueeze(-2) + along.nan_to_num(0.0, 0.0, 0.0).unsqueeze(-1) * r.unsqueeze(-2)
    points = torch.cat([crossings.flatten(-3, -2), p, q], -2)
    counts = torch.cat([meets.flatten(-2), _inside(p, q, s), _inside(q, p, r)], -1)
    # A point that does not count stands at the place of the first one that does, where it changes no area.
    anchor = torch.take_along_dim(points, counts.long().argmax(-1)[..., None, None], -2)
    points = torch.where(counts.unsqueeze(-1), points, anchor)
    around = (
        points - (points * counts.unsqueeze(-1)).sum(-2, keepdim=True) / counts.sum(-1).clamp(min=1)[..., None, None]
    )
    order = torch.atan2(around[..., 1], around[..., 0]).argsort(-1)
    around = torch.take_along_dim(around, order.unsqueeze(-1), -2)
    area = _cross(around, around.roll(-1, -2)).sum(-1).abs() / 2
    there = counts.any(-1) & (first[..., 2:4].prod(-1) > 0) & (second[..., 2:4].prod(-1) > 0)
    return torch.where(there, area, 0.0) * unit[..., 0, 0] ** 2


def _middles(boxes: torch.Tensor, *, trans: bool) -> torch.Tensor:
    """Boxes as x, y, w, h, t; with ``trans`` they are x1, y1, x2, y2, t: the corners before the turn."""
    if not trans:
        return boxes
    low, high = boxes.double()[..., :2], boxes.double()[..., 2:4]
    return torch.cat([(low + high) / 2, high - low, boxes.double()[..., 4:]], -1)


@Operator(
    name="npu::npu_rotated_overlaps",
    source=_SOURCE.format("npu_rotated_overlaps", "rotated_overlaps"),
    dtypes=_DTYPES,
    examples=(lambda: call(_boxes(3), _boxes(4)),),
)
def npu_rotated_overlaps(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    query_boxes: torch.Tensor,
    trans: bool = False,
) -> torch.Tensor:
    """[B, N, K] in the first's dtype: the common area of boxes [B, N, 5] and [B, K, 5]."""
    first, second = (_middles(boxes, trans=trans) for boxes in (input, query_boxes))
    return overlaps(first.unsqueeze(-2), second.unsqueeze(-3)).to(input.dtype)


@Operator(
    name="npu::npu_rotated_iou",
    source=_SOURCE.format("npu_rotated_iou", "rotated_iou"),
    dtypes=_DTYPES,
    examples=(lambda: call(_boxes(3), _boxes(4)),),
)
def npu_rotated_iou(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    query_boxes: torch.Tensor,
    trans: bool = False,
    mode: int = 0,
    is_cross: bool = True,
    v_threshold: float = 0.0,
    e_threshold: float = 0.0,
) -> torch.Tensor:
    """[B, N, K] in the first's dtype, of boxes [B, N, 5] and [B, K, 5]: the share of the union."""
    if mode != 0:
        raise unsupported("npu_rotated_iou", "mode", mode, "0: CANN's operator RotatedIou takes 'iou' alone")
    covered = (("is_cross", is_cross, True), ("v_threshold", v_threshold, 0.0), ("e_threshold", e_threshold, 0.0))
    for name, value, only in covered:
        if value != only:
            raise unsupported("npu_rotated_iou", name, value, repr(only))
    first, second = _middles(input, trans=trans).unsqueeze(-2), _middles(query_boxes, trans=trans).unsqueeze(-3)
    common = overlaps(first, second)
    areas = (boxes.double()[..., 2:4].prod(-1) for boxes in (first, second))
    return (common / (sum(areas) - common)).nan_to_num(0.0).to(input.dtype)
