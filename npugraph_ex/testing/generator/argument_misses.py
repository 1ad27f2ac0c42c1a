"""What the operators of a planted pattern are told: near-misses in their keywords and dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from npugraph_ex.testing.generator.builder import Builder
from npugraph_ex.testing.generator.patterns import respelled, schema_of
from npugraph_ex.testing.generator.planted import Planted, refs
from npugraph_ex.testing.generator.program import Step

# A keyword that no pattern names, with a value that changes the result. Codes are at::ScalarType, torch_npu's own above.
_QUINT4X2 = 16
FOREIGN_KEYWORDS: Mapping[str, tuple[tuple[str, Any], ...]] = MappingProxyType(
    {
        "npu.npu_dynamic_quant.default": (
            ("dst_type", _QUINT4X2),
            ("quant_mode", "pertensor"),
            ("dst_type_max", 64.0),
        ),
        "aten.add.Tensor": (("alpha", 2), ("alpha", -1)),
    }
)
DROPPED_KEYWORDS: Mapping[str, str] = MappingProxyType(
    {"npu.npu_quantize.default": "axis", "aten._to_copy.default": "dtype"}
)
"""By operator, a keyword that patterns name with another value than its default; and what the default means is another thing."""
_DIMS: Mapping[str, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "npu.npu_quantize.default": {"axis": (-2,)},
        "npu.npu_swiglu.default": {"dim": (0,)},
        "aten.transpose.int": {"dim1": (2, -1)},
        "aten.permute.default": {"dims": ((2, 1, 0), (0, 2, 1), (2, 0, 1))},
    }
)
"""By operator, an argument that says which dimension, and other values than patterns have."""
_READS_ROWS = frozenset(
    {
        "npu.npu_dynamic_quant.default",
        "aten._to_copy.default",
        "npu.npu_dtype_cast.default",
        "npu._npu_dtype_cast.default",
    }
)
"""Operators that take the rows of any view."""


def keyword(builder: Builder, planted: Planted) -> bool:
    """An argument that the pattern does not name has another value than its default."""
    position = builder.pick([i for i, step in enumerate(planted.steps) if step.operator in FOREIGN_KEYWORDS])
    step = planted.steps[position]
    name, value = builder.pick(FOREIGN_KEYWORDS[step.operator])
    planted.steps[position] = dataclasses.replace(step, kwargs=tuple({**dict(step.kwargs), name: value}.items()))
    return False


def dropped_keyword(builder: Builder, planted: Planted) -> bool:
    """An argument that the pattern names has its default instead."""
    del builder
    position = dropping(planted.steps)[-1]
    step = respelled(planted.steps[position], "keyword")
    name = DROPPED_KEYWORDS[step.operator]
    kwargs = tuple((key, value) for key, value in step.kwargs if key != name)
    planted.steps[position] = dataclasses.replace(step, kwargs=kwargs)
    if name != "dtype":
        return False  # along that dimension the scales do not fit
    (source,) = refs(step)
    (result,) = step.results
    planted.results = {**planted.results, result: (planted.results[result][0], planted.results[source.name][1])}
    return True


def dropping(steps: Sequence[Step]) -> list[int]:
    """The positions of the steps that have a keyword to drop.

    ``npu_quantize`` asks for its axis only where it divides; along its default, 1, it goes wrong if there are three dimensions.
    """
    return [i for i, step in enumerate(steps) if step.operator in DROPPED_KEYWORDS and not _multiplies(step)]


def _multiplies(step: Step) -> bool:
    return (
        step.operator == "npu.npu_quantize.default" and dict(respelled(step, "keyword").kwargs).get("div_mode") is False
    )


def wrong_dim(builder: Builder, planted: Planted) -> bool:
    """An operator works along, or keeps, another dimension."""
    position = turning(planted.steps)[-1]
    step = planted.steps[position]
    if step.operator == "aten.view.default":
        # All dimensions become one row, where the pattern keeps the last.
        planted.steps[position] = dataclasses.replace(step, args=(step.args[0], (1, -1)))
        return False
    ((name, values),) = _DIMS[step.operator].items()
    value = builder.pick(values)
    planted.steps[position] = _told(step, name, value)
    if step.operator.startswith("npu."):
        return False
    _turn(planted, step, value)
    return True


def turning(steps: Sequence[Step]) -> list[int]:
    """The positions of the steps whose dimension can be another one."""
    viewed = {ref.name for step in steps if step.operator in _READS_ROWS for ref in refs(step)}
    return [
        i
        for i, step in enumerate(steps)
        if step.operator in _DIMS or (step.operator == "aten.view.default" and viewed & set(step.results))
    ]


def _told(step: Step, name: str, value: Any) -> Step:
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
