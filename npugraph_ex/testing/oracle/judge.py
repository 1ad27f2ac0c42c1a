"""Decides whether a result is right, given a float64 reference of it. Knows numbers only: no graphs, no devices.

Floating point, elementwise, with ``f`` the candidate, ``e`` eager mode, ``r`` the reference::

    |f - r| <= max(K * |e - r|, N * ulp(r))

``|e - r|`` of a single element is a matter of luck: roundings may cancel. It is therefore taken as the largest of the
actual one and of ``spread``, how far ``r`` moves when every intermediate result is rounded to the dtype that eager mode
stores it in (see ``reference64``). So a fused operator that keeps an intermediate result in float32, where eager mode
rounds it to float16, may differ from eager mode by what that rounding is worth, and by no more.

A dtype of few digits hides a wrong constant in that: in bfloat16, 127 and 128 are 2 ulp apart. So what the optimised graph
gives in float64, ``m``, is compared, too. It may differ from ``r`` by what eager mode's roundings are worth once, and by
nothing where eager mode rounds nothing::

    |m - r| <= max(spread, N * ulp of float32(r))

Quantised: ``f`` is an integer and ``q`` the float64 value before rounding. With the permitted error p of ``q``, ``f``
is right when some value within p of ``q`` rounds to it, half to even and saturated. p is kept below half a step, so that
``f`` is the rounded ``q``, or its neighbour where ``q`` lies within p of the tie between the two. Only where eager mode's
own roundings move ``q`` by half a step or more, as they do where the step is smaller than an ulp of what is quantised, is
no integer the right one, and p is what it is: then several steps may be right, as several ulps are in floating point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from npugraph_ex.testing.arguments import check_fields, checked
from npugraph_ex.testing.oracle.formats import FORMATS, ulp

_HALF_A_STEP = 0.5
_STEPS = "steps"
_FAR = 1 / 16
"""By what share of the reference eager mode's result is off where it is called no good."""


@dataclass(frozen=True)
class Limits:
    """The constants of the judgement, printed with every run.

    Attributes:
        k: how many times eager mode's error is permitted.
        n: how many ulps are permitted in any case.
        tie: the largest distance from a tie that is excused where an integer is the right one, in steps; less than a half.
        overflow: whether nothing is asked of an element where eager mode's own result is no good, as after an overflow.
    """

    k: float = 4.0
    n: float = 4.0
    tie: float = 0.45
    overflow: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not (1 <= self.k < math.inf and 0.5 <= self.n < math.inf and 0 <= self.tie < 0.5):
            raise ValueError(f"limits must be numbers with k >= 1, n >= 0.5 and 0 <= tie < 0.5; they are {self}.")

    def __str__(self) -> str:
        """As printed."""
        return (
            f"|f-r| <= max({self.k:g}*|e-r|, {self.n:g} ulp(r)); quantised: within that, at most {self.tie:g}, of a tie"
        )


@dataclass(frozen=True)
class Judgement:
    """The verdict on one tensor.

    Attributes:
        wrong: how many elements are outside the limits.
        worst_ulp: the largest ``|f - r|`` in ulps of ``r``; for quantised values in steps.
        index: of the worst element: the worst wrong one if there is any.
        message: what is wrong with it; empty when right.
        eager_ulp: eager mode's distance at that element, where eager mode's result is known.
    """

    wrong: int = 0
    worst_ulp: float = 0.0
    index: tuple[int, ...] = ()
    message: str = ""
    eager_ulp: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every element is within the limits."""
        return self.wrong == 0


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors on the CPU hold the same values; every NaN is the same, -0.0 is not 0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype.is_floating_point:
        left, right = left.resolve_neg(), right.resolve_neg()  # of a lazily negated tensor the bits are others
        bits = _BITS[left.element_size()]
        if torch.equal(left.view(bits), right.view(bits)):
            return True
        if left.element_size() == 1:  # float8, for which torch has few kernels; float32 holds every value of it
            left, right = left.float(), right.float()
        both_nan = left.isnan() & right.isnan()
        equal = (left == right) & (left.signbit() == right.signbit())
        return bool((both_nan | equal).all())
    return bool(torch.equal(left, right))


def same_values(left: object, right: object) -> bool:
    """``same_bits`` of tensors; equality of type and value of anything else."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_bits(left, right)
    return type(left) is type(right) and left == right


def permitted_error(
    reference: torch.Tensor,
    dtype: torch.dtype,
    *,
    eager: torch.Tensor | None = None,
    spread: torch.Tensor | None = None,
    limits: Limits,
) -> torch.Tensor:
    """``max(k * |e - r|, n * ulp(r))`` in float64, elementwise."""
    error = torch.zeros_like(reference)
    if eager is not None:
        error = torch.maximum(error, (eager.to(torch.float64) - reference).abs().nan_to_num(posinf=0.0))
    if spread is not None:
        error = torch.maximum(error, spread.nan_to_num(posinf=0.0))
    return torch.maximum(limits.k * error, limits.n * ulp(reference, dtype))


