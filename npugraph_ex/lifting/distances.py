"""How far an operator's results and eager mode's are from float64, and whether the operator's are farther."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from npugraph_ex.operators import FORMATS, ulp

_RIGHTLY_ROUNDED = 0.5
"""In ulps: no other number of the format is nearer to the right value."""
_SAME_AVERAGE = (1 + 2.0**-7) ** 2
"""Of the squares: averages that differ by less may be those of one element more or less."""
_SURE = 3.0
"""Standard errors by which an average must be larger before it is no chance: one in 700."""
_FEW = 8.0
"""Ulps. Near zero, where terms cancel, an element of float32 may be thousands of ulps off: a few of these are all of an average, in
which nothing else shows. So an average in which none counts as more than so many ulps is compared, too.
"""
_SUM = 2.0**-22
"""Of the largest element of a row: what float32 cannot tell apart in its sums, two roundings each way."""


@dataclass(frozen=True)
class _Average:
    """Sums of squares of distances, in ulps.

    Attributes:
        squares: of the operator's.
        squares_eager: of eager mode's.
        deviation: of the squares' differences, element by element.
        elements: how many were measured.
    """

    squares: float = 0.0
    squares_eager: float = 0.0
    deviation: float = 0.0
    elements: int = 0

    @classmethod
    def of(cls, far: torch.Tensor) -> _Average:
        """Of the distances of the two, [2, n]."""
        squares = far.square()
        total, total_eager = squares.sum(1).tolist()
        return cls(total, total_eager, float((squares[0] - squares[1]).square().sum()), far.shape[1])

    def and_(self, other: _Average) -> _Average:
        """Both draws together."""
        return _Average(
            self.squares + other.squares,
            self.squares_eager + other.squares_eager,
            self.deviation + other.deviation,
            self.elements + other.elements,
        )

    @property
    def surely_farther(self) -> bool:
        """Whether it is larger by more than chance."""
        return self.squares - self.squares_eager > _SURE * math.sqrt(self.deviation)

    @property
    def farther_than_counts(self) -> bool:
        """Whether it is larger by more than few elements tell apart."""
        return self.squares > _SAME_AVERAGE * self.squares_eager

    @property
    def surely_as_near(self) -> bool:
        """Whether more draws would not show a larger average than few elements tell apart."""
        room = (_SAME_AVERAGE - 1) * self.squares_eager
        return self.squares - self.squares_eager + _SURE * math.sqrt(self.deviation) <= room

    def __str__(self) -> str:
        usual, usual_eager = ((one / self.elements) ** 0.5 for one in (self.squares, self.squares_eager))
        return f"{usual:.3g} on average, eager mode's {usual_eager:.3g}"


@dataclass(frozen=True)
class Compared:
    """One result of the operator beside eager mode's.

    Attributes:
        reason: against the operator, whatever else is drawn.
        worst: the largest distance from float64 in ulps, where it was measured.
        worst_eager: eager mode's.
        averages: of all distances, and of the same where none counts as more than `_FEW`.
        latest: the operator's distances in the latest draw.
    """

    reason: str = ""
    worst: float = 0.0
    worst_eager: float = 0.0
    averages: tuple[_Average, ...] = ()
    latest: torch.Tensor | None = None

    def and_(self, other: Compared) -> Compared:
        """Both draws together."""
        return Compared(
            "",
            max(self.worst, other.worst),
            max(self.worst_eager, other.worst_eager),
            tuple(one.and_(more) for one, more in zip(self.averages, other.averages, strict=True))
            if self.averages and other.averages
            else self.averages or other.averages,
            self.latest if other.latest is None else other.latest,
        )

    @property
    def beyond_eager(self) -> bool:
        """Whether the worst element is farther than eager mode's, and than the right value rounded once."""
        return self.worst > max(self.worst_eager, _RIGHTLY_ROUNDED)

    @property
    def surely_farther(self) -> bool:
        """Whether an average is larger by more than chance."""
        return any(one.surely_farther for one in self.averages)

    @property
    def farther_on_average(self) -> bool:
        """Whether an average is larger by more than few elements tell apart."""
        return any(one.farther_than_counts for one in self.averages)

    @property
    def surely_as_near(self) -> bool:
        """Whether more draws would not show a larger average than few elements tell apart, and no element is farther."""
        return not self.beyond_eager and all(one.surely_as_near for one in self.averages)

    @property
    def farther(self) -> bool:
        """Whether the worst element or an average is farther than eager mode's, be it by chance."""
        return self.beyond_eager or any(one.squares > one.squares_eager for one in self.averages)

    def __str__(self) -> str:
        assert self.latest is not None  # noqa: S101 - it was measured
        most = self.latest.kthvalue(max(1, len(self.latest) * 9 // 10)).values.item()
        farther = (one for one in reversed(self.averages) if one.surely_farther or one.farther_than_counts)
        usual = next(farther, self.averages[0])
        return (
            f"it is farther from float64 than eager mode: {self.worst:.4g} ulp at worst, eager mode {self.worst_eager:.4g}; "
            f"{usual}; nine elements in ten are within {most:.3g}"
        )


def different_bits(lifted: torch.Tensor, eager: torch.Tensor) -> str:
    """How many elements are not the same number with the same sign, or both NaN; empty where none is."""
    if lifted.dtype != eager.dtype or lifted.shape != eager.shape:
        return f"it gives {lifted.dtype}{list(lifted.shape)} for {eager.dtype}{list(eager.shape)}"
    if same_bits(lifted, eager):
        return ""
    same = (lifted == eager) & (lifted.signbit() == eager.signbit()) | (lifted.isnan() & eager.isnan())
    return "" if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} elements are not eager mode's"


def same_bits(lifted: torch.Tensor, eager: torch.Tensor) -> bool:
    """Whether each bit is the same, a NaN's too."""
    if lifted.dtype != eager.dtype:
        return False
    whole = _WHOLE[lifted.element_size()]
    return torch.equal(lifted.view(whole), eager.view(whole))


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes, of which each pattern of bits is one and equals itself."""


def compare(lifted: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, *, sums_rows: bool) -> Compared:
    """The distances of the two from float64, and a reason if the operator's is larger."""
    if lifted.dtype == eager.dtype == torch.int8 and truth.is_floating_point():
        unknown = truth.isnan()
        if bool((lifted != eager)[unknown].any()):
            return Compared("it rounds NaN to another number than eager mode")
        return _measured(_known((torch.stack((lifted, eager)).double() - truth).abs()))
    if eager.dtype not in FORMATS or lifted.dtype != eager.dtype or lifted.shape != eager.shape:
        return Compared(different_bits(lifted, eager))
    if not truth.numel():
        return Compared()
    both, largest = torch.stack((lifted, eager)), FORMATS[eager.dtype].largest
    far, size = _distances(both, truth, sums_rows=sums_rows), truth.abs()
    if float(size.amax()) < largest and bool(far.amax().isfinite()):  # as with most inputs
        return _measured(far.reshape(2, -1))
    known = (size < largest) & both.isfinite().all(0)
    odd, odd_eager = _odd(both, truth, largest)
    more = odd & ~odd_eager
    if sums_rows and bool(more.any()):
        more &= ~_overflows_by_chance(more, truth, both.dtype)
    if bool(more.any()):
        return Compared("it is infinite or NaN, or finite, where float64 and eager mode are not")
    return _measured(far[:, known])


def compare_dequantised(
    lifted: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]
) -> Compared:
    """How much farther ``q * scale`` is from the number that was quantised than half a step, in steps, for pairs ``(q, scale)``.

    Args:
        lifted: the operator's int8 [..., K], and a scale for each row.
        eager: eager mode's.
        truth: the quotient before it is rounded, and the scale, float64.
    """
    numbers = [whole.double() * _by_row(scale, whole) for whole, scale in (lifted, eager)]
    step = _by_row(truth[1], truth[0])
    far = ((torch.stack(numbers) - truth[0] * step) / step).abs()
    right = _RIGHTLY_ROUNDED + _SUM * truth[0].abs()  # a scale in float32 is rounded, too
    return _measured(_known((far - right).clamp(min=0).reshape(2, -1)))


