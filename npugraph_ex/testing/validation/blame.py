"""Tells a wrong replacement from a weak guard: is the replacement wrong everywhere, or only where a guard could refuse it?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.validation.kinds import Kind
from npugraph_ex.testing.validation.survey import Setting, example_setting
from npugraph_ex.testing.validation.trials import Trial, Trials, elements

_FEWEST = 3
_DOUBT = 1e-4
"""How probable it may be that all that was run on the right side is right by luck."""
_CLOSER = 12
_WIDER = 24
_CONFIRMING = 12
_MOST_CONFIRMING = 96
_OF_EACH = 6
_MOST_OF_EACH = 48
_ROUNDS = 8
_BROADCASTING = "argument that broadcasts"
_RANK = "number of dimensions of "
_DTYPE = "dtype of "
_DTYPES = "pair of dtypes of "
_ALL_DTYPES = "combination of dtypes"
_SIZE = "size of dimension "
_PAIR = "pair of sizes "
_NUMBER, _BESIDE = "number ", " beside the "
_MEANT = (_BROADCASTING, _RANK, _DTYPES, _ALL_DTYPES, _SIZE, _PAIR, _NUMBER)
"""What has the value of the examples where the author of a rule means it."""
_MOST_GRAFTED = 24
_MOST_ELEMENTS = 1 << 16
Feature = Callable[[Setting], str]
Graft = Callable[[Setting, Setting], list[Setting]]
"""Settings like the first, but with the property of the second."""
Fuses = Callable[[Setting], bool]
Again = Callable[[Sequence[Setting], str, int, tuple[Kind, ...]], Trials]
"""Runs more programs: in these settings, drawn from this seed, so many, with inputs of these kinds; of all where there are none."""


@dataclass(frozen=True)
class Divide:
    """A property of the arguments that separates wrong settings from right ones.

    Attributes:
        what: in words: "the dtype of x", "size of dimension -1 of x", "number k beside the size of dimension -1 of x".
        wrong: its values where the replacement is wrong.
        right: its values where it is right.
        feature: reads the value from a setting.
        graft: gives a setting the value of another one.
        needed: how many programs must be right on the right side before luck is ruled out.
        elements: how many elements they must have: of a fault that few elements show, a small size shows nothing.
        remedy: the check that refuses what is wrong, where there is a ready one.
    """

    what: str
    wrong: tuple[str, ...]
    right: tuple[str, ...]
    feature: Feature
    graft: Graft
    needed: int
    elements: int = 0
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        what, _, beside = self.what.partition(_BESIDE)
        wrong, right = map(_plain, (self.wrong, self.right)) if beside else (self.wrong, self.right)
        sides = f"{_some(wrong)}, right where it is {_some(right)}"
        return f"wrong where the {what} is {sides.replace('the size', f'the {beside}', 1)}{remedy}"


def _plain(values: Sequence[str]) -> Sequence[str]:
    """What a number is to a size, without what goes without saying: a dimension that is not there, and all below zero twice."""
    left_out = {"none", *(["below minus the size"] if "negative" in values else [])}
    return [value for value in values if value not in left_out] or values


def _some(values: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(values[:most])
    return f"{shown}, ..." if len(values) > most else shown


def divide_of(
    pattern: Pattern, trials: Trials, settings: Sequence[Setting], again: Again, fuses: Fuses
) -> Divide | None:
    """A property that separates wrong from right in new programs too; None when there is none.

    What was tried until something was wrong may be a handful, in which any property divides by accident, or none enough.
    So more programs run where it was wrong, and some in all dtypes. Then as many run on the right side of the likeliest
    property as it takes to show a fault that is as frequent as on its wrong side, and some that differ from what was wrong in
    this property alone. The answer is that of all of them together.

    Args:
        pattern: what was planted.
        trials: what was tried; at least one is wrong.
        settings: all that can be tried.
        again: runs more.
        fuses: whether the rule takes a setting.
    """
    seen = Trials(list(trials.made))
    wrong = list(dict.fromkeys(trial.setting for trial in trials.of("wrong")))
    for number in range(_ROUNDS):
        seen.made += again(wrong, f"closer {number}", _CLOSER, _kinds(seen)).made
        if len(seen.of("wrong")) >= _FEWEST:
            break
    of_dtypes: defaultdict[object, list[Setting]] = defaultdict(list)
    for setting in settings:
        of_dtypes[setting.dtypes].append(setting)
    for dtypes, among in of_dtypes.items():
        seen.made += again(among, f"wider {dtypes}", max(_OF_EACH, _WIDER // len(of_dtypes)), ()).made
    for number in range(_ROUNDS):
        divide = _best(pattern, seen)
        if divide is None or (
            _is_cause(divide, seen, again, fuses, number) and _holds(divide, settings, seen, again, number)
        ):
            return divide
    return None


def _kinds(trials: Trials) -> tuple[Kind, ...]:
    """The kinds of inputs of which some showed the fault."""
    return tuple(dict.fromkeys(trial.kind for trial in trials.of("wrong") if trial.kind is not None))


def _is_cause(divide: Divide, seen: Trials, again: Again, fuses: Fuses, number: int) -> bool:
    """Whether the wrong settings become right when only this property changes. New programs are added to ``seen``.

    This tells the cause from a property that only comes with it, such as a size that was small wherever another was large.
    """
    rightly = {divide.feature(trial.setting): trial.setting for trial in reversed(seen.of("right"))}
    blamed = dict.fromkeys(trial.setting for trial in seen.of("wrong"))
    grafted = [
        one
        for one in dict.fromkeys(
            one
            for bad in blamed
            for value in divide.right
            if value in rightly
            for one in divide.graft(bad, rightly[value])
        )
        if divide.feature(one) in divide.right and elements(one) <= _MOST_ELEMENTS and fuses(one)
    ][:_MOST_GRAFTED]
    if not grafted:
        return True
    of_each, kinds = max(2, math.ceil(_CONFIRMING / len(grafted))), _kinds(seen)
    more = [
        trial
        for place, one in enumerate(grafted)
        for trial in again([one], f"grafted {number} {place}", of_each, kinds).made
    ]
    seen.made += more
    return not Trials(more).of("wrong")


def _holds(divide: Divide, settings: Sequence[Setting], seen: Trials, again: Again, number: int) -> bool:
    """Whether all is right on the right side in more programs, which are added to what was seen: what is wrong moves the divide.

    First as many as rule luck out, with such inputs as showed the fault. Then some of each value: where most settings are of
    one value, the others would hardly be tried. Each of these in the dtypes in which something was wrong, because a dtype of
    few digits does not show a small difference; and what was wrong in the dtypes of each, because few sizes are tried in most.
    """
    # Random programs draw the numbers of a setting that has none.
    numbered = [trial.setting for trial in seen.of("right")] if divide.what.startswith(_NUMBER) else settings
    rightly = [setting for setting in numbered if divide.feature(setting) in divide.right]
    one_of_each = list({divide.feature(setting): setting for setting in reversed(rightly)}.values())
    blamed = dict.fromkeys(trial.setting for trial in seen.of("wrong"))
    crossed = [
        *(replace(one, dtypes=dtypes) for one in one_of_each for dtypes in dict.fromkeys(one.dtypes for one in blamed)),
        *(replace(one, dtypes=of.dtypes, foreign=of.foreign) for of in one_of_each for one in blamed),
    ]
    each = list(dict.fromkeys([*one_of_each, *(one for one in crossed if divide.feature(one) in divide.right)]))
    kinds, right, ran, shown = _kinds(seen), 0, 0, 0
    # The larger half, where few elements show the fault.
    larger = sorted(rightly, key=elements)[len(rightly) // 2 :]
    while right < divide.needed or shown < divide.elements:
        count = min(_WIDER, divide.needed - right) if right < divide.needed else _WIDER
        more = again(rightly if right < divide.needed else larger, f"right {number} {ran}", count, kinds)
        seen.made += more.made
        right, ran = right + len(more.of("right")), ran + count
        shown += sum(trial.outcome.elements for trial in more.of("right"))
        if more.of("wrong") or not more.of("right") or ran > 2 * _MOST_CONFIRMING:
            return False
    more = again(each, f"each {number}", min(_OF_EACH * len(each), _MOST_OF_EACH), ())
    seen.made += more.made
    return bool(more.of("right")) and not more.of("wrong")


def _best(pattern: Pattern, trials: Trials) -> Divide | None:
    """The property that all wrong trials have and the fewest right ones; None where too many right ones have it.

    A right trial on the wrong side is luck: ``x - y`` and ``y - x`` agree where x and y are the same tensor.
    """
    wrong, right, own = trials.of("wrong"), trials.of("right"), example_setting(pattern)
    kinds = _kinds(trials)
    found: list[tuple[int, Divide]] = []
    for what, feature, graft in _features(pattern):
        bad = {feature(trial.setting) for trial in wrong}
        lucky = [trial for trial in right if feature(trial.setting) in bad]
        good = {feature(trial.setting) for trial in right} - bad
        enough = len(wrong) >= _FEWEST and len(right) - len(lucky) >= _FEWEST
        # What is right in dtypes alone that its author has not thought of is wrong.
        meant = any(not trial.setting.foreign and feature(trial.setting) in good for trial in right)
        # So is what is wrong as its own examples are.
        meant = meant and not (what.startswith(_MEANT) and feature(own) in bad)
        needed = _needed(len(wrong), len([trial for trial in lucky if trial.kind is None or trial.kind in kinds]))
        if enough and meant and needed <= _MOST_CONFIRMING:
            shown = _elements_needed([trial for trial in (*wrong, *lucky) if trial.kind is None or trial.kind in kinds])
            remedy = _remedy(pattern, what, good, bad)
            divide = Divide(what, _sorted(bad), _sorted(good), feature, graft, needed, shown, remedy)
            found.append((len(lucky), divide))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _needed(wrong: int, lucky: int) -> int:
    """How many programs must be right where, were they wrong as often as those on the wrong side, hardly all would be."""
    if not lucky:
        return _CONFIRMING
    return max(_CONFIRMING, math.ceil(math.log(_DOUBT) / math.log(lucky / (wrong + lucky))))


def _elements_needed(trials: Sequence[Trial]) -> int:
    """How many elements must be right where, were as many of them wrong as on the wrong side, hardly all would be.

    None where all of some result is wrong, or another thing than its values.
    """
    wrong, among = (sum(one.outcome.wrong for one in trials), sum(one.outcome.elements for one in trials))
    return math.ceil(-math.log(_DOUBT) * among / wrong) if wrong else 0


def _sorted(values: set[str]) -> tuple[str, ...]:
    return tuple(sorted(values, key=lambda value: (len(value), value)))


def _features(pattern: Pattern) -> list[tuple[str, Feature, Graft]]:
    """What a guard can ask: what broadcasts, numbers of dimensions, dtypes, pairs of sizes, and sizes that always agree once."""
    found: list[tuple[str, Feature, Graft]] = [(_BROADCASTING, _broadcasting(pattern), lambda *_: [])]
    found += [(f"{_RANK}{one.name}", _rank_at(index), _of_rank(index)) for index, one in enumerate(pattern.arguments)]
    found += _features_of_dtypes(pattern)
    seen: defaultdict[object, bool] = defaultdict(bool)
    for index, argument in enumerate(pattern.arguments):
        for pair in combinations(range(-len(argument.dims), 0), 2):
            found.append((f"{_PAIR}{pair[0]} and {pair[1]} of {argument.name}", _pair_at(index, pair), lambda *_: []))
    for index, argument in enumerate(pattern.arguments):
        for dim, size in enumerate(argument.dims):
            place = (size, dim - len(argument.dims))
            if not seen[place]:
                seen[place] = True
                what = f"{_SIZE}{place[1]} of {argument.name}"
                found.append((what, _size_at(index, place[1]), _of_size(pattern, index, place)))
    return [*found, *_features_of_numbers(pattern)]


def _features_of_dtypes(pattern: Pattern) -> Iterator[tuple[str, Feature, Graft]]:
    """Each dtype that the examples have, whether two arguments of one dtype still have one, and whether all are the examples'."""
    for dtype in dict.fromkeys(argument.dtype for argument in pattern.arguments):
        index, one = next((at, one) for at, one in enumerate(pattern.arguments) if one.dtype == dtype)
        yield f"{_DTYPE}{one.name}", _dtype_at(index), _of_dtype_at(index)
    for pair in combinations(range(len(pattern.arguments)), 2):
        one, other = (pattern.arguments[index] for index in pair)
        if one.dtype == other.dtype:
            yield f"{_DTYPES}{one.name} and {other.name}", _dtypes_at(pair), _of_dtype
    if len(pattern.arguments) > 1:
        yield _ALL_DTYPES, _as_in_examples(pattern), _of_dtype


