"""Input tensors as data: shape, dtype, layout and seed. The same data gives the same values on every machine."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch

from npugraph_ex.operators import FORMATS, ulp
from npugraph_ex.testing.arguments import check_fields, check_least, checked

Layout = Literal["contiguous", "transposed", "strided", "offset", "inside", "expanded", "row", "column"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "strided", "offset")
"""Those that are drawn first; `variations` puts "inside" and "expanded" in place of some."""
EXPANDED: tuple[Layout, ...] = ("expanded", "row", "column")
"""Those with less memory than elements."""
BEFORE, BEHIND = 3, 2
"""How many elements of its storage lie before and behind a tensor that is "inside"."""
_PERIOD = 4093
"""After how many values they repeat: random numbers for a weight of a million would take longer than what is done with it.
A prime, so that rows of one tensor differ: of 4093 that follow each other no two are alike, unless it divides their length."""
_ROOM = 16
"""How much larger than a number in ``Input.around`` the dtype's largest must be: what is computed of it should be finite."""
_LARGEST_INTEGER = 2**62
Dim = int | str
"""A size: a number, a symbol such as "s0", or a product such as "s0*4"."""


class Integers(NamedTuple):
    """The integers that an argument takes.

    Attributes:
        least: the least one.
        most: the largest one.
        distinct: whether no two may be the same place.
        ignored: a number outside, which is taken, too: that of the targets that a loss leaves out.
    """

    least: int
    most: int
    distinct: bool = False
    ignored: int | None = None


