"""Boxes of detectors: overlaps and their gradients, encoding, anchors; by hand, by their definitions, and against autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch_npu

from npugraph_ex.operators import OPERATORS


def formula(name: str) -> Callable:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula


# Centres and sizes of a square from 0 to 2 and one from 1 to 3, and the same by corners.
BY_CENTRE = torch.tensor([[1.0], [1], [2], [2]]), torch.tensor([[2.0], [2], [2], [2]])
BY_CORNER = torch.tensor([[0.0], [0], [2], [2]]), torch.tensor([[1.0], [1], [3], [3]])


def test_overlaps_by_hand() -> None:
    """They share 1 of 7; the box around both has 9, so GIoU is 1/7 - 2/9; centres are sqrt(2) apart, corners 3 sqrt(2)."""
    assert formula("npu_giou")(*BY_CENTRE, True).item() == pytest.approx(1 / 7 - 2 / 9)
    for boxes, trans in ((BY_CENTRE, True), (BY_CORNER, False)):
        assert formula("npu_diou")(*boxes, trans).item() == pytest.approx(1 / 7 - 2 / 18)
        assert formula("npu_ciou")(*boxes, trans).item() == pytest.approx(1 / 7 - 2 / 18)
        assert formula("npu_diou")(*boxes, trans, False, 1).item() == pytest.approx(1 / 4 - 2 / 18)
    with pytest.raises(RuntimeError, match=r"should be \(True, False, 0\); it is \(False, False, 0\)"):
        formula("npu_giou")(*BY_CORNER)


def test_another_shape_costs_by_the_angle_of_its_diagonal() -> None:
    """A truth of 4 by 2 with the same centre: IoU is 1/2; angles differ by atan 2 - atan 1."""
    truth = torch.tensor([[1.0], [1], [4], [2]])
    found, angle = formula("_npu_ciou")(BY_CENTRE[0], truth, True, False, 0, True)
    v = (2 / math.pi * (math.atan(2) - math.atan(1))) ** 2
    assert found.item() == pytest.approx(0.5 - v * v / (0.5 + v))
    assert angle.item() == pytest.approx(math.atan(2) - math.atan(1))
    assert formula("_npu_ciou")(BY_CENTRE[0], truth, True)[1].item() == 0


def test_each_box_meets_each_truth() -> None:
    """Crossed, row m and column n are the pair of truth m and box n."""
    boxes, truths = torch.rand(4, 3) + 0.5, torch.rand(4, 2) + 0.5
    for name in ("npu_diou", "npu_ciou"):
        crossed = formula(name)(boxes, truths, True, True)
        assert crossed.shape == (2, 3)
        for m in range(2):
            row = formula(name)(boxes, truths[:, m : m + 1].expand(4, 3), True, False)
            torch.testing.assert_close(crossed[m : m + 1], row)


@pytest.mark.parametrize("name", ["npu_giou", "npu_diou", "npu_ciou"])
def test_gradients_on_the_device(name: str) -> None:
    """Central differences of the formula in float64; what CIoU takes as constant is taken out there."""
    torch.manual_seed(1)
    boxes, truths = torch.rand(4, 3).double() + 0.5, torch.rand(4, 3).double() + 0.5
    given = [value.float().npu().requires_grad_() for value in (boxes, truths)]
    getattr(torch_npu, name)(*given, True, False).sum().backward()

    angles = formula("_npu_ciou")(boxes, truths, True, False, 0, True)
    v = (2 / math.pi * angles[1]).square()

    def apart(b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Squared distance of the centres over the squared diagonal of the box around both."""
        lower, upper = (
            torch.minimum(b[:2] - b[2:] / 2, t[:2] - t[2:] / 2),
            torch.maximum(b[:2] + b[2:] / 2, t[:2] + t[2:] / 2),
        )
        return (b[:2] - t[:2]).square().sum(0) / (upper - lower).square().sum(0)

    def value(b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if name != "npu_ciou":
            return formula(name)(b, t, True, False).sum()
        # The distance and the factor of the angles are constant.
        factor = (formula("npu_diou")(boxes, truths, True, False) - angles[0]) / v
        moved = formula("_npu_ciou")(b, t, True, False, 0, True)[1]
        iou = formula("npu_diou")(b, t, True, False) + apart(b, t)
        return (iou - (2 / math.pi * moved).square() * factor).sum()

    for place, tensor in enumerate((boxes, truths)):
        for row in range(4):
            for column in range(3):
                step = torch.zeros_like(tensor)
                step[row, column] = 1e-6
                pairs = [
                    (boxes + sign * step, truths) if place == 0 else (boxes, truths + sign * step) for sign in (1, -1)
                ]
                slope = (value(*pairs[0]) - value(*pairs[1])) / 2e-6
                assert given[place].grad[row, column].item() == pytest.approx(slope.item(), rel=1e-3, abs=1e-4)


def test_overlap_of_two_sets() -> None:
    """Sides count 0.01 more in areas: 100 of 100.2 + 200.3 - 100, or of the second box alone; touching is no sharing."""
    boxes, truths = (
        torch.tensor([[0.0, 0, 10, 10], [10, 10, 20, 20]]).double(),
        torch.tensor([[0.0, 0, 10, 20]]).double(),
    )
    for name in ("npu_iou", "npu_ptiou"):
        area, wanted = 10.01**2, 10.01 * 20.01
        assert formula(name)(boxes, truths).tolist() == [[pytest.approx(100 / (area + wanted - 100)), 0]]
        assert formula(name)(boxes, truths, 1).tolist() == [[pytest.approx(100 / wanted), 0]]


@pytest.mark.parametrize(("most", "overlap", "least"), [(30, 0.1, 0.2), (60, 0.5, 0.0), (5, 0.3, 0.9)])
def test_the_best_boxes_without_their_neighbours(most: int, overlap: float, least: float) -> None:
    """One box at a time in plain Python; corners in any order, a score at its threshold is out, places left over are 0."""
    drawn = torch.Generator().manual_seed(most)
    boxes, scores = torch.rand(50, 4, generator=drawn), torch.rand(50, generator=drawn)
    scores[7] = least

    def area(a: list[float], b: list[float]) -> float:
        sides = (min(max(a[i::2]), max(b[i::2])) - max(min(a[i::2]), min(b[i::2])) for i in (0, 1))
        return math.prod(max(side, 0.0) for side in sides)

    kept: list[int] = []
    plain = boxes.tolist()
    for one in scores.argsort(descending=True).tolist():
        shares = (area(plain[one], plain[other]) for other in kept)
        unions = (area(plain[i], plain[i]) + area(plain[one], plain[one]) for i in kept)
        clear = all(share <= overlap * (union - share) for share, union in zip(shares, unions, strict=True))
        if clear and scores[one] > least and len(kept) < most:
            kept.append(one)
    found, number = formula("npu_nms_v4")(boxes, scores, most, torch.tensor(overlap), torch.tensor(least))
    assert (found.tolist(), number.item()) == (kept + [0] * (most - len(kept)), len(kept))
    assert (found.dtype, number.dtype) == (torch.int32, torch.int32)


def test_boxes_are_encoded_and_decoded() -> None:
    """The documents' examples; decoding takes back what encoding gives, within the picture."""
    rois, deltas = torch.tensor([[1.0, 2, 3, 4], [3, 4, 5, 6]]), torch.tensor([[5.0, 6, 7, 8], [7, 8, 9, 6]])
    found = formula("npu_bounding_box_decode")(rois, deltas, 0, 0, 0, 0, 1, 1, 1, 1, [10, 10], 0.1)
    torch.testing.assert_close(found, torch.tensor([[2.5, 6.5, 9, 9], [9, 9, 9, 9]]))
    found = formula("npu_bounding_box_encode")(rois, deltas, 0, 0, 0, 0, 0.1, 0.1, 0.2, 0.2)
    wanted = torch.tensor([[40 / 3, 40 / 3, 0, 0], [40 / 3, 20 / 3, 0, math.nan]])
    torch.testing.assert_close(found, wanted, equal_nan=True)
    how = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    truth = torch.tensor([[2.0, 1, 6, 3], [0, 0, 3, 8]])
    changes = formula("npu_bounding_box_encode")(rois, truth, *how)
    torch.testing.assert_close(formula("npu_bounding_box_decode")(rois, changes, *how, [9, 7], 1e-3), truth)
    torch.testing.assert_close(
        formula("npu_bounding_box_decode")(rois, changes, *how, [9, 5], 1e-3)[:, 2], torch.tensor([4.0, 3.0])
    )


def test_anchors_of_the_cell_of_a_centre() -> None:
    """A centre at (7, 3) lies in column 1 of row 0 with cells of 4 by 4; one far outside counts for the last cell."""
    boxes = torch.tensor([[6.0, 2, 8, 4], [90, 90, 99, 99]])
    flags = formula("npu_anchor_response_flags")(boxes, [2, 3], [4, 4], 2)
    assert flags.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