def _features_of_numbers(pattern: Pattern) -> Iterator[tuple[str, Feature, Graft]]:
    """How each whole-number argument compares with each size, and what it is; of others whether it is infinite.

    A dimension has no size to be compared with.
    """
    whole = {name: number for name, number in pattern.rule.scalars.items() if type(number) is int}
    for index, argument in enumerate(pattern.arguments):
        for place in range(-len(argument.dims), 0):
            for name, given in whole.items():
                what = f"{_NUMBER}{name}{_BESIDE}{_SIZE}{place} of {argument.name}"
                yield what, _number_at(name, given, _size_at(index, place)), _of_numbers(pattern)
    for name, number in pattern.rule.scalars.items():
        feature = _number(name, number) if name in whole else _finiteness(name, number)
        yield f"{_NUMBER}{name}", feature, _of_numbers(pattern)


def _number(name: str, given: float) -> Feature:
    return lambda setting: str(dict(setting.numbers).get(name, given))


def _finiteness(name: str, given: float) -> Feature:
    """A finite number, whose value is no cause, or which infinity it is."""

    def shown(setting: Setting) -> str:
        number = dict(setting.numbers).get(name, given)
        return "finite" if math.isfinite(number) else str(number)

    return shown


def _number_at(name: str, given: float, size_at: Feature) -> Feature:
    """How a numeric argument compares with a size."""

    def shown(setting: Setting) -> str:
        number, size_shown = dict(setting.numbers).get(name, given), size_at(setting)
        if not number or size_shown == "none":
            return size_shown if number else "0"
        size = int(size_shown)
        if number < 0:
            return "below minus the size" if number < -size else "negative"
        at: dict[float, str] = {size - 1: "one less than the size", size: "equal to the size"}
        return at.get(number) or ("above the size" if number > size else "below the size")

    return shown


