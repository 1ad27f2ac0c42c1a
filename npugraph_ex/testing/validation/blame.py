"""Tells a wrong replacement from one whose guard lets too much through: is it wrong everywhere, or where a guard can see?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from npugraph_ex.testing.patterns import Pattern
from npugraph_ex.testing.validation.survey import Setting
from npugraph_ex.testing.validation.trials import Trials

_FEWEST = 3
_LUCK = 1.0
Feature = Callable[[Setting], str]


@dataclass(frozen=True)
class Divide:
    """What tells the settings in which a replacement is wrong from those in which it is right.

    Attributes:
        what: in words: "the dtype of x", "size of dimension -1 of x".
        wrong: its values where the replacement is wrong.
        right: its values where it is right.
        feature: reads the value from a setting.
    """

    what: str
    wrong: tuple[str, ...]
    right: tuple[str, ...]
    feature: Feature

    def __str__(self) -> str:
        return f"wrong where the {self.what} is {_some(self.wrong)}, right where it is {_some(self.right)}"


def _some(values: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(values[:most])
    return f"{shown}, ..." if len(values) > most else shown


def divide_of(pattern: Pattern, trials: Trials) -> Divide | None:
    """A property of the arguments that all wrong trials have and most right ones have not; None when there is none.

    A right trial on the wrong side is luck: ``x - y`` and ``y - x`` agree where x and y are the same tensor.
    """
    wrong, right = trials.of("wrong"), trials.of("right")
    for what, feature in _features(pattern):
        bad = {feature(trial.setting) for trial in wrong}
        lucky = [trial for trial in right if feature(trial.setting) in bad]
        good = {feature(trial.setting) for trial in right} - bad
        enough = len(wrong) >= _FEWEST and len(right) - len(lucky) >= _FEWEST
        if enough and len(lucky) <= _LUCK * len(wrong):
            return Divide(what, _sorted(bad), _sorted(good), feature)
    return None


def _sorted(values: set[str]) -> tuple[str, ...]:
    return tuple(sorted(values, key=lambda value: (len(value), value)))


def _features(pattern: Pattern) -> list[tuple[str, Feature]]:
    """What a guard can ask of each argument, dtypes first; one of several dimensions that always agree is enough."""
    found: list[tuple[str, Feature]] = []
    seen: defaultdict[object, bool] = defaultdict(bool)
    for index, argument in enumerate(pattern.arguments):
        if argument.dtype.is_floating_point and not seen[argument.dtype]:
            seen[argument.dtype] = True
            found.append((f"dtype of {argument.name}", _dtype_at(index)))
    for index, argument in enumerate(pattern.arguments):
        for dim, size in enumerate(argument.dims):
            place = (size, dim - len(argument.dims))
            if not seen[place]:
                seen[place] = True
                found.append((f"size of dimension {place[1]} of {argument.name}", _size_at(index, dim)))
    return found


def _dtype_at(index: int) -> Feature:
    return lambda setting: str(setting.dtypes[index]).removeprefix("torch.")


def _size_at(index: int, dim: int) -> Feature:
    return lambda setting: str(setting.shapes[index][dim])
