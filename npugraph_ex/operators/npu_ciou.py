"""Generalised, distance and complete intersection over union of boxes, and their gradients.

Formulas (op-plugin: the references of its tests; the papers on GIoU and DIoU), with C the box around both, c its diagonal, d the
distance of the centres, e = 1e-9 and e' = 1e-16::

    GIoU = inter / (union + e') - (C - union) / C
    DIoU = inter / union - d^2 / c^2
    CIoU = DIoU - v * a,    v = (4 / pi^2) * (atan(W / H) - atan(w / h))^2,    a = v / (1 + e - IoU + v)

In DIoU and CIoU e is added to heights, union and c^2; with ``mode`` 1 the area of the truth stands for the union. In the gradient
of CIoU a and d^2 / c^2 are constant, as the reference of op-plugin's test has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from npugraph_ex.operators._gradients import gradients
from npugraph_ex.operators._precision import compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Operator, call

_EPSILON, _SMALL = 1e-9, 1e-16
_DTYPES = (torch.float16, torch.float32)
_Corners = tuple[torch.Tensor, torch.Tensor]


def _corners(boxes: torch.Tensor, trans: bool) -> _Corners:
    """Lower and upper corners [2, n] of boxes [4, n]: centre and size with ``trans``, else the corners."""
    if boxes.dim() != 2 or boxes.shape[0] != 4:
        raise refused("npu_ciou", "the shape of boxes", boxes.shape, "[4, n]")
    first, second = boxes[:2], boxes[2:]
    return (first - second / 2, first + second / 2) if trans else (first, second)


def _pairs(boxes: torch.Tensor, truths: torch.Tensor, trans: bool, is_cross: bool) -> tuple[_Corners, _Corners]:
    """Corners that broadcast to [2, 1, n], or [2, m, n] where each box meets each truth."""
    mine, theirs = _corners(boxes, trans), _corners(truths, trans)
    place = -1 if is_cross else -2
    return (mine[0].unsqueeze(-2), mine[1].unsqueeze(-2)), (theirs[0].unsqueeze(place), theirs[1].unsqueeze(place))


def _inter(mine: _Corners, theirs: _Corners) -> torch.Tensor:
    return (torch.minimum(mine[1], theirs[1]) - torch.maximum(mine[0], theirs[0])).clamp(min=0).prod(0)


def _around(mine: _Corners, theirs: _Corners) -> torch.Tensor:
    """Sides of the box around both."""
    return torch.maximum(mine[1], theirs[1]) - torch.minimum(mine[0], theirs[0])


def _giou(boxes: torch.Tensor, truths: torch.Tensor, trans: bool, is_cross: bool) -> torch.Tensor:
    mine, theirs = _pairs(boxes, truths, trans, is_cross)
    inter, around = _inter(mine, theirs), _around(mine, theirs).prod(0)
    union = (mine[1] - mine[0]).prod(0) + (theirs[1] - theirs[0]).prod(0) - inter + _SMALL
    return inter / union - (around - union) / around


def _distances(
    boxes: torch.Tensor, truths: torch.Tensor, trans: bool, is_cross: bool, mode: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """DIoU, IoU, and the difference of the angles of the boxes' diagonals."""
    mine, theirs = _pairs(boxes, truths, trans, is_cross)
    inter = _inter(mine, theirs)
    (w1, h1), (w2, h2) = (mine[1] - mine[0]).unbind(), (theirs[1] - theirs[0]).unbind()
    h1, h2 = h1 + _EPSILON, h2 + _EPSILON
    iou = inter / ((w2 * h2 if mode else w1 * h1 + w2 * h2 - inter) + _EPSILON)
    diagonal = _around(mine, theirs).square().sum(0) + _EPSILON
    apart = (theirs[0] + theirs[1] - mine[0] - mine[1]).square().sum(0) / 4
    return iou - apart / diagonal, iou, torch.atan(w2 / h2) - torch.atan(w1 / h1)


def _diou(boxes: torch.Tensor, truths: torch.Tensor, trans: bool, is_cross: bool, mode: int) -> torch.Tensor:
    return _distances(boxes, truths, trans, is_cross, mode)[0]