def _of_numbers(pattern: Pattern) -> Graft:
    return lambda bad, one: [replace(bad, numbers=one.numbers or tuple(pattern.rule.scalars.items()))]


def _of_dtype(bad: Setting, one: Setting) -> list[Setting]:
    return [replace(bad, dtypes=one.dtypes, foreign=one.foreign)]


def _of_dtype_at(index: int) -> Graft:
    """The dtypes of all arguments, or of this one alone: what is right beside its like may be wrong beside another dtype."""

    def grafted(bad: Setting, one: Setting) -> list[Setting]:
        alone = (*bad.dtypes[:index], one.dtypes[index], *bad.dtypes[index + 1 :])
        whole = _of_dtype(bad, one)
        return whole if alone == one.dtypes else [*whole, replace(bad, dtypes=alone, foreign=True)]

    return grafted


def _of_rank(index: int) -> Graft:
    """The last dimensions of the argument, and of all arguments that have as many; or more of one element in front."""

    def grafted(bad: Setting, one: Setting) -> list[Setting]:
        old, new = len(bad.shapes[index]), len(one.shapes[index])

        def resized(shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape[old - new :] if new < old else (1,) * (new - old) + shape

        alone = [resized(shape) if place == index else shape for place, shape in enumerate(bad.shapes)]
        together = [resized(shape) if len(shape) == old else shape for shape in bad.shapes]
        return [replace(bad, shapes=tuple(shapes)) for shapes in (alone, together)]

    return grafted


def _of_size(pattern: Pattern, index: int, place: tuple[int, int]) -> Graft:
    """Another size for the dimensions that agree in the example: all of them, or those at this place."""

    def grafted(bad: Setting, one: Setting) -> list[Setting]:
        if len(one.shapes[index]) < -place[1]:
            return []
        size = one.shapes[index][place[1]]

        def sized(*, here: bool) -> Setting:
            shapes = []
            for argument, shape in zip(pattern.arguments, bad.shapes, strict=True):
                own = dict(enumerate(reversed(argument.dims), 1))
                alike = [own.get(at) == place[0] and not (here and at != -place[1]) for at in range(len(shape), 0, -1)]
                shapes.append(tuple(size if same else old for same, old in zip(alike, shape, strict=True)))
            return replace(bad, shapes=tuple(shapes))

        return [sized(here=False), sized(here=True)]

    return grafted


def _rank_at(index: int) -> Feature:
    return lambda setting: str(len(setting.shapes[index]))


def _dtype_at(index: int) -> Feature:
    return lambda setting: str(setting.dtypes[index]).removeprefix("torch.")


def _dtypes_at(pair: tuple[int, int]) -> Feature:
    return lambda setting: "equal" if len({setting.dtypes[index] for index in pair}) == 1 else "different"


def _as_in_examples(pattern: Pattern) -> Feature:
    """Of several arguments each may have a dtype that the rule takes, and both together not."""
    own = example_setting(pattern).dtypes
    return lambda setting: "that of the examples" if setting.dtypes == own else "another one"


def _size_at(index: int, place: int) -> Feature:
    return lambda setting: str(dict(enumerate(reversed(setting.shapes[index]), 1)).get(-place, "none"))


def _pair_at(index: int, pair: tuple[int, int]) -> Feature:
    def shown(setting: Setting) -> str:
        sizes = dict(enumerate(reversed(setting.shapes[index]), 1))
        one, other = (sizes.get(-place) for place in pair)
        return "none" if one is None or other is None else "equal" if one == other else "different"

    return shown


def _broadcasting(pattern: Pattern) -> Feature:
    def shown(setting: Setting) -> str:
        place = setting.broadcasts
        return "none" if place is None else f"{pattern.arguments[place].name} of shape {list(setting.shapes[place])}"

    return shown


def _remedy(pattern: Pattern, what: str, right: set[str], wrong: set[str]) -> str:
    """The check that refuses what is wrong, where there is a ready one."""
    own = {f"{_DTYPE}{one.name}": str(one.dtype).removeprefix("torch.") for one in pattern.arguments}
    if what in (_BROADCASTING, _ALL_DTYPES) or what.startswith((_RANK, _DTYPES)) or own.get(what) in right:
        check = f"LikeExamples({', '.join(f'{argument.name}=...' for argument in pattern.arguments)})"
    else:
        check = _range_of(what, right, wrong) if what.startswith(_SIZE) else ""
    return f"an extra_check can refuse that, such as npugraph_ex.{check}" if check else ""


def _range_of(what: str, right: set[str], wrong: set[str]) -> str:
    """The check of a size that takes what was right and refuses what was wrong; empty where no range does."""
    dim, _, name = what.removeprefix(_SIZE).partition(" of ")
    good, bad = ([int(size) for size in sizes if size.isdecimal()] for sizes in (right, wrong))
    if not good or not bad:
        return ""
    step = math.gcd(*good)
    limits = {
        f"at_most={max(good)}": 0 < max(good) < min(bad),
        f"at_least={min(good)}": min(good) > max(bad),
        f"multiple_of={step}": step > 0 and all(size % step for size in bad),
    }
    limit = next((limit for limit, divides in limits.items() if divides), "")
    return f'ShapeRange("{name}", {dim}, {limit})' if limit else ""
