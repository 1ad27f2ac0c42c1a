"""Near-misses in the arguments of a planted pattern's operators: keywords and dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from npugraph_ex.operators import OPERATORS, Operator
from npugraph_ex.testing.generator.builder import Builder
from npugraph_ex.testing.generator.patterns import schema_of, with_style
from npugraph_ex.testing.generator.planted import Planted, refs
from npugraph_ex.testing.generator.program import Step

# What follows is about torch's own operators. Of others their records tell (`Operator.near_misses`).
_FOREIGN: Mapping[str, tuple[tuple[str, Any], ...]] = MappingProxyType(
    {"aten.add.Tensor": (("alpha", 2), ("alpha", -1))}
)
"""By operator, keywords that no pattern names, with values that change the result."""
_DROPPED: Mapping[str, str] = MappingProxyType({"aten._to_copy.default": "dtype"})
"""By operator, a keyword that patterns name with another value than its default, which means another thing."""
_DIMS: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {"aten.transpose.int": ("dim1", (2, -1)), "aten.permute.default": ("dims", ((2, 1, 0), (0, 2, 1), (2, 0, 1)))}
)
"""By operator, an argument that says which dimension, and other values than patterns have."""
_RANK = 3
"""How many dimensions the operands have where an argument names one of them."""
_READS_ROWS = frozenset(
    {
        "npu.npu_dynamic_quant.default",
        "aten._to_copy.default",
        "npu.npu_dtype_cast.default",
        "npu._npu_dtype_cast.default",
    }
)
"""Operators that take the rows of any view."""


def foreign_keywords(step: Step) -> tuple[tuple[str, Any], ...]:
    """The keywords that no pattern names, with values that change the result."""
    if step.operator in _FOREIGN:
        return _FOREIGN[step.operator]
    return tuple((name, value) for name, values in _misses(step, keyword_only=True).items() for value in values)


def _record(step: Step) -> Operator | None:
    return OPERATORS.get(schema_of(step).name)


def _misses(step: Step, *, keyword_only: bool) -> dict[str, tuple[Any, ...]]:
    """Other values for the operator's keyword-only arguments, or for the others, from its record."""
    record = _record(step)
    arguments = [argument.name for argument in schema_of(step).arguments if argument.kwarg_only == keyword_only]
    return {name: record.near_misses[name] for name in record.near_misses if name in arguments} if record else {}


def keyword(builder: Builder, planted: Planted) -> bool:
    """An argument that the pattern does not name has another value than its default."""
    position = builder.pick([i for i, step in enumerate(planted.steps) if foreign_keywords(step)])
    step = planted.steps[position]
    name, value = builder.pick(foreign_keywords(step))
    planted.steps[position] = dataclasses.replace(step, kwargs=tuple({**dict(step.kwargs), name: value}.items()))
    return False


def dropped_keyword(builder: Builder, planted: Planted) -> bool:
    """An argument that the pattern names has its default instead."""
    del builder
    position = dropping(planted.steps)[-1]
    name = _dropped(planted.steps[position])
    step = with_style(planted.steps[position], "keyword")
    kwargs = tuple((key, value) for key, value in step.kwargs if key != name)
    planted.steps[position] = dataclasses.replace(step, kwargs=kwargs)
    if name != "dtype":
        return False  # along that dimension the scales do not fit
    (source,) = refs(step)
    (result,) = step.results
    planted.results = {**planted.results, result: (planted.results[result][0], planted.results[source.name][1])}
    return True


def dropping(steps: Sequence[Step]) -> list[int]:
    """The positions of the steps that have a keyword to drop."""
    return [i for i, step in enumerate(steps) if _dropped(step)]


def _dropped(step: Step) -> str:
    """An argument whose default has another meaning; empty where there is none."""
    if step.operator in _DROPPED:
        return _DROPPED[step.operator]
    written = dict(with_style(step, "written").kwargs)
    for name in _misses(step, keyword_only=False):
        (default,) = (argument.default_value for argument in schema_of(step).arguments if argument.name == name)
        if _meaning(step, written) != _meaning(step, {**written, name: default}):
            return name
    return ""


def _meaning(step: Step, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments in the form for comparisons."""
    record = _record(step)
    return {**arguments, **(record.canonical(_RANK, arguments) if record and record.canonical else {})}


def wrong_dim(builder: Builder, planted: Planted) -> bool:
    """An operator works along, or keeps, another dimension."""
    position = turning(planted.steps)[-1]
    step = planted.steps[position]
    if step.operator == "aten.view.default":
        # All dimensions become one row, where the pattern keeps the last.
        planted.steps[position] = dataclasses.replace(step, args=(step.args[0], (1, -1)))
        return False
    name, values = _dims(step) or ("", ())
    value = builder.pick(values)
    planted.steps[position] = _with_argument(step, name, value)
    if step.operator not in _DIMS:
        return False
    _turn(planted, step, value)
    return True


def _dims(step: Step) -> tuple[str, tuple[Any, ...]] | None:
    """An argument that names a dimension, and values for it that patterns do not have."""
    return _DIMS.get(step.operator) or next(iter(_misses(step, keyword_only=False).items()), None)


def turning(steps: Sequence[Step]) -> list[int]:
    """The positions of the steps whose dimension can be another one."""
    viewed = {ref.name for step in steps if step.operator in _READS_ROWS for ref in refs(step)}
    return [
        i
        for i, step in enumerate(steps)
        if _dims(step) or (step.operator == "aten.view.default" and viewed & set(step.results))
    ]


def _with_argument(step: Step, name: str, value: Any) -> Step:
    """The step with another value of an argument, wherever it stands."""
    position = [argument.name for argument in schema_of(step).arguments].index(name)
    if position < len(step.args):
        return dataclasses.replace(step, args=(*step.args[:position], value, *step.args[position + 1 :]))
    return dataclasses.replace(step, kwargs=tuple({**dict(step.kwargs), name: value}.items()))


def _turn(planted: Planted, step: Step, value: Any) -> None:
    """Note the shape that the step's result now has."""
    (source,), (result,) = refs(step), step.results
    shape, dtype = planted.results[source.name]
    order = value if isinstance(value, tuple) else (2, 1, 0)  # 0 and the last change places
    planted.results = {**planted.results, result: (tuple(shape[dim] for dim in order), dtype)}