def _by_row(scale: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return scale.double().reshape(*whole.shape[:-1], 1)


def _odd(values: torch.Tensor, truth: torch.Tensor, largest: float) -> torch.Tensor:
    """Where a value is infinite, NaN or finite, and the true one is something else.

    An infinity has a sign where float32 has room above the dtype's range; elsewhere the order of a sum may choose it.
    """
    beyond = truth.abs() >= largest
    signed = values * truth.sign() if largest < FORMATS[torch.bfloat16].largest else values.abs()
    right = torch.where(beyond, signed >= largest, values.isfinite())
    return torch.where(truth.isnan(), values.isnan(), right).logical_not()


def _overflows_by_chance(odd: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Elements whose partial sums leave the range of float32 in one order of summation and stay in it in another.

    A dtype with float32's range has no room above it for a sum, and a processor chooses the order. Such elements are few, and lie
    in rows that come near the end of the range.
    """
    largest = FORMATS[dtype].largest
    if largest < FORMATS[torch.bfloat16].largest:
        return torch.zeros_like(odd)
    near = (truth.abs().nan_to_num(largest, largest).amax(-1, keepdim=True) >= largest / _NEAR).expand_as(odd)
    few = (odd & near).sum() <= _BY_CHANCE * near.sum()
    return odd & near & few


_NEAR = 8.0
"""How much larger a partial sum may be than the largest sum of its row."""
_BY_CHANCE = 0.05


def _distances(values: torch.Tensor, truth: torch.Tensor, *, sums_rows: bool) -> torch.Tensor:
    """Distances from the true values in ulps."""
    far = (values.double() - truth).abs()
    if sums_rows and values.dtype != torch.float32:
        far = (far - _SUM * truth.abs().nan_to_num(0.0, 0.0).amax(-1, keepdim=True)).clamp(min=0)
    return far / ulp(truth, values.dtype)


def _known(far: torch.Tensor) -> torch.Tensor:
    """The distances [2, n] of the elements of which both are known."""
    return far[:, far.isfinite().all(0)]


def _measured(far: torch.Tensor) -> Compared:
    """The distances of the two, [2, n]."""
    if not far.numel():
        return Compared()
    worst, worst_eager = far.amax(1).tolist()
    all_of_them = _Average.of(far)
    usual = _Average.of(far.clamp(max=_FEW)) if max(worst, worst_eager) > _FEW else all_of_them
    return Compared("", worst, worst_eager, (all_of_them, usual), far[0])
