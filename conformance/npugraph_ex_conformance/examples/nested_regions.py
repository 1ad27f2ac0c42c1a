"""Random programs that call nested compile regions, against eager mode.

A region takes a layer, which has tensors of its own, and matrices; it returns one to three. What it does is drawn: arithmetic, a
fusion, constants, views, other regions, `torch.cond`, sizes that depend on data, writes into arguments and into the layer. The
program calls regions, some in branches of `torch.cond`, for one layer or another, with inputs, views, halves of one value and
results of other calls, and writes some of them in between. Elements are integers, so nothing rounds.

Where torch fails with its own backend, too, nothing is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.oracle.judge import same_values
from npugraph_ex.testing.oracle.observation import Observation, host_copy, observe, visible_difference

_CALLS, _LAYERS, _STEPS = 3, 2, 5
_SIDES = (4, 5, 6)
"""Of the matrices, from call to call, in a program with symbolic sizes; otherwise the first."""
_DYNAMIC, _INNER, _BETWEEN, _TURNED, _ONE_MEMORY, _BRANCH, _NOTHING = 20, 30, 30, 20, 15, 10, 20
"""Chances in percent: of symbolic sizes, that a step of a region calls another one, that a value is written between two calls, that
an argument is turned, that two inputs lie in one memory, that a call stands in a branch, that a region returns None, too."""
_REFUSED = "calls a nested compile region that writes its arguments and has sizes that depend on data"
_Values = list[torch.Tensor]
_Layout = Callable[[torch.Tensor], torch.Tensor]
_Run = Callable[..., tuple[torch.Tensor, ...]]


class _RegionLayer(torch.nn.Module):
    """What a region is called for."""

    weight: torch.Tensor
    state: torch.Tensor

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([[number + 2]], dtype=dtype, device="npu"))
        self.register_buffer("state", torch.tensor([[number]], dtype=dtype, device="npu"))


_Step = Callable[[Sequence[_RegionLayer], _Values], Any]
"""Takes the layers, of which a region has one, and the values there are; gives None, or what comes after them."""


@dataclass
class _Draft:
    """Steps over square matrices, as far as they are drawn: a region, or the program.

    Attributes:
        taken: how many of the values are arguments.
        is_region: or else it is the program.
        roots: for each value the first one in whose memory it lies.
        steps: in their order.
        written: arguments that steps write.
        by_out: those that are written by `out=`, which Dynamo allows where they are contiguous.
        traits: "data" where a size depends on data, "branch" where operators do, "state" where a layer is written, "refused" where
            a region that is called has the first one and writes.
    """

    taken: int
    is_region: bool
    roots: list[int] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    by_out: set[int] = field(default_factory=set)
    traits: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.roots = [*range(self.taken)]

    def new(self, step: _Step, of: int | None = None) -> int:
        """Append a step that gives one value, in new memory or in that of another one; its position."""
        self.steps.append(step)
        self.roots.append(len(self.roots) if of is None else self.roots[of])
        return len(self.roots) - 1

    def writing(self, step: _Step, target: int) -> None:
        """Append a step that writes a value."""
        self.steps.append(step)
        self.mark_written(target)

    def mark_written(self, target: int) -> None:
        """A step writes a value."""
        if self.roots[target] < self.taken:
            self.written.add(self.roots[target])

    def any(self, choices: Choices) -> int:
        """The position of one of the values."""
        return choices.number(0, len(self.roots) - 1)

    def results(self, choices: Choices) -> list[int]:
        """Up to three values in new memory, of which no two share memory: torch refuses others."""
        places = [place for place, root in enumerate(self.roots) if root >= self.taken]
        places = places or [self.new(lambda _, values: values[-1] + 1)]
        some = [choices.pick(places) for _ in range(choices.number(1, 3))]
        return [*{self.roots[place]: place for place in some}.values()]

    def run(self, layers: Sequence[_RegionLayer], given: Sequence[torch.Tensor]) -> _Values:
        """All values, for these arguments."""
        values = [*given]
        for step in self.steps:
            made = step(layers, values)
            if made is not None:
                values += made if isinstance(made, (list, tuple)) else [made]
        return values


class _DrawnRegion(NamedTuple):
    """What a region does, which values it returns, and its function."""

    draft: _Draft
    results: list[int]
    function: Callable[..., Any]


@dataclass(frozen=True)
class _DrawnProgram:
    """A program with what its caller passes.

    Attributes:
        draft: what it does.
        outputs: the positions of the values that it returns.
        layers: those that regions are called for.
        layouts: how each input lies in its memory.
        one_memory: whether the second input is the first one, turned.
        dtype: of all matrices.
        dynamic: whether sizes are symbolic.
    """

    draft: _Draft
    outputs: list[int]
    layers: list[_RegionLayer]
    layouts: list[_Layout]
    one_memory: bool
    dtype: torch.dtype
    dynamic: bool

    def inputs(self, call: int) -> list[torch.Tensor]:
        """New ones for a call."""
        side, generator = _SIDES[call if self.dynamic else 0], torch.Generator().manual_seed(call)
        plain = [torch.randint(-3, 4, (side, side), generator=generator).to("npu", self.dtype) for _ in self.layouts]
        given = [layout(value) for layout, value in zip(self.layouts, plain, strict=True)]
        return [given[0], given[0].t(), *given[2:]] if self.one_memory else given

    def run(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results."""
        values = self.draft.run(self.layers, given)
        return tuple(values[place] for place in self.outputs)

    def compiled(self, backend: str) -> _Run:
        """It compiled by the library, which must capture what nothing keeps from it, or by a backend of torch."""
        torch.compiler.reset()
        strict = {
            "require_capture": self.draft.traits.isdisjoint({"data", "branch"}), "fusion_rules": {"muls_add": True},
        }  # fmt: skip
        options: Any = strict if backend == "npugraph_ex" else None
        run: _Run = torch.compile(self.run, backend=backend, dynamic=self.dynamic, fullgraph=True, options=options)
        return run


