"""A planted pattern on its way into a program: what near-misses and variations edit before it is appended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from npugraph_ex.testing.generator.builder import Value
from npugraph_ex.testing.generator.inputs import Dim
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.generator.program import Ref, Step


@dataclass
class Planted:
    """A pattern on its way into a program.

    Attributes:
        pattern: which one.
        arguments: the names of the values that it is applied to.
        steps: its steps, not yet appended.
        outputs: names of its results.
        vanishing: names of the tensors that a fused operator would not produce.
        views: names of results that lie in an argument, with its name; fusion leaves them as they are.
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
    views: dict[str, str]
    results: dict[str, tuple[tuple[Dim, ...], torch.dtype]]
    certain: bool = True
    burnt_in: bool = False
    also_returned: list[str] = field(default_factory=list)

    def value(self, name: str) -> Value:
        """A result as the builder needs it; one that lies in an argument may be written, which the argument then shows."""
        return Value(*self.results[name], self.views.get(name), contiguous=name not in self.views)

    def between(self) -> list[str]:
        """The values that a later step of the pattern reads, without results that lie in an argument."""
        read = {ref.name for step in self.steps for ref in refs(step)}
        shown = [name for name in self.outputs if name not in self.views and self.results[name][1].is_floating_point]
        return [name for name in (*self.vanishing, *shown) if name in read]

    def early(self) -> list[str]:
        """The arguments that an operator before the last reads: what only the last reads may be written before it."""
        read = {ref.name for step in self.steps[:-1] for ref in refs(step)}
        return [name for name in self.arguments if name in read]

    def late(self) -> list[str]:
        """The arguments that only the last operator reads; all that it reads where others read them too."""
        read = {ref.name for ref in refs(self.steps[-1])} & set(self.arguments)
        return sorted(read - set(self.early())) or sorted(read)

    def ready(self) -> list[str]:
        """The floating-point results that are there before the last operator and that a fused operator makes late."""
        made = {name for step in self.steps[:-1] for name in step.results} - self.views.keys()
        return [name for name in self.outputs if name in made and self.results[name][1].is_floating_point]

    def first_kernel(self) -> int:
        """The position of the first step that fusion replaces: views of arguments stay, on whatever stream."""
        return next(i for i, step in enumerate(self.steps) if not self.views.keys() >= {*step.results})

    def producer(self, name: str) -> int:
        """The position of the step that makes ``name``."""
        return next(i for i, step in enumerate(self.steps) if name in step.results)


def refs(step: Step) -> list[Ref]:
    """The values that a step reads, those in lists too."""

    def within(value: Any) -> list[Ref]:
        if isinstance(value, tuple):
            return [ref for item in value for ref in within(item)]
        return [value] if isinstance(value, Ref) else []

    return within((*step.args, *dict(step.kwargs).values()))


def replaced(step: Step, old: str, new: str) -> Step:
    """The step with the value ``new`` wherever it is given ``old``."""

    def swap(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(swap, value))
        return Ref(new) if value == Ref(old) else value

    kwargs = tuple((name, swap(value)) for name, value in step.kwargs)
    return dataclasses.replace(step, args=tuple(map(swap, step.args)), kwargs=kwargs)


def renamed(step: Step, names: Mapping[str, str]) -> Step:
    """The step with other names for what it reads and for its results."""

    def fresh(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names[value.name])
        return tuple(map(fresh, value)) if isinstance(value, tuple) else value

    kwargs = tuple((name, fresh(value)) for name, value in step.kwargs)
    return Step(step.operator, tuple(map(fresh, step.args)), kwargs, tuple(names[result] for result in step.results))
