"""Rotated boxes: areas worked out by hand, suppression, codes that come back."""

from __future__ import annotations

import math

import pytest
import torch

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError


def test_common_areas() -> None:
    """A square of side 2 and itself turned by 45 degrees have an octagon in common; others a strip, all of the smaller, nothing."""
    square = torch.tensor([[[0.0, 0.0, 2.0, 2.0, 0.0]]], dtype=torch.float64)
    others = torch.tensor(
        [
            [
                [0, 0, 2, 2, 45],
                [1, 0, 2, 2, 90],
                [0.2, 0, 1, 0.5, 30],
                [4, 0, 2, 2, 10],
                [0, 0, 2, 2, 180],
                [0, 0, -2, 2, 0],
            ]
        ]
    ).double()
    areas = OPERATORS["npu::npu_rotated_overlaps"].formula(square, others)
    expected = torch.tensor([[[8 * (math.sqrt(2) - 1), 2.0, 0.5, 0.0, 4.0, 0.0]]]).double()
    torch.testing.assert_close(areas, expected)
    shares = OPERATORS["npu::npu_rotated_iou"].formula(square, others)
    torch.testing.assert_close(shares[0, 0, :5], torch.tensor([1 / (math.sqrt(2)), 1 / 3, 0.125, 0.0, 1.0]).double())
    corners = [
        torch.cat([boxes[..., :2] - boxes[..., 2:4] / 2, boxes[..., :2] + boxes[..., 2:4] / 2, boxes[..., 4:]], -1)
        for boxes in (square, others)
    ]
    torch.testing.assert_close(OPERATORS["npu::npu_rotated_overlaps"].formula(*corners, trans=True), expected)
    torch.testing.assert_close(OPERATORS["npu::npu_rotated_iou"].formula(*corners, trans=True), shares)
    with pytest.raises(UnsupportedArgumentError, match="mode=1"):
        OPERATORS["npu::npu_rotated_iou"].formula(square, others, mode=1)


def test_an_angle_turns_from_the_first_axis_to_the_second() -> None:
    """A long box turned by 30 degrees covers a small one at 30 degrees of its way, and none at -30."""
    long = torch.tensor([[[0.0, 0.0, 10.0, 1.0, 30.0]]])
    ways = torch.deg2rad(torch.tensor([30.0, -30.0]))
    small = torch.stack(
        [4 * torch.cos(ways), 4 * torch.sin(ways), *(torch.full((2,), side) for side in (0.1, 0.1, 0.0))], -1
    )[None]
    areas = OPERATORS["npu::npu_rotated_overlaps"].formula(long, small)
    torch.testing.assert_close(areas, torch.tensor([[[0.01, 0.0]]]))


def test_suppression_keeps_the_best() -> None:
    """In the order of the scores; what overlaps a kept box is dropped, what overlaps a dropped one is not."""
    boxes = torch.tensor(
        [[0.0, 0, 4, 4, 0], [1.0, 0, 4, 4, 0], [2.5, 0, 4, 4, 0], [9.0, 9, 1, 1, 45], [20.0, 0, 1, 1, 0]]
    )
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.1])
    nms = OPERATORS["npu::npu_nms_rotated"].formula
    assert [part.tolist() for part in nms(boxes, scores, 0.3, 0.2)] == [[0, 2, 3], [3]]
    assert nms(boxes, scores, 0.3, 0.2, 2)[0].tolist() == [0, 2]
    corners = torch.cat([boxes[:, :2] - boxes[:, 2:4] / 2, boxes[:, :2] + boxes[:, 2:4] / 2, boxes[:, 4:]], 1)
    assert nms(corners, scores, 0.3, 0.2, mode=1)[0].tolist() == [0, 2, 3]


def test_codes_of_rotated_boxes_come_back() -> None:
    """The code of a box beside its anchor, decoded, is the box; other weights than ones are refused."""
    low = torch.rand(2, 2, 5).double()
    anchor, box = (torch.cat([low, low + torch.rand(2, 2, 5) + 0.5, torch.rand(2, 1, 5) * 80], 1) for _ in range(2))
    encode, decode = (OPERATORS[f"npu::npu_rotated_box_{name}"].formula for name in ("encode", "decode"))
    code = encode(anchor, box, torch.ones(5))
    torch.testing.assert_close(decode(anchor, code, torch.ones(5)), box)
    flat = encode(
        torch.tensor([[[0.0], [0], [2], [4], [0]]]), torch.tensor([[[1.0], [0], [5], [4], [45]]]), torch.ones(5)
    )
    torch.testing.assert_close(flat.flatten(), torch.tensor([1.0, 0.0, math.log(2), 0.0, 1.0]))
    with pytest.raises(UnsupportedArgumentError, match="weight"):
        decode(anchor, code, torch.full((5,), 2.0))


def test_codes_of_yolo() -> None:
    """The step of the middle in strides, from the middle of the cell, and the logarithm of the sizes; both are cut off."""
    anchor = torch.tensor([[0.0, 0, 4, 4], [0.0, 0, 4, 4]])
    box = torch.tensor([[1.0, 0, 9, 4], [40.0, 0, 44, 0]])
    code = OPERATORS["npu::npu_yolo_boxes_encode"].formula(anchor, box, torch.tensor([8, 8], dtype=torch.int32))
    torch.testing.assert_close(
        code, torch.tensor([[0.875, 0.5, math.log(2), 0.0], [1 - 1e-6, 0.25, 0.0, math.log(1e-6)]])
    )
