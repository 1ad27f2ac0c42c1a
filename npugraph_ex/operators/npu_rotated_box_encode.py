"""What a rotated box is beside its anchor, and back.

Formula (op-plugin, test/test_base_ops/test_rotated_box.py, whose numbers it gives), of an anchor and a box [B, 5, N] as x1, y1, x2,
y2 and an angle in degrees, with middle c and size s of each::

    code = (c_box - c_anchor) / s_anchor,  log(s_box / s_anchor),  tan(angle_box) - tan(angle_anchor)

``weight`` stands in the documentation, and what it does does not; only ones are covered.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call

_DTYPES = (torch.float16, torch.float32)
_SOURCE = "operator documentation of torch_npu.{}; op-plugin, test/test_base_ops/test_rotated_box.py"


def _box() -> torch.Tensor:
    low = torch.rand(2, 2, 3) * 9
    return torch.cat([low, low + torch.rand(2, 2, 3) * 9 + 1, torch.rand(2, 1, 3) * 80], 1)


def _parts(box: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Middle and size [B, 2, N], and the tangent [B, 1, N]."""
    low, high, angle = box.to(dtype).split((2, 2, 1), 1)
    return (low + high) / 2, high - low, torch.tan(torch.deg2rad(angle))


def _refuse_weights(operator: str, weight: torch.Tensor) -> None:
    if bool((weight != 1).any()):
        raise unsupported(operator, "weight", weight.tolist(), "ones")


@Operator(
    name="npu::npu_rotated_box_encode",
    source=_SOURCE.format("npu_rotated_box_encode"),
    dtypes=_DTYPES,
    examples=(lambda: call(_box(), _box(), torch.ones(5)),),
)
def npu_rotated_box_encode(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    gt_bboxes: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """[B, 5, N] in the anchors' dtype, of anchors and boxes [B, 5, N]."""
    _refuse_weights("npu_rotated_box_encode", weight)
    dtype = compute_dtype(input, gt_bboxes)
    (middle, size, tangent), (to_middle, to_size, to_tangent) = (_parts(box, dtype) for box in (input, gt_bboxes))
    code = torch.cat([(to_middle - middle) / size, torch.log(to_size / size), to_tangent - tangent], 1)
    return code.to(input.dtype)


@Operator(
    name="npu::npu_rotated_box_decode",
    source=_SOURCE.format("npu_rotated_box_decode"),
    dtypes=_DTYPES,
    examples=(lambda: call(_box(), torch.randn(2, 5, 3), torch.ones(5)),),
)
def npu_rotated_box_decode(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    deltas: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """[B, 5, N] in the anchors' dtype, of anchors and codes [B, 5, N]."""
    _refuse_weights("npu_rotated_box_decode", weight)
    dtype = compute_dtype(input, deltas)
    (middle, size, tangent), (to_middle, to_size, to_tangent) = (
        _parts(input, dtype),
        deltas.to(dtype).split((2, 2, 1), 1),
    )
    middle, half = middle + to_middle * size, size * torch.exp(to_size) / 2
    angle = torch.rad2deg(torch.atan(tangent + to_tangent))
    return torch.cat([middle - half, middle + half, angle], 1).to(input.dtype)