def nested_region_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is."""
    program = _drawn(Choices(Sampled(f"nested regions {seed}")))
    try:
        return _difference(program, program.compiled("npugraph_ex"))
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        raised = f"raised {type(error).__name__}: {error}"
    if _REFUSED in raised and "refused" in program.draft.traits:
        return ""
    try:
        wrong_there = _difference(program, program.compiled("aot_eager"))
    except Exception:  # noqa: BLE001 - whatever torch raises
        return ""
    return "" if wrong_there else raised


def _difference(program: _DrawnProgram, compiled: _Run) -> str:
    """What several calls find; results of earlier ones are looked at once more in the end."""
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    before = [layer.state.clone() for layer in program.layers]
    for call in range(_CALLS):
        (eager, old_states, wanted), (fast, new_states, found) = (
            _called(program, run, call, before) for run in (program.run, compiled)
        )
        wrong = visible_difference(eager, fast, kept_as=False)
        if wrong:
            return f"call {call}: {wrong}"
        old, new = (*eager.outputs, *eager.inputs, *old_states), (*fast.outputs, *fast.inputs, *new_states)
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            if not same_values(one, other):
                return f"call {call}: value {place} of outputs, inputs and states is {other.tolist()} instead of {one.tolist()}"
        before = [layer.state.clone() for layer in program.layers]
        results += zip(wanted, found, strict=True)
    late = [place for place, (one, other) in enumerate(results) if not torch.equal(one.cpu(), other.cpu())]
    return f"results {late} of earlier calls have changed" if late else ""


def _called(
    program: _DrawnProgram, run: _Run, call: int, states: Sequence[torch.Tensor]
) -> tuple[Observation, list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """What one call looks like, the states of the layers after it, and its results."""
    for layer, state in zip(program.layers, states, strict=True):
        layer.state.copy_(state)
    given = program.inputs(call)
    with torch.no_grad():
        results = run(*given)
    return observe(given, results), [host_copy(layer.state) for layer in program.layers], results


def _drawn(choices: Choices) -> _DrawnProgram:
    dynamic, dtype = choices.chance(_DYNAMIC), choices.pick((torch.float32, torch.int32))
    # With symbolic sizes Dynamo fails about constant tensors in regions, and about regions in regions.
    draws = [draw for draw in _DRAWS if not (dynamic and draw is _constant)]
    inner = [_region(number, choices, draws, []) for number in range(2)]
    outer = [_region(2 + number, choices, draws, [] if dynamic else inner) for number in range(choices.number(1, 2))]
    draft = _Draft(choices.number(2, 3), False)
    for _ in range(choices.number(1, 3)):
        for _ in range(choices.number(0, 2)):
            choices.pick(draws)(choices, draft)
        region = choices.pick([*outer, inner[0]])
        for _ in range(choices.pick((1, 2, 2, 3))):
            _call(choices, draft, region, choices.number(0, _LAYERS - 1), in_a_branch=choices.chance(_BRANCH))
            if choices.chance(_BETWEEN):
                _written(choices, draft)
    outputs = [draft.any(choices) for _ in range(choices.number(1, 4))]
    layouts = [choices.pick(_LAYOUTS) for _ in range(draft.taken)]
    layers = [_RegionLayer(number, dtype) for number in range(_LAYERS)]
    return _DrawnProgram(draft, outputs, layers, layouts, choices.chance(_ONE_MEMORY), dtype, dynamic)


def _region(number: int, choices: Choices, draws: Sequence[_Draw], inner: Sequence[_DrawnRegion]) -> _DrawnRegion:
    draft = _Draft(choices.number(1, 3), True)
    for _ in range(choices.number(1, _STEPS)):
        if inner and choices.chance(_INNER):
            _call(choices, draft, choices.pick(inner), 0)
        else:
            choices.pick(draws)(choices, draft)
    results = draft.results(choices)
    is_alone, also_nothing = len(results) == 1 and choices.chance(50), choices.chance(_NOTHING)

    def function(layer: _RegionLayer, *given: torch.Tensor) -> Any:
        values = draft.run([layer], given)
        made = [values[place] for place in results]
        if also_nothing:
            return (None, *made)
        return made[0] if is_alone else tuple(made)

    # Torch takes functions with one code for one region, whatever their closures hold.
    function.__code__ = function.__code__.replace(co_name=f"region_{number}")
    return _DrawnRegion(draft, results, torch.compiler.nested_compile_region(function))


def _call(choices: Choices, draft: _Draft, region: _DrawnRegion, layer: int, *, in_a_branch: bool = False) -> None:
    """Call a region with some values. No two are one, which torch confuses, or share memory, which it refuses."""
    inside, places = region.draft, list[int]()
    for position in range(inside.taken):
        place = draft.any(choices)
        if draft.roots[place] in {draft.roots[other] for other in places} or position in inside.by_out:
            place = draft.new(partial(_copied, place))
        elif choices.chance(_TURNED):
            place = draft.new(partial(_transposed, place), of=place)
        places.append(place)
    writes = inside.written or "state" in inside.traits
    draft.traits |= inside.traits | ({"refused"} if writes and "data" in inside.traits else set())
    in_a_branch = in_a_branch and not writes and "data" not in inside.traits

    def called(layers: Sequence[_RegionLayer], values: _Values) -> list[torch.Tensor]:
        made = region.function(layers[layer], *(values[place] for place in places))
        return [one for one in made if one is not None] if isinstance(made, tuple) else [made]

    def branch(layers: Sequence[_RegionLayer], values: _Values) -> list[torch.Tensor]:
        def otherwise() -> list[torch.Tensor]:
            return [torch.zeros_like(one) for one in called(layers, values)]

        return list(torch.cond(values[places[0]].sum() > 0, lambda: called(layers, values), otherwise, ()))

    if in_a_branch:
        draft.traits.add("branch")
    draft.steps.append(branch if in_a_branch else called)
    for position in inside.written:
        draft.mark_written(places[position])
    draft.roots += range(len(draft.roots), len(draft.roots) + len(region.results))


def _copied(place: int, _: Sequence[_RegionLayer], values: _Values) -> torch.Tensor:
    return values[place].contiguous() * 1 + 0


def _transposed(place: int, _: Sequence[_RegionLayer], values: _Values) -> torch.Tensor:
    return values[place].t()


_Draw = Callable[[Choices, _Draft], None]


def _arithmetic(choices: Choices, draft: _Draft) -> None:
    one, other, step = draft.any(choices), draft.any(choices), choices.pick(_ARITHMETIC)
    draft.new(lambda _, values: step(values[one], values[other]))


def _weighted(choices: Choices, draft: _Draft) -> None:
    one = draft.any(choices)
    draft.new(lambda layers, values: (values[one] * layers[0].weight) % 11 + layers[0].state)


def _turned(choices: Choices, draft: _Draft) -> None:
    one = draft.any(choices)
    draft.new(partial(_transposed, one), of=one)


def _halves(choices: Choices, draft: _Draft) -> None:
    one, other = draft.any(choices), draft.any(choices)
    first = draft.new(lambda _, values: torch.cat([values[one], values[other]]).chunk(2))
    draft.roots.append(first)


def _constant(choices: Choices, draft: _Draft) -> None:
    one, numbers = draft.any(choices), [choices.number(-3, 3) for _ in range(_SIDES[0])]
    draft.new(lambda _, values: values[one] + torch.tensor(numbers, dtype=values[one].dtype, device="npu"))


def _condition(choices: Choices, draft: _Draft) -> None:
    one, other, number = draft.any(choices), draft.any(choices), choices.number(-3, 3)
    draft.traits.add("branch")

    def condition(_: Sequence[_RegionLayer], values: _Values) -> torch.Tensor:
        operands = (values[one] + 0, values[other] * 1)
        found: torch.Tensor = torch.cond(
            values[one].sum() > number, lambda x, y: x + y, lambda x, y: x - y * 2, operands
        )
        return found

    draft.new(condition)


def _selected(choices: Choices, draft: _Draft) -> None:
    one, other = draft.any(choices), draft.any(choices)
    draft.traits.add("data")
    draft.new(lambda _, values: (values[one][values[other] > 0].sum() % 11 + values[one]).to(values[one].dtype))


def _written(choices: Choices, draft: _Draft) -> None:
    target, value, write = draft.any(choices), draft.any(choices), choices.pick(_WRITES)

    def written(_: Sequence[_RegionLayer], values: _Values) -> None:
        write(values[target], values[value])

    draft.writing(written, target)


def _written_by_out(choices: Choices, draft: _Draft) -> None:
    value = draft.any(choices)
    target = choices.number(0, draft.taken - 1) if draft.is_region else draft.new(partial(_copied, value))
    draft.by_out.add(target)

    def written(_: Sequence[_RegionLayer], values: _Values) -> None:
        torch.add(values[value] * 1, 1, out=values[target])

    draft.writing(written, target)


def _written_state(choices: Choices, draft: _Draft) -> None:
    number = choices.number(1, 3)
    draft.traits.add("state")

    def written(layers: Sequence[_RegionLayer], _: _Values) -> None:
        layers[0].state.add_(number)

    draft.steps.append(written)


_ARITHMETIC: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.add,
    lambda x, y: x * 2 + y,
    lambda x, y: (x * y) % 11,
    lambda x, y: torch.where(x > y, x, y - 1),
    lambda x, _: torch.relu(x),
    lambda x, _: x * 1,
    lambda x, _: x.clone(),
    lambda x, y: torch.cat([x[:2], y[2:]]),
    lambda x, y: torch.cat(x.chunk(2)[::-1]) + y,
    lambda x, y: x.flip(0) - y.t(),
    lambda x, y: (x.sum(0) % 7).to(y.dtype) + y,
)
_WRITES: tuple[Callable[[torch.Tensor, torch.Tensor], object], ...] = (
    lambda x, _: x.add_(1),
    lambda x, y: x.copy_(y + 1),
    lambda x, _: x.t().mul_(-1),
    lambda x, _: x.zero_(),
    lambda x, y: x[1:3].copy_(y[:2] + 1),
    lambda x, y: x[:, 1:].add_(y[:, :1] + 0),
    lambda x, _: x.select(1, 2).neg_(),
    lambda x, _: x.diagonal().add_(3),
    lambda x, y: x.index_copy_(0, torch.tensor([0, 2], device="npu"), y[:2] * 1),
)
_LAYOUTS: tuple[_Layout, ...] = (lambda x: x, lambda x: x.t(), lambda x: torch.cat([x, x])[1 : 1 + len(x)])
_DRAWS: tuple[_Draw, ...] = (
    _arithmetic, _arithmetic, _arithmetic, _weighted, _turned, _halves, _constant, _condition, _selected, _written, _written,
    _written_by_out, _written_state,
)  # fmt: skip