def no_good(eager: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Where eager mode's result is far from the reference, which no rounding explains, or the reference is not finite itself.

    Something overflowed on the way: in eager mode, or even in float64.
    """
    wide, true = eager.to(torch.float64), reference.to(torch.float64)
    near = (wide - true).abs() <= true.abs() * _FAR
    return ~near | ~true.isfinite()


def _check_shapes(**tensors: torch.Tensor | None) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"the judge compares tensors of one shape; it was given {shapes}.")


def _check_wide(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.float64:
            raise ValueError(f"the judge takes a {name} of float64; it is {tensor.dtype}.")


@checked
def judge_floating(
    candidate: torch.Tensor,
    reference: torch.Tensor,
    *,
    eager: torch.Tensor | None = None,
    spread: torch.Tensor | None = None,
    unit: torch.dtype | None = None,
    limits: Limits = Limits(),
) -> Judgement:
    """Judge a floating-point tensor.

    Args:
        candidate: the result in question, of a dtype that ``ulp`` knows, on the CPU.
        reference: float64, the same shape.
        eager: eager mode's result.
        spread: how far eager mode's roundings may move the reference, float64.
        unit: the dtype in whose ulps the distance is told, where that is not the candidate's: a float32 value that was
            float16 before has float16's digits. It decides nothing.
        limits: K and N.

    A NaN is right where the reference is NaN. An infinity is right where the reference is beyond the format's range,
    or, like every value on which the candidate equals eager mode, where eager mode has it.
    """
    if candidate.dtype not in FORMATS:
        raise ValueError(f"judge_floating judges {', '.join(map(str, FORMATS))}; the candidate is {candidate.dtype}.")
    _check_shapes(candidate=candidate, reference=reference, eager=eager, spread=spread)
    _check_wide(reference=reference, spread=spread)
    shape = FORMATS[candidate.dtype]
    wide = candidate.to(torch.float64)
    allowed = permitted_error(reference, candidate.dtype, eager=eager, spread=spread, limits=limits)
    error = (wide - reference).abs()
    beyond = (reference.abs() + allowed > shape.largest) & wide.isinf() & (wide.sign() == reference.sign())
    right = (error <= allowed) | beyond | (wide.isnan() & reference.isnan())
    if eager is not None:
        twin = eager.to(torch.float64)
        right = right | (twin == wide) | (twin.isnan() & wide.isnan())
    ulps = torch.where(
        beyond, 0.0, (error / ulp(reference, unit or candidate.dtype)).nan_to_num(nan=0.0, posinf=torch.inf)
    )
    judged = _verdict(right, ulps, wide, reference, allowed, f"ulp of {_name(unit or candidate.dtype)}")
    if eager is None or not judged.worst_ulp:
        return judged
    true = reference[judged.index]
    distance = (eager[judged.index].to(torch.float64) - true).abs() / ulp(true, unit or candidate.dtype)
    return replace(judged, eager_ulp=float(distance))


@checked
def judge_meaning(  # noqa: PLR0913 - keyword arguments but for three
    candidate: torch.Tensor,
    reference: torch.Tensor,
    meant: torch.Tensor,
    *,
    eager: torch.Tensor,
    spread: torch.Tensor | None = None,
    unit: torch.dtype | None = None,
    limits: Limits = Limits(),
) -> Judgement:
    """Judge what a result was meant to be: what the optimised graph gives in float64, where nothing rounds.

    That a graph has other roundings is right; that it has another constant is not, however few digits its dtype has.

    Args:
        candidate: the result in question, on the CPU.
        reference: float64, the same shape, of the original graph.
        meant: float64, the same shape, of the optimised graph.
        eager: eager mode's result; nothing is asked where the candidate equals it, or where it is no good.
        spread: how far eager mode's roundings move the reference, once each, float64; nothing where it rounds nothing.
        unit: the dtype in whose ulps the distance is told, where that is not the candidate's.
        limits: of which N is counted in ulps of float32, in which kernels compute with numbers at least.
    """
    _check_shapes(candidate=candidate, reference=reference, meant=meant, eager=eager, spread=spread)
    _check_wide(reference=reference, meant=meant, spread=spread)
    wide, twin = candidate.to(torch.float64), eager.to(torch.float64)
    allowed = limits.n * ulp(reference, torch.float32)
    if spread is not None:
        allowed = torch.maximum(allowed, spread.nan_to_num(posinf=0.0))
    asked = (wide != twin) & wide.isfinite() & meant.isfinite() & ~no_good(eager, reference)
    right = ~asked | ((meant - reference).abs() <= allowed)
    ulps = ((wide - reference).abs() / ulp(reference, unit or candidate.dtype)).nan_to_num(nan=0.0, posinf=torch.inf)
    judged = _verdict(right, ulps, wide, reference, allowed, f"ulp of {_name(unit or candidate.dtype)}")
    if judged.ok:
        return Judgement()
    told = f"; computed in float64 the optimised graph gives {float(meant[judged.index]):.9g} there"
    return replace(judged, message=judged.message + told)


@checked
def judge_quantised(
    candidate: torch.Tensor, quotient: torch.Tensor, *, spread: torch.Tensor | None = None, limits: Limits = Limits()
) -> Judgement:
    """Judge an int8 tensor against the float64 value before rounding.

    Args:
        candidate: int8, on the CPU.
        quotient: float64, the value that is rounded half to even and saturated; NaN quantises to 0.
        spread: how far eager mode's roundings may move the quotient, float64.
        limits: K, N (ulps of float32, in which a quotient is computed) and the largest excused distance from a tie.
    """
    _check_shapes(candidate=candidate, quotient=quotient, spread=spread)
    if candidate.dtype != torch.int8:
        raise ValueError(f"judge_quantised judges int8; the candidate is {candidate.dtype}.")
    _check_wide(quotient=quotient, spread=spread)
    value = torch.where(quotient.isnan(), torch.zeros_like(quotient), quotient).clamp(-128.0, 127.0)
    permitted = permitted_error(value, torch.float32, spread=spread, limits=limits)
    allowed = permitted.clamp(max=limits.tie)
    if spread is not None:
        allowed = torch.where(spread.nan_to_num(posinf=0.0) < _HALF_A_STEP, allowed, permitted)
    wide = candidate.to(torch.float64)
    nearest = value.round()
    # The distance from the value to the interval of those that round to the candidate.
    distance = ((value - wide).abs() - 0.5).clamp(min=0.0)
    right = (wide == nearest) | (distance <= allowed)
    return _verdict(right, (wide - nearest).abs(), wide, value, allowed, _STEPS)


@checked
def judge_exact(candidate: torch.Tensor, reference: torch.Tensor) -> Judgement:
    """Judge a tensor of integers or truth values, which are right or wrong.

    Args:
        candidate: the result in question, on the CPU.
        reference: the same shape; it is cast to the candidate's dtype.
    """
    _check_shapes(candidate=candidate, reference=reference)
    expected = reference.to(candidate.dtype)
    wrong = candidate != expected
    if not wrong.any():
        return Judgement()
    distance = (candidate.to(torch.float64) - expected.to(torch.float64)).abs()
    index = _index_of_largest(torch.where(wrong, distance, -1.0))
    message = (
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst, at {index}, is {candidate[index].item()}, "
        f"the reference {expected[index].item()}: {_name(candidate.dtype)} must be exact"
    )
    return Judgement(int(wrong.sum()), index=index, message=message)


def _index_of_largest(measure: torch.Tensor) -> tuple[int, ...]:
    """Where the largest element is."""
    return tuple(int(i) for i in torch.unravel_index(measure.flatten().argmax(), measure.shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _verdict(
    right: torch.Tensor,
    measure: torch.Tensor,
    candidate: torch.Tensor,
    reference: torch.Tensor,
    allowed: torch.Tensor,
    unit: str,
) -> Judgement:
    if right.numel() == 0:
        return Judgement()
    wrong = int((~right).sum())
    # NaN against a number has no distance; it is as wrong as can be.
    ranked = torch.where(right, measure, measure + torch.where(candidate.isnan() != reference.isnan(), torch.inf, 0.0))
    index = _index_of_largest(torch.where(right, -1.0, ranked) if wrong else ranked)
    worst = float(ranked[index])
    if not wrong:
        return Judgement(0, worst, index)
    value, true, permitted = (float(one[index]) for one in (candidate, reference, allowed))
    message = (
        f"{wrong} of {right.numel()} elements are wrong; the worst, at {index}, is {value:.9g}, the reference {true:.9g}: "
        f"{_apart(value, true, worst, unit)}"
    )
    if math.isfinite(value) and math.isfinite(true):
        message += f", permitted error {permitted:.3g}"
    return Judgement(wrong, worst, index, message)


def _apart(value: float, true: float, measured: float, unit: str) -> str:
    """The distance in words; in units only where these say how far off a value is."""
    if math.isnan(value) or math.isnan(true):
        return "one is NaN and the other is not"
    if not math.isfinite(value) or not math.isfinite(true):
        return "both are infinite" if value == -true else "one is infinite and the other is not"
    if true == 0 and unit != _STEPS:
        return f"an absolute difference of {abs(value):.4g}"
    return f"{measured:.4g} {unit} apart"