def size_of(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The value of ``dim`` under ``sizes``."""
    if isinstance(dim, int):
        return dim
    missing = symbols_of((dim,)).difference(sizes)
    if missing:
        raise ValueError(f"the sizes of a call must name {', '.join(sorted(missing))}; they are {dict(sizes)}.")
    return math.prod(int(part) if part.isdigit() else sizes[part] for part in dim.split("*"))


@lru_cache(maxsize=256)
def symbols_of(shape: tuple[Dim, ...]) -> frozenset[str]:
    """The symbols in a shape."""
    parts = [part for dim in shape if isinstance(dim, str) for part in dim.split("*")]
    return frozenset(part for part in parts if not part.isdigit())


_SYMBOLIC = re.compile(r"\w+(\*\w+)*")


def _is_dim(dim: object) -> bool:
    return dim >= 0 if isinstance(dim, int) else isinstance(dim, str) and _SYMBOLIC.fullmatch(dim) is not None


@dataclass(frozen=True)
class Input:
    """One input tensor of a program.

    Attributes:
        shape: sizes; strings are symbols, whose values each call chooses.
        dtype: a torch dtype's name, "float16".
        layout: how it lies in memory. "transposed" has its last two dimensions swapped, "strided" skips every other
            element of the last dimension, "offset" starts one element into its storage, "inside" ends before its storage does,
            too. "expanded" has one row, which is all of them: its first stride is 0, and nothing may write it. Of "row" and
            "column" all strides are 0 but the last one, or the first.
        alias_of: position of an earlier input of the same shape, dtype and layout, whose memory this one is.
        scale: standard deviation of floating-point values. Small ones make epsilon matter.
        seed: of the values; each call adds its own number.
        below: integers are drawn from zero to it, exclusively, as indices must be; None for any integer.
        least: the smallest integer that is drawn, in place of zero where ``below`` is given.
        whole: values are whole numbers from minus this one to it, or from zero where the dtype has no negative ones: so some are
            equal, and some zero, of either sign. A mask then has rows, along some dimension, that are all true or all false. None
            for any value.
        sign: 1 or -1 where all floating-point values have this sign; 0 for either.
        grows: whether floating-point values grow along the dimensions, to 16 times at the end of all: what leaves out an end is
            then far off.
        distinct: whether the integers below ``below`` are different along every dimension, and all of them where there are
            enough: of two writes to one place nobody knows which is last. A negative one counts from ``below``.
        around: numbers near which every second value lies, of either sign: at one of them, at its neighbours, or of its
            magnitude. Infinities and NaN stand alone, and as they are. A number that the dtype has not, or hardly, is left out.
            Some rows of floating-point values lie beside one of them, or a few times it, as a whole.
        corners: whether half of the integers are the dtype's largest or smallest one, or powers of two: sums, doubles and products
            of these are often just the smallest number, whose negative it is itself. They lie in the same places of every input.
        flat: whether some rows of numbers, along some dimension, are all zero, some of one number, some without a positive
            one, and some zero but for the first. They are the same rows of every input of a shape.
        ignored: an integer outside ``least`` and ``below`` that every fourth value is; None for none.
        uneven: whether every fourth floating-point value is of magnitude one, whatever ``scale`` is: what a small one is multiplied
            by may be large and stay finite.
    """

    shape: tuple[Dim, ...]
    dtype: str = "float16"
    layout: Layout = "contiguous"
    alias_of: int | None = None
    scale: float = 1.0
    seed: int = 0
    below: int | None = None
    around: tuple[float, ...] = ()
    least: int | None = None
    distinct: bool = False
    whole: int | None = None
    sign: int = 0
    grows: bool = False
    corners: bool = False
    flat: bool = False
    ignored: int | None = None
    uneven: bool = False

    def __post_init__(self) -> None:
        _ = self.torch_dtype  # says what is wrong with it
        check_fields(self)
        if not isinstance(self.shape, tuple) or not all(map(_is_dim, self.shape)):
            raise ValueError(
                f'Input.shape must be a tuple of sizes >= 0 and symbols such as "s0" or "s0*4"; it is {self.shape!r}.'
            )
        if self.layout not in get_args(Layout):
            raise ValueError(f"Input.layout must be one of {', '.join(get_args(Layout))}; it is {self.layout!r}.")
        if self.alias_of is not None and self.alias_of < 0:
            raise ValueError(f"Input.alias_of must be the position of an earlier input; it is {self.alias_of}.")
        if not 0 <= self.scale < math.inf:
            raise ValueError(f"Input.scale must be a finite number >= 0; it is {self.scale!r}.")
        if self.whole is not None:
            check_least("Input.whole", self.whole, 0)
        if self.sign not in (-1, 0, 1):
            raise ValueError(f"Input.sign must be -1, 0 or 1; it is {self.sign}.")
        if self.below is not None and (
            self.below <= (0 if self.least is None else self.least) or self.torch_dtype.is_floating_point
        ):
            raise ValueError(
                f"Input.below must be larger than Input.least, or 0, and of an integer; it is {self.below} of {self.dtype}."
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype = getattr(torch, str(self.dtype), None)
        if not isinstance(dtype, torch.dtype) or dtype.is_complex:
            raise TypeError(
                f"Input.dtype must be the name of a real torch dtype, as in 'float16'; it is {self.dtype!r}."
            )
        return dtype

    @property
    def is_expanded(self) -> bool:
        """Whether some of its elements are one place in memory."""
        return self.layout in EXPANDED and bool(self.shape)

    def within(self, integers: Integers) -> Input:
        """The same of the integers that an argument takes, often one at an end."""
        below = None if integers.most == limits_of(self.torch_dtype)[1] else integers.most + 1
        ends = () if below is None else (float(integers.least), -1.0, 0.0, float(integers.most))
        return dataclasses.replace(
            self, below=below, around=ends, least=integers.least, distinct=integers.distinct, ignored=integers.ignored
        )

    def values(self, sizes: Mapping[str, int], call: int) -> torch.Tensor:
        """The values of one call, contiguous on the CPU. Do not write them: other ways to run the program use them too."""
        return _values(self, tuple(size_of(dim, sizes) for dim in self.shape), call)

    def drawn(self, shape: tuple[int, ...], call: int) -> torch.Tensor:
        """As ``values``, anew. A large tensor repeats its first values."""
        count = math.prod(shape)
        in_rows = self.whole is not None and self.torch_dtype == torch.bool
        if count > _PERIOD and not (self.distinct or in_rows):
            few = self._random((_PERIOD,), call)
            values = few.repeat(-(-count // _PERIOD))[:count].view(shape)
        else:
            values = self._random(shape, call)
        if self.is_expanded:
            values = _in_memory(values, self.layout).expand(shape)
        if self.flat and values.dtype != torch.bool:
            values = _with_flat_rows(values, call)
        has_rows = len(shape) > 1 and not (self.sign or self.is_expanded)
        if self.around and has_rows and values.is_floating_point():
            values = _with_rows_beside(values, _neighbours(self.around, values.dtype), self.seed + call)
        grows = self.grows and values.is_floating_point()
        return _in_format(values * _growth(shape), values.dtype) if grows else values

    def _random(self, shape: tuple[int, ...], call: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + call * 7919) % 2**63)
        dtype = self.torch_dtype
        if dtype.is_floating_point:
            return _in_format(self._floating(shape, generator), dtype)
        if dtype == torch.bool:
            mixed = torch.randint(0, 2, shape, generator=generator).to(dtype)
            return mixed if self.whole is None else _in_rows(mixed, generator, call)
        if self.distinct and self.below is not None:
            return _indices(shape, self.below, generator, negative=(self.least or 0) < 0).to(dtype)
        low, high = limits_of(dtype) if self.below is None else (0, self.below - 1)
        low = low if self.least is None else self.least
        if self.whole is None:
            values = self._near(torch.randint(low, high + 1, shape, generator=generator), generator)
        else:
            values = torch.randint(max(-self.whole, torch.iinfo(dtype).min), self.whole + 1, shape, generator=generator)
        if self.corners:
            corners = _corners(dtype)
            drawn = corners[torch.randint(len(corners), shape, generator=generator)]
            # Two neighbours of four: then halves of a row have them in the same places, too.
            values = torch.where(torch.arange(math.prod(shape)).view(shape) % 4 < 2, drawn, values)
        values = values if self.below is self.least is None else values.clamp(low, high)
        if self.ignored is not None:
            values = values.where(torch.randint(4, shape, generator=generator) > 0, self.ignored)
        return values.to(dtype)

    def _floating(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if self.whole is None:
            values = self._near(torch.randn(shape, generator=generator, dtype=torch.float32) * self.scale, generator)
            if self.uneven:
                values = values.where(torch.randint(4, shape, generator=generator) > 0, values / max(self.scale, 1))
        else:
            values = torch.randint(-self.whole, self.whole + 1, shape, generator=generator).to(torch.float32)
            values = values.where((values != 0) | (torch.randint(2, shape, generator=generator) > 0), -0.0)
        return values.abs() * self.sign if self.sign else values

    def _near(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The values, every second one replaced by one near a number of ``around``."""
        near: torch.Tensor = _neighbours(self.around, self.torch_dtype)
        if not near.numel():
            return values
        chosen = near[torch.randint(near.numel(), values.shape, generator=generator)]
        what = torch.randint(4, values.shape, generator=generator)
        magnitudes = chosen.to(torch.float64) * torch.randn(values.shape, generator=generator)
        if not near.dtype.is_floating_point:
            magnitudes = magnitudes.clamp(-_LARGEST_INTEGER, _LARGEST_INTEGER)
        magnitudes = torch.where(chosen.isfinite(), magnitudes, chosen).to(near.dtype)
        return torch.where(what < 2, values, torch.where(what == 2, chosen, magnitudes))


def _with_rows_beside(values: torch.Tensor, near: torch.Tensor, seed: int) -> torch.Tensor:
    """The values with every fourth row, or one, wholly beside a finite number, its double or the double of that.

    In a long row one of many values is elsewhere. A bound that no value reaches, such as what a mask fills, decides in such rows.
    """
    finite = near[near.isfinite()]
    if not (finite.numel() and values.numel()):
        return values
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows = values.shape[:-1]
    chosen = torch.randint(4, rows, generator=generator)
    chosen.view(-1)[torch.randint(chosen.numel(), (), generator=generator)] = 0
    numbers = finite[torch.randint(finite.numel(), rows, generator=generator)]
    numbers = numbers * 2 ** torch.randint(3, rows, generator=generator)
    beside = numbers[..., None] * (1 + torch.randn(values.shape[-1], generator=generator, dtype=numbers.dtype) / 8)
    return torch.where(chosen[..., None] == 0, _in_format(beside, values.dtype), values)


def _in_format(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in a dtype; those that are beyond its range are its largest, and infinities stay."""
    largest = FORMATS[dtype].largest if dtype in FORMATS else math.inf
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values).to(dtype)


def _growth(shape: tuple[int, ...]) -> torch.Tensor:
    """A factor for each element, from 1/4 at the beginning of all dimensions to 4 at their end."""
    places = [torch.linspace(-2, 2, size).view(-1, *[1] * rest) for rest, size in enumerate(reversed(shape))]
    return sum(places, torch.zeros(())).div(max(1, len(shape))).exp2()


def _in_rows(mask: torch.Tensor, generator: torch.Generator, call: int) -> torch.Tensor:
    """The mask with some of its rows along some dimension all true, and some all false: what is kept is nothing, or everything.

    In every second call the rows are those of the last dimension, along which most masks hide something. There is one row of each
    kind at least, if there are two rows.
    """
    kind = _kinds_of_rows(mask.shape, generator, call, special=2)
    return (mask | (kind == _ALL_ONE)) & (kind != _ALL_ZERO)


def _with_flat_rows(values: torch.Tensor, call: int) -> torch.Tensor:
    """The numbers with some rows all zero, some of their first number, some without a positive one, some with the first alone."""
    kind = _kinds_of_rows(values.shape, torch.Generator().manual_seed(call), call, special=4)
    first, others = values, torch.zeros_like(values)
    for dim, (size, rows) in enumerate(zip(values.shape, kind.shape, strict=True)):
        if rows < size:
            first = first.narrow(dim, 0, 1)
            others.narrow(dim, 1, size - 1).fill_(1)
    values = values.where(kind != _ALL_ONE, first).where(kind != _NEGATIVE, -values.abs())
    return values.masked_fill((kind == _ALL_ZERO) | ((kind == _FIRST) & (others > 0)), 0)


_ALL_ONE, _ALL_ZERO, _NEGATIVE, _FIRST = range(4)
"""Kinds of rows; there are two more, which stay as they are."""


def _kinds_of_rows(shape: Sequence[int], generator: torch.Generator, call: int, *, special: int) -> torch.Tensor:
    """The kind of each row along some dimension, along the last one in every second call; each special one, if there are enough.

    One of so many special kinds, or one of two others.
    """
    rows = list(shape)
    if rows:
        rows[int(torch.randint(len(rows), (), generator=generator)) if call % 2 else -1] = 1
    kind = torch.randint(0, special + 2, rows, generator=generator).view(-1)
    places = torch.randperm(len(kind), generator=generator)[:special]
    kind[places] = torch.arange(special)[: len(places)]
    return kind.view(rows)


def _indices(shape: tuple[int, ...], size: int, generator: torch.Generator, *, negative: bool) -> torch.Tensor:
    """Indices into ``size`` places: each at most once, or where there are more, at most once along each dimension."""
    number = torch.arange(math.prod(shape)).view(shape)
    if number.numel() > size:
        number = sum((torch.arange(dim).view(-1, *[1] * rest) for rest, dim in enumerate(reversed(shape))), number * 0)
    chosen = torch.randperm(size, generator=generator)[number % size]
    return chosen - size * torch.randint(0, 2, shape, generator=generator) if negative else chosen


def limits_of(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the largest integer that is drawn of a dtype."""
    limits = torch.iinfo(dtype)
    return max(limits.min, -(2**31)), min(limits.max, 2**31 - 1)


@lru_cache(maxsize=16)
def _corners(dtype: torch.dtype) -> torch.Tensor:
    """The numbers at which integer arithmetic overflows, some of them several times, because they are drawn more often.

    The often ones are zero, the ends, and of either sign the half and the quarter of the smallest number, and its square root or
    the two factors beside that. The others are all powers of two.
    """
    limits = torch.iinfo(dtype)
    bits = limits.bits
    often = (0, limits.min, limits.max, *_signed(bits - 1, bits - 2, bits - 3, bits // 2, bits // 2 - 1))
    every = _signed(*range(bits))
    within = [
        number for number in (*often * (2 * len(every) // len(often)), *every) if limits.min <= number <= limits.max
    ]
    return torch.tensor(within, dtype=torch.int64)


def _signed(*exponents: int) -> tuple[int, ...]:
    return tuple(sign << exponent for exponent in exponents for sign in (1, -1))


@lru_cache(maxsize=256)
def _neighbours(numbers: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """The numbers, what lies just below and just above each, and of the finite all with the other sign; distinct ones."""
    if not dtype.is_floating_point:
        whole = [
            part for number in numbers if math.isfinite(number) for part in (math.floor(number), math.ceil(number))
        ]
        beside, limits = [number + by for number in whole for by in (-1, 0, 1)], torch.iinfo(dtype)
        within = {min(max(number, limits.min), limits.max) for one in beside for number in (one, -one)}
        return torch.tensor(sorted(within), dtype=torch.int64)
    given = torch.tensor(numbers, dtype=torch.float64)
    finite, special = given[given.isfinite()], given[~given.isfinite()]
    if dtype not in FORMATS:
        return given.new_zeros(0)
    near = finite[finite.abs() <= FORMATS[dtype].largest / _ROOM].to(dtype).to(torch.float64)
    gaps = torch.where(near == 0, 0.0, ulp(near, dtype))
    both = [special, near, near - gaps, near + gaps, -near, gaps - near, -gaps - near]
    return torch.cat(both).unique()  # type: ignore[no-any-return]


@lru_cache(maxsize=64)  # the inputs of a program or two: each way of running asks for the same values
def _values(spec: Input, shape: tuple[int, ...], call: int) -> torch.Tensor:
    return spec.drawn(shape, call)


def _laid_out(values: torch.Tensor, layout: Layout, device: str) -> torch.Tensor:
    """A copy of ``values`` on ``device`` in ``layout``; a layout that the rank does not have is contiguous."""
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(-1, -2).contiguous().to(device, copy=True).transpose(-1, -2)
    if layout == "strided" and values.dim() >= 1:
        wide = torch.zeros((*values.shape[:-1], values.shape[-1] * 2), dtype=values.dtype)
        wide[..., ::2] = values
        return wide.to(device)[..., ::2]
    if layout == "offset":
        flat = torch.cat([values.new_zeros(1), values.flatten()])
        return flat.to(device)[1:].view(values.shape)
    if layout == "inside":
        flat = torch.cat([values.new_zeros(BEFORE), values.flatten(), values.new_zeros(BEHIND)])
        return flat.to(device)[BEFORE:-BEHIND].view(values.shape)
    if layout in EXPANDED and values.dim() >= 1:
        return _in_memory(values, layout).to(device, copy=True).expand(values.shape)
    return values.to(device, copy=True)


def sizes_in_memory(shape: Sequence[Any], layout: Layout) -> list[Any]:
    """The sizes of what an expanded tensor of this shape has in memory."""
    last = len(shape) - 1
    own = {"expanded": range(1, last + 1), "row": (last,), "column": (0,)}[layout]
    return [size if place in own else 1 for place, size in enumerate(shape)]


def _in_memory(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    sizes = sizes_in_memory(values.shape, layout)
    first = values[tuple(map(slice, sizes))]
    return first if list(first.shape) == sizes else values.new_zeros(sizes)


@checked
def make_inputs(
    inputs: Sequence[Input], *, sizes: Mapping[str, int] | None = None, call: int = 0, device: str = "npu"
) -> list[torch.Tensor]:
    """Fresh tensors at new addresses, aliased as the specification says.

    Args:
        inputs: the specification.
        sizes: the values of the symbols in shapes.
        call: which call of the program these are for; other calls get other values.
        device: where the tensors live.

    Raises:
        ValueError: a size is missing or below zero, or an alias is not of an earlier input.
    """
    for symbol, size in (sizes or {}).items():
        check_least(f"the size {symbol}", size, 0)
    made: list[torch.Tensor] = []
    for position, spec in enumerate(inputs):
        if spec.alias_of is not None:
            if not 0 <= spec.alias_of < position:
                raise ValueError(f"Input {position}: alias_of must name an earlier input; it is {spec.alias_of}.")
            made.append(alias_of(made[spec.alias_of]))
            continue
        made.append(_laid_out(spec.values(sizes or {}, call), spec.layout, device))
    return made


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor in the same memory."""
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def refill(tensors: Sequence[torch.Tensor], inputs: Sequence[Input], sizes: Mapping[str, int], call: int) -> None:
    """Write the values of another call into existing tensors."""
    for tensor, spec in zip(tensors, inputs, strict=True):
        if spec.alias_of is None:
            values = spec.values(sizes, call).to(tensor.device)
            if spec.is_expanded:
                tensor, values = _in_memory(tensor, spec.layout), _in_memory(values, spec.layout)  # noqa: PLW2901 - the others are these
            tensor.copy_(values)
