"""What the judge makes of values beyond the range of a dtype."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from npugraph_ex.lifting import distances, trials

LARGE = 3e38  # near the end of float32's range, and of bfloat16's


@pytest.mark.parametrize(
    ("dtype", "size", "infinite", "sums", "admitted"),
    [
        (torch.bfloat16, LARGE, 1, True, True),
        (torch.float32, LARGE, 1, True, True),
        (torch.bfloat16, LARGE, 30, True, False),
        (torch.bfloat16, LARGE, 1, False, False),
        (torch.bfloat16, 1e30, 1, True, False),
        (torch.float16, 6e4, 1, True, False),
    ],
    ids=["bfloat16", "float32", "many", "no sums", "far from the end", "float16"],
)
def test_sums_that_leave_the_range_by_their_order(
    dtype: torch.dtype, size: float, infinite: int, sums: bool, admitted: bool
) -> None:
    """Whether a partial sum overflows depends on the processor; a few such elements are no evidence, in rows that come near."""
    eager = torch.linspace(0.5, 1, 200).mul(size).reshape(4, 50).to(dtype)
    truth, lifted = eager.double(), eager.clone()
    lifted.view(-1)[-infinite:] = torch.inf
    found = distances.compare(lifted, eager, truth, sums_rows=sums)
    assert (found.reason == "") == admitted, found


@pytest.mark.parametrize("most", [1e-3, torch.inf])
def test_tiny_and_large_values_come_in_one_input_and_in_all(most: float) -> None:
    """A product of two tiny numbers shows what one of them beside an ordinary one does not."""
    graph = fx.Graph()
    for name in "xy":
        graph.placeholder(name).meta["val"] = torch.empty(4, 8)
    inputs = [*graph.nodes]
    (at,) = trials.sizes(inputs)
    beyond = [
        [0 < one.abs().max() < most if most < 1 else bool((one.abs() > 1e36).any()) for one in drawn]
        for drawn in (kind.draw(0) for kind in trials.kinds(inputs, at, few=False))
    ]
    assert {(True, False), (True, True)} <= {tuple(map(bool, one)) for one in beyond}


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 1e6])
def test_distances_are_those_of_finite_elements(odd: float) -> None:
    """An element that is infinite, NaN or beyond the range in float64, and in both results, is not measured."""
    truth = torch.linspace(1, 2, 50, dtype=torch.float64)
    eager, lifted = truth.half(), truth.half().nextafter(torch.tensor(4.0).half())
    finite = distances.compare(lifted[1:], eager[1:], truth[1:], sums_rows=False)
    truth[0] = odd
    eager[0] = lifted[0] = truth.half()[0]
    found = distances.compare(lifted, eager, truth, sums_rows=False)
    assert finite.worst > 0.5
    assert (found.worst, found.worst_eager, found.averages[0].elements) == (finite.worst, finite.worst_eager, 49)
    lifted[0] = 1.0
    assert distances.compare(lifted, eager, truth, sums_rows=False).reason


def test_an_infinity_of_the_other_sign_is_wrong() -> None:
    """float16 ends at 65,504: a result of -1e6 is minus infinity there, and plus infinity is as wrong as a finite number."""
    truth = torch.tensor([-1e6, 1.0], dtype=torch.float64)
    right, other = (torch.tensor([infinity, 1.0], dtype=torch.float16) for infinity in (-torch.inf, torch.inf))
    assert not distances.compare(right, right, truth, sums_rows=False).reason
    assert distances.compare(other, right, truth, sums_rows=False).reason
    assert not distances.compare(right, other, truth, sums_rows=False).reason


@pytest.mark.parametrize(
    ("scale", "worst", "near"),
    [(1.0, 0.5, True), (1 + 2.0**-11, 0.5, True), (1 + 2.0**-6, 0.5, False), (1.0, 0.6, False)],
    ids=["equal", "a little larger", "larger", "a farther element"],
)
def test_an_average_is_surely_as_near_or_it_is_not(scale: float, worst: float, near: bool) -> None:
    """Of a few elements nothing is sure; of many it is the scale of the distances that decides, and the worst element."""
    generator = torch.Generator().manual_seed(7)

    def draw(elements: int) -> distances.Compared:
        eager = 0.4 * torch.rand(elements, generator=generator, dtype=torch.float64)
        lifted = eager.roll(1) * scale
        lifted[0] = worst if worst > 0.5 else lifted[0]
        return distances._measured(torch.stack((lifted, eager)))

    assert not draw(50).surely_as_near
    assert draw(300_000).surely_as_near == near


@pytest.mark.parametrize(("scale", "near"), [(1.0, True), (1.05, False)], ids=["equal", "larger"])
def test_elements_near_zero_do_not_hide_the_others(scale: float, near: bool) -> None:
    """Where terms cancel, one element in a thousand is thousands of ulps off in both, and is nearly all of the plain average."""
    generator = torch.Generator().manual_seed(3)
    eager = torch.rand(100_000, generator=generator, dtype=torch.float64)
    lifted = eager.roll(1) * scale
    eager[::1000] = 5000 * torch.rand(100, generator=generator, dtype=torch.float64)
    lifted[::1000] = eager[::1000].flip(0)
    found = distances._measured(torch.stack((lifted, eager)))
    assert not found.averages[0].surely_farther
    assert (found.surely_farther or found.farther_on_average) is not near
