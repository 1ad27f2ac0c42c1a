"""Hypothesis strategies: random programs around a planted pattern, its near-misses, and integer programs without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from npugraph_ex.testing.builder import Builder
from npugraph_ex.testing.inputs import Dim, size_of
from npugraph_ex.testing.near_misses import NEAR_MISSES, Planted, applicable
from npugraph_ex.testing.patterns import SPELLINGS, Pattern, registered_patterns, respelled
from npugraph_ex.testing.program import Program, Ref, Step

CALLS = 4
DTYPES = (torch.float16, torch.bfloat16)
_MULTIPLES = (4, 2, 8, 1)
_ROWS = (2, 3, 5, 6, 7)
_EPSILONS = (1e-6, 1e-5, 0.001)


def _sizes(builder: Builder, *, dynamic: bool, zero: bool) -> tuple[dict[str, int], ...]:
    """The values of s0 and s1 in each call. In one call all differ, so that no two sizes are equal by accident."""
    if dynamic:
        orders = st.permutations(_ROWS)
        # Two calls share their sizes: the second of them replays what the first captured.
        first, second = builder.draw(orders), builder.draw(orders)
        rows = (first, second, first, first)
        return tuple({"s0": row[0], "s1": row[1]} for row in rows)
    s0 = 0 if zero else builder.pick((2, 3, 1, 5))
    return ({"s0": s0, "s1": 4},) * CALLS


def _shapes(builder: Builder, pattern: Pattern, *, leading: int) -> dict[str, tuple[Dim, ...]]:
    """A symbolic shape for each argument: one draw for each class of dimensions, ``leading`` dims for the leading one."""
    batch = ("s0", "s1")[:leading]
    drawn: dict[int, tuple[Dim, ...]] = {}
    for argument in pattern.arguments:
        for size in argument.dims:
            if size == pattern.leading:
                drawn[size] = batch
            elif size not in drawn:
                # What holds for a rule's example sizes (multiples of 128, say) holds for multiples of them.
                free = [size * times for times in _MULTIPLES if (size * times,) not in drawn.values()]
                drawn[size] = (builder.pick(free),)
    return {a.name: tuple(dim for size in a.dims for dim in drawn[size]) for a in pattern.arguments}


def _plant(
    builder: Builder, pattern: Pattern, near_miss: str | None, dtype: torch.dtype, calls: Sequence[dict[str, int]]
) -> Planted:
    """Make arguments for the pattern and append its steps."""
    shapes = _shapes(builder, pattern, leading=builder.pick((1, 1, 2)) if pattern.rows else 1)
    # Only what a rule's examples have in 16 bits is of the drawn dtype; float32 scales and integers stay what they are.
    dtypes = {a.name: dtype if a.dtype in DTYPES else a.dtype for a in pattern.arguments}
    names = {a.name: builder.produce(shapes[a.name], dtypes[a.name], 3) for a in pattern.arguments}
    if near_miss is not None or not pattern.rows or builder.chance(80):
        # A fused operator may lay its results out differently for other inputs, and then must not be used. A search
        # function of more than rows may contain a view, which other layouts do not have.
        names = {argument: builder.contiguous(name) for argument, name in names.items()}
    if near_miss is None and builder.chance(25):
        builder.mutate(builder.mutable())
    certain = all(builder.values[name].contiguous for name in names.values())
    scalars = {name: builder.pick(_EPSILONS) for name in pattern.scalars}
    concrete = [{name: [size_of(dim, sizes) for dim in shape] for name, shape in shapes.items()} for sizes in calls[:2]]
    traced = pattern.trace(concrete[0], dtypes, scalars)
    burnt_in = traced.steps != pattern.trace(concrete[1], dtypes, scalars).steps
    sizes = calls[0]
    spelling = builder.pick(SPELLINGS)
    prefix = f"p{len(builder.steps)}_"
    rename = {**names, **{name: prefix + name for name in traced.metas}}
    steps = [_renamed(respelled(step, spelling), rename) for step in traced.steps]
    symbols = {size_of(dim, sizes): dim for shape in shapes.values() for dim in shape}
    results = {
        rename[name]: (tuple(symbols.get(size, size) for size in shape), kind)
        for name, (shape, kind) in traced.metas.items()
    }
    return Planted(
        pattern=pattern,
        arguments=tuple(names.values()),
        steps=steps,
        outputs=[rename[name] for name in traced.outputs],
        vanishing=[rename[name] for name in traced.vanishing],
        results=results,
        certain=certain,
        burnt_in=burnt_in,
    )


def _renamed(step: Step, names: dict[str, str]) -> Step:
    def fresh(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names[value.name])
        return tuple(map(fresh, value)) if isinstance(value, tuple) else value

    kwargs = tuple((name, fresh(value)) for name, value in step.kwargs)
    return Step(step.operator, tuple(map(fresh, step.args)), kwargs, tuple(names[result] for result in step.results))


def _outputs(builder: Builder, always: Sequence[str]) -> tuple[str, ...]:
    """What the program returns: the given values, and some others."""
    others = [name for name in builder.values if name not in always and not name.startswith("x")]
    count = builder.draw(st.integers(0, min(3, len(others))))
    chosen = [str(builder.pick(others)) for _ in range(count)]
    if builder.chance(10):
        chosen.append(str(builder.pick(builder.values)))
    return tuple(dict.fromkeys((*always, *chosen)))


@st.composite
def programs(
    draw: Any,
    *,
    pattern: Pattern | str,
    near_miss: str | bool | None = False,
    dtype: torch.dtype | None = None,
    dynamic: bool | None = None,
    functional: bool | None = None,
) -> Program:
    """Random programs around a planted pattern.

    Args:
        draw: given by hypothesis.
        pattern: what to plant: a registered pattern, or the name of a rule, of which a variant is drawn.
        near_miss: False for programs that must be fused, True for any near-miss, or the name of one.
        dtype: of the pattern's floating-point arguments; drawn when None.
        dynamic: whether to compile for symbolic shapes; drawn when None.
        functional: whether in-place steps are functionalised before the passes; drawn when None.

    Raises:
        ValueError: there is no such rule or near-miss.
    """
    if isinstance(near_miss, str) and near_miss not in NEAR_MISSES:
        raise ValueError(f"near_miss must be one of {', '.join(NEAR_MISSES)}; it is {near_miss!r}.")
    builder = Builder(draw)
    variants = registered_patterns(pattern) if isinstance(pattern, str) else (pattern,)
    chosen = builder.pick(variants)
    kind: str | None = near_miss if isinstance(near_miss, str) else None
    if near_miss is True:
        kind = str(builder.pick(applicable(chosen)))
    wide = kind == "dtype"
    drawn_dtype = torch.float32 if wide else dtype or builder.pick(DTYPES)
    is_dynamic = kind != "empty" and (builder.chance(35) if dynamic is None else dynamic)
    is_functional = builder.chance(70) if functional is None else functional
    if kind in ("mutation", "argument mutation"):
        is_functional = False
    sizes = _sizes(builder, dynamic=is_dynamic, zero=kind == "empty")
    planted = _plant(builder, chosen, kind, drawn_dtype, sizes)
    if planted.burnt_in:
        is_dynamic, sizes = False, (sizes[0],) * CALLS
    runs = True
    if kind is not None:
        runs = NEAR_MISSES[kind](builder, planted)
    builder.steps.extend(planted.steps)
    for name in planted.outputs:
        builder.values[name] = planted.value(name)
    for _ in range(draw(st.integers(0, 4)) if runs else 0):
        builder.consume()
    if runs and builder.chance(20):
        builder.mutate(builder.mutable())
    integers = [name for name in planted.outputs if not planted.results[name][1].is_floating_point]
    integers = integers or planted.outputs[:1]
    rest = [name for name in planted.outputs if name not in integers and builder.chance(75)]
    return Program(
        inputs=tuple(builder.inputs),
        steps=tuple(builder.steps),
        outputs=_outputs(builder, [*integers, *rest, *planted.also_returned]),
        sizes=sizes,
        dynamic=is_dynamic,
        functional=is_functional,
        pattern=chosen.name,
        dtype=str(drawn_dtype).removeprefix("torch."),
        near_miss=kind,
        expected=0 if kind is not None else 1 if planted.certain else None,
        runs=runs,
    )


@st.composite
def integer_programs(draw: Any, *, dynamic: bool | None = None) -> Program:
    """Random int32 programs of xor, add, views and in-place writes: any misorder in replay is an exact difference."""
    builder = Builder(draw)
    is_dynamic = builder.chance(30) if dynamic is None else dynamic
    shape: tuple[Dim, ...] = builder.pick((("s0", 8), ("s0",), ("s0", "s1", 4)))
    for _ in range(draw(st.integers(1, 4))):
        builder.new_input(shape, torch.int32)
    for _ in range(draw(st.integers(1, 8))):
        if builder.chance(40):
            builder.mutate(builder.mutable())
        else:
            builder.consume()
    made = [name for name in builder.values if name.startswith("v")]
    if not made:
        made = [builder.emit("aten.add.Tensor", "x0", 1, shape=shape, dtype=torch.int32)]
    return Program(
        inputs=tuple(builder.inputs),
        steps=tuple(builder.steps),
        outputs=_outputs(builder, made[-1:]),
        sizes=_sizes(builder, dynamic=is_dynamic, zero=not is_dynamic and builder.chance(8)),
        dynamic=is_dynamic,
        functional=builder.chance(60),
        dtype="int32",
        expected=0,
    )
