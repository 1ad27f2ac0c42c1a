"""Programs that almost contain a pattern: each way of spoiling a planted one, by name. None of them may be fused.

A way edits the planted steps before they are appended to the program and answers whether the program still can be run
(some wrong arguments have no kernel; then only the graph is checked).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from npugraph_ex.testing.builder import Builder, Value
from npugraph_ex.testing.constraints import constraints_of
from npugraph_ex.testing.inputs import Dim
from npugraph_ex.testing.patterns import Pattern
from npugraph_ex.testing.program import Ref, Step

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
_HARMLESS = (("neg.default",), ("abs.default",))
"""Steps that are part of no rule."""
_BETWEEN = (("neg.default",), ("mul.Tensor", 2.0), ("abs.default",), ("add.Tensor", 0.25))


@dataclass
class Planted:
    """A pattern on its way into a program.

    Attributes:
        pattern: which one.
        arguments: the names of the values that it is applied to.
        steps: its steps, not yet appended.
        outputs: names of its results.
        vanishing: names of the tensors that a fused operator would not produce.
        results: symbolic shape and dtype of each.
        certain: whether the layouts of the arguments certainly allow the fusion.
        burnt_in: whether its steps contain numbers that other sizes would change.
        also_returned: names that a near-miss wants the program to return.
    """

    pattern: Pattern
    arguments: tuple[str, ...]
    steps: list[Step]
    outputs: list[str]
    vanishing: list[str]
    results: dict[str, tuple[tuple[Dim, ...], torch.dtype]]
    certain: bool = True
    burnt_in: bool = False
    also_returned: list[str] = field(default_factory=list)

    def value(self, name: str) -> Value:
        """What a builder has to know of a result."""
        shape, dtype = self.results[name]
        return Value(shape, dtype)

    def between(self) -> list[str]:
        """The vanishing values that a later step of the pattern reads."""
        read = {ref.name for step in self.steps for ref in _refs(step)}
        return [name for name in self.vanishing if name in read]

    def early(self) -> list[str]:
        """The arguments that an operator before the last reads: what only the last reads may be written before it."""
        read = {ref.name for step in self.steps[:-1] for ref in _refs(step)}
        return [name for name in self.arguments if name in read]

    def producer(self, name: str) -> int:
        """The position of the step that makes ``name``."""
        return next(i for i, step in enumerate(self.steps) if name in step.results)


def _refs(step: Step) -> list[Ref]:
    return [value for value in (*step.args, *dict(step.kwargs).values()) if isinstance(value, Ref)]


def _replaced(step: Step, old: str, new: str) -> Step:
    def swap(value: Any) -> Any:
        return Ref(new) if value == Ref(old) else value

    kwargs = tuple((name, swap(value)) for name, value in step.kwargs)
    return dataclasses.replace(step, args=tuple(map(swap, step.args)), kwargs=kwargs)


def extra_user(builder: Builder, planted: Planted) -> bool:
    """A value that would vanish has one more user, or leaves the program."""
    name = str(builder.pick(planted.vanishing))
    if builder.chance(50):
        planted.also_returned.append(name)
    else:
        planted.steps.append(Step("aten.abs.default", (Ref(name),), (), ("extra",)))
        planted.also_returned.append("extra")
    return True


def step_between(builder: Builder, planted: Planted) -> bool:
    """Something is done to a value on its way from one matched operator to the next."""
    name = str(builder.pick(planted.between()))
    position = planted.producer(name)
    operator, *rest = builder.pick(_HARMLESS if constraints_of(planted.pattern.name).common else _BETWEEN)
    planted.steps[position + 1 :] = [_replaced(step, name, "between") for step in planted.steps[position + 1 :]]
    planted.steps.insert(position + 1, Step(f"aten.{operator}", (Ref(name), *rest), (), ("between",)))
    return True


def mutation(builder: Builder, planted: Planted) -> bool:
    """A value is written in place between the operator that makes it and the one that reads it."""
    name = str(builder.pick(planted.between()))
    position = planted.producer(name)
    operator, scalar = builder.pick((("mul_.Tensor", 2.0), ("add_.Tensor", 0.5), ("neg_.default", None)))
    args = (Ref(name),) if scalar is None else (Ref(name), scalar)
    planted.steps.insert(position + 1, Step(f"aten.{operator}", args))
    return True


def argument_mutation(builder: Builder, planted: Planted) -> bool:
    """An argument is written in place after the first matched operator and before the last."""
    name = str(builder.pick(planted.early()))
    # A value of the program's own may be written as well as an input.
    own = builder.values[name].memory_of is None
    operator = "mul_.Tensor" if own else builder.pick(("mul_.Tensor", "add_.Tensor"))
    number = 0.5 if builder.values[name].dtype.is_floating_point else 2
    planted.steps.insert(len(planted.steps) - 1, Step(f"aten.{operator}", (Ref(name), number)))
    return True


def dtype(builder: Builder, planted: Planted) -> bool:
    """The arguments are float32, which the fused operator does not take (the caller drew them so)."""
    del builder, planted
    return True


def empty(builder: Builder, planted: Planted) -> bool:
    """A size is zero, which the fused operator does not take (the caller drew it so)."""
    del builder, planted
    return True


def number(builder: Builder, planted: Planted) -> bool:
    """A number is one that the fused operator does not take (the caller drew it so)."""
    del builder, planted
    return True


def keyword(builder: Builder, planted: Planted) -> bool:
    """An argument that the pattern does not name has another value than its default."""
    positions = [i for i, step in enumerate(planted.steps) if step.operator in FOREIGN_KEYWORDS]
    position = builder.pick(positions)
    step = planted.steps[position]
    name, value = builder.pick(FOREIGN_KEYWORDS[step.operator])
    kwargs = {**dict(step.kwargs), name: value}
    planted.steps[position] = dataclasses.replace(step, kwargs=tuple(kwargs.items()))
    return False


NEAR_MISSES: Mapping[str, Callable[[Builder, Planted], bool]] = MappingProxyType(
    {
        "extra user": extra_user,
        "step between": step_between,
        "mutation": mutation,
        "argument mutation": argument_mutation,
        "dtype": dtype,
        "empty": empty,
        "keyword": keyword,
        "number": number,
    }
)


def applicable(pattern: Pattern) -> tuple[str, ...]:
    """The near-misses that make sense for a pattern: those about its inside need one, and keywords must be known."""
    constraints = constraints_of(pattern.name)
    shapes = {a.name: [max(size, 1) for size in a.dims] for a in pattern.arguments}
    dtypes = {a.name: a.dtype for a in pattern.arguments}
    numbers = {n: value if isinstance(value, int) else 1e-6 for n, value in pattern.rule.scalars.items()}
    traced = pattern.trace(shapes, dtypes, numbers)
    excluded = set() if traced.vanishing else {"extra user", "step between", "mutation", "argument mutation"}
    excluded |= {"dtype"} if constraints.takes_single else set()
    excluded |= set() if constraints.refused else {"number"}
    excluded |= {"empty"} if pattern.leading is None or constraints.takes_empty else set()
    excluded |= set() if any(step.operator in FOREIGN_KEYWORDS for step in traced.steps) else {"keyword"}
    return tuple(name for name in NEAR_MISSES if name not in excluded)
