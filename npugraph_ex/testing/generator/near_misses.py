"""Programs that almost contain a pattern: the named ways to spoil a planted pattern. None of them may be fused.

Each way edits the planted steps before they join the program, and returns whether the program can still run (some wrong
arguments have no kernel; then only the graph is checked).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from npugraph_ex.fusion.rules import RULE_NAMES, operands_of
from npugraph_ex.testing.generator.argument_misses import (
    dropped_keyword,
    dropping,
    foreign_keywords,
    keyword,
    turning,
    wrong_dim,
)
from npugraph_ex.testing.generator.builder import Builder
from npugraph_ex.testing.generator.order_misses import cyclic_input, late_input, stream_boundary
from npugraph_ex.testing.generator.patterns import Pattern, Traced
from npugraph_ex.testing.generator.planted import Planted, refs, replaced
from npugraph_ex.testing.generator.program import Ref, Step

_HARMLESS = (("neg.default",), ("abs.default",))
"""Steps that are part of no rule."""
_BETWEEN = (("neg.default",), ("mul.Tensor", 2.0), ("abs.default",), ("add.Tensor", 0.25))


def extra_user(builder: Builder, planted: Planted) -> bool:
    """A value that fusion would remove has another user, or is a result."""
    name = str(builder.pick([name for name in planted.vanishing if name not in planted.views]))
    if builder.chance(50):
        planted.also_returned.append(name)
    else:
        planted.steps.append(Step("aten.abs.default", (Ref(name),), (), ("extra",)))
        planted.also_returned.append("extra")
    return True


def step_between(builder: Builder, planted: Planted) -> bool:
    """Another operator changes a value between two matched operators."""
    name = str(builder.pick(planted.between()))
    position = planted.producer(name)
    operator, *rest = builder.pick(_HARMLESS if operands_of(planted.pattern.name).occurs_by_chance else _BETWEEN)
    planted.steps[position + 1 :] = [replaced(step, name, "between") for step in planted.steps[position + 1 :]]
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
    """The arguments are float32, which the fused operator does not take (the caller drew them)."""
    del builder, planted
    return True


def empty(builder: Builder, planted: Planted) -> bool:
    """A size is zero, which the fused operator does not take (the caller drew it)."""
    del builder, planted
    return True


def number(builder: Builder, planted: Planted) -> bool:
    """A number has a value that the fused operator does not take (the caller drew it)."""
    del builder, planted
    return True


def size(builder: Builder, planted: Planted) -> bool:
    """A size is one that the fused operator does not take (the caller drew it). Some are so large that nothing should run."""
    del builder, planted
    return False


def strides(builder: Builder, planted: Planted) -> bool:
    """The strides of a result are seen: it is a result of the program, or read as memory."""
    name = planted.outputs[0]
    if builder.chance(50):
        planted.steps.append(Step("aten.neg.default", (Ref(name),), (), ("seen",)))
        name = "seen"
    if builder.chance(50):
        planted.steps.append(Step("aten.as_strided.default", (Ref(name), (3,), (1,), 0), (), ("read",)))
        planted.steps.append(Step("aten.neg.default", (Ref("read"),), (), ("shown",)))
        name = "shown"
    planted.also_returned.append(name)
    return True


NEAR_MISSES: Mapping[str, Callable[[Builder, Planted], bool]] = MappingProxyType(
    {
        "extra user": extra_user,
        "step between": step_between,
        "mutation": mutation,
        "argument mutation": argument_mutation,
        "dtype": dtype,
        "empty": empty,
        "keyword": keyword,
        "dropped keyword": dropped_keyword,
        "wrong dim": wrong_dim,
        "number": number,
        "size": size,
        "stream boundary": stream_boundary,
        "late input": late_input,
        "cyclic input": cyclic_input,
        "strides": strides,
    }
)


WRITING = frozenset({"mutation", "argument mutation", "late input"})
"""Those in which something is written in place: made functional, the write would be none."""


def may_arrive_late(pattern: Pattern, traced: Traced) -> bool:
    """Whether an argument is read by the last operator alone, when another has made a result."""
    *before, last = traced.steps
    early = {ref.name for step in before for ref in refs(step)}
    late = {ref.name for ref in refs(last)} & {argument.name for argument in pattern.arguments} - early
    made = {name for step in before for name in step.results} & set(traced.outputs) - traced.views.keys()
    return bool(late) and any(traced.metas[name][1].is_floating_point for name in made)


def example_trace(pattern: Pattern) -> Traced:
    """The pattern's steps on inputs like its rule's example inputs."""
    shapes = {a.name: [max(size, 1) for size in a.dims] for a in pattern.arguments}
    dtypes = {a.name: a.dtype for a in pattern.arguments}
    numbers = {n: value if isinstance(value, int) else 1e-6 for n, value in pattern.rule.scalars.items()}
    return pattern.trace(shapes, dtypes, numbers)


def _between(traced: Traced) -> set[str]:
    """The values that one operator of the pattern makes and another reads."""
    return {ref.name for step in traced.steps for ref in refs(step)} & traced.metas.keys()


def applicable(pattern: Pattern) -> tuple[str, ...]:
    """The near-misses that make sense for a pattern: those about its inside need one, and keywords must be known."""
    constraints = operands_of(pattern.name)
    traced = example_trace(pattern)
    excluded = set() if _between(traced) else {"step between", "mutation", "argument mutation"}
    excluded |= set() if set(traced.vanishing) - traced.views.keys() else {"extra user"}
    excluded |= set() if pattern.name in RULE_NAMES else {"dtype", "empty"}  # a user's rule may take them
    excluded |= {"dtype"} if constraints.takes_single else set()
    excluded |= set() if constraints.refused_numbers else {"number"}
    excluded |= set() if constraints.refused_sizes else {"size"}
    excluded |= {"empty"} if pattern.leading is None or constraints.takes_empty else set()
    excluded |= set() if any(foreign_keywords(step) for step in traced.steps) else {"keyword"}
    excluded |= set() if dropping(traced.steps) else {"dropped keyword"}
    excluded |= set() if turning(traced.steps) else {"wrong dim"}
    kernels = [step for step in traced.steps if not traced.views.keys() >= {*step.results}]
    excluded |= set() if len(kernels) > 1 else {"stream boundary"}
    excluded |= set() if may_arrive_late(pattern, traced) else {"late input", "cyclic input"}
    excluded |= set() if pattern.rule.free_strides else {"strides"}
    return tuple(name for name in NEAR_MISSES if name not in excluded)