def _ciou(
    boxes: torch.Tensor, truths: torch.Tensor, trans: bool, is_cross: bool, mode: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """CIoU and the difference of the angles."""
    diou, iou, angle = _distances(boxes, truths, trans, is_cross, mode)
    v = 4 / math.pi**2 * angle.square()
    alpha = (v / (1 + _EPSILON - iou + v)).detach()
    apart = (iou - diou).detach()
    return iou - apart - v * alpha, angle


def _check(operator: str, mode: int) -> None:
    if mode not in {0, 1}:
        raise unsupported(operator, "mode", mode, "0 (IoU) and 1 (IoF)")


def _backward(
    function: Callable[..., torch.Tensor], grad: torch.Tensor, boxes: torch.Tensor, truths: torch.Tensor, *how: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both, in float16 if one of them is."""
    to_boxes, to_truths = gradients(lambda b, t: function(b, t, *how), (boxes, truths), (grad,))
    half = torch.float16 in {boxes.dtype, truths.dtype}
    return tuple(value.half() if half else value for value in (to_boxes, to_truths))


def _boxes() -> torch.Tensor:
    return torch.cat((torch.rand(2, 5) * 4, torch.rand(2, 5) * 4 + 1))


def _forward(result: torch.Tensor, boxes: torch.Tensor, truths: torch.Tensor) -> torch.Tensor:
    half = torch.float16 in {boxes.dtype, truths.dtype}
    return (result.half() if half else result).contiguous()


def _wide(boxes: torch.Tensor, truths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = compute_dtype(boxes, truths)
    return boxes.to(dtype), truths.to(dtype)


@Operator(
    name="npu::npu_giou",
    source="operator documentation of torch_npu.npu_giou; op-plugin",
    dtypes=_DTYPES,
    examples=(lambda: call(_boxes(), _boxes(), True),),
)
def npu_giou(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gtboxes: torch.Tensor,
    trans: bool = False,
    is_cross: bool = False,
    mode: int = 0,
) -> torch.Tensor:
    """[n, 1] of boxes [4, n]; the device covers ``trans`` alone, boxes by centre and size, each with the truth of its place."""
    if not trans or is_cross or mode != 0:
        raise refused("npu_giou", "(trans, is_cross, mode)", (trans, is_cross, mode), "(True, False, 0)")
    # Transposed, not copied: op-plugin hands out a view of the device's result.
    return _forward(_giou(*_wide(input, gtboxes), trans, is_cross), input, gtboxes).mT


@Operator(
    name="npu::npu_giou_backward",
    source="operator documentation of torch_npu.npu_giou; op-plugin",
    dtypes=_DTYPES,
    examples=(lambda: call(torch.randn(5, 1), _boxes(), _boxes(), True),),
)
def npu_giou_backward(
    grad: torch.Tensor,
    bboxes: torch.Tensor,
    gtboxes: torch.Tensor,
    trans: bool = False,
    is_cross: bool = False,
    mode: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both boxes [4, n]; arguments as the device's ``npu_giou`` covers them."""
    if not trans or is_cross or mode != 0:
        raise refused("npu_giou_backward", "(trans, is_cross, mode)", (trans, is_cross, mode), "(True, False, 0)")
    return _backward(_giou, grad.reshape(1, -1), bboxes, gtboxes, trans, is_cross)


@Operator(
    name="npu::npu_diou",
    source="operator documentation of torch_npu.npu_diou; op-plugin",
    dtypes=_DTYPES,
    examples=(lambda: call(_boxes(), _boxes(), True),),
)
def npu_diou(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gtboxes: torch.Tensor,
    trans: bool = False,
    is_cross: bool = False,
    mode: int = 0,
) -> torch.Tensor:
    """[1, n] of boxes [4, n], or [m, n] where each of n boxes meets each of m truths; ``trans``: by centre and size."""
    _check("npu_diou", mode)
    return _forward(_diou(*_wide(input, gtboxes), trans, is_cross, mode), input, gtboxes)


@Operator(
    name="npu::npu_diou_backward",
    source="operator documentation of torch_npu.npu_diou; op-plugin",
    dtypes=_DTYPES,
    examples=(lambda: call(torch.randn(1, 5), _boxes(), _boxes(), True),),
)
def npu_diou_backward(
    grad: torch.Tensor,
    bboxes: torch.Tensor,
    gtboxes: torch.Tensor,
    trans: bool = False,
    is_cross: bool = False,
    mode: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both boxes."""
    _check("npu_diou_backward", mode)
    return _backward(_diou, grad, bboxes, gtboxes, trans, is_cross, bool(mode))


@Operator(
    name="npu::_npu_ciou",
    source="operator documentation of torch_npu.npu_ciou; op-plugin",
    dtypes=_DTYPES,
    examples=(lambda: call(_boxes(), _boxes(), True, False, 0, True),),
)
def _npu_ciou(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gtboxes: torch.Tensor,
    trans: bool = False,
    is_cross: bool = True,
    mode: int = 0,
    atan_sub_flag: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(CIoU, angles)``, shapes as in ``npu_diou``: the angles are those that the gradient takes, 0 without the flag."""
    _check("_npu_ciou", mode)
    found, angle = _ciou(*_wide(input, gtboxes), trans, is_cross, mode)
    kept = angle if atan_sub_flag else torch.zeros_like(angle)
    return _forward(found, input, gtboxes), _forward(kept, input, gtboxes)


@Operator(
    name="npu::npu_ciou",
    source="operator documentation of torch_npu.npu_ciou; op-plugin",
    dtypes=_DTYPES,
    examples=(lambda: call(_boxes(), _boxes(), True, False),),
)
def npu_ciou(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gtboxes: torch.Tensor,
    trans: bool = False,
    is_cross: bool = True,
    mode: int = 0,
    atan_sub_flag: bool = False,
) -> torch.Tensor:
    """The first result of ``_npu_ciou``."""
    return _npu_ciou(input, gtboxes, trans, is_cross, mode, atan_sub_flag)[0]


@Operator(
    name="npu::npu_ciou_backward",
    source="operator documentation of torch_npu.npu_ciou; op-plugin",
    dtypes=_DTYPES,
    examples=(lambda: call(torch.randn(1, 5), _boxes(), _boxes(), torch.zeros(1, 5), True, False),),
)
def npu_ciou_backward(
    grad: torch.Tensor,
    bboxes: torch.Tensor,
    gtboxes: torch.Tensor,
    atan_sub: torch.Tensor | None,
    trans: bool = False,
    is_cross: bool = True,
    mode: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both boxes."""
    _check("npu_ciou_backward", mode)
    return _backward(lambda *operands: _ciou(*operands)[0], grad, bboxes, gtboxes, trans, is_cross, bool(mode))
