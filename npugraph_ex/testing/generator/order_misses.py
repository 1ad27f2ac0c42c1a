"""Near-misses in the order and the streams of a planted pattern's operators, and changes of both that must still fuse.

A fused operator runs on one stream, after all that it reads and before all that reads its results.
"""

from __future__ import annotations

from collections.abc import Sequence

from npugraph_ex.fusion.rules import operands_of
from npugraph_ex.testing.generator.builder import Builder
from npugraph_ex.testing.generator.planted import Planted, replaced
from npugraph_ex.testing.generator.program import Ref, Step

SIDE = "side"
"""The name of the second stream."""
_ENTER = Step("npugraph_ex.scope_enter.default", (("_user_stream_label",), (SIDE,)))
_EXIT = Step("npugraph_ex.scope_exit.default")


def _recorded(name: str) -> Step:
    return Step("npugraph_ex.record.default", (), (), (name,))


def _waited(name: str) -> Step:
    return Step("npugraph_ex.wait.default", ((Ref(name),),))


def _aside(builder: Builder, steps: Sequence[Step]) -> list[Step]:
    """The steps on the second stream, ordered with the steps around them."""
    # The first work of a stream follows what stands before it, with an event or without.
    begun = ([_recorded("begun")], [_waited("begun")]) if builder.chance(50) else ([], [])
    return [*begun[0], _ENTER, *begun[1], *steps, _recorded("done"), _EXIT, _waited("done")]


def on_a_stream(builder: Builder, planted: Planted) -> None:
    """The whole pattern runs on a stream of its own; it must still fuse."""
    planted.steps[:] = _aside(builder, planted.steps)


def stream_boundary(builder: Builder, planted: Planted) -> bool:
    """The last operators of the pattern run on another stream than the first ones."""
    last = len(planted.steps) - 1
    started = planted.first_kernel() + 1
    at = last if operands_of(planted.pattern.name).contains_another else int(builder.pick(range(last, started - 1, -1)))
    planted.steps[at:] = _aside(builder, planted.steps[at:])
    return True


def _replace_late(builder: Builder, planted: Planted, step: Step, name: str) -> None:
    """``step``, inserted before the last, makes what that one reads in place of ``name``."""
    del builder
    planted.steps[-1:] = [step, replaced(planted.steps[-1], name, step.results[0])]


def cyclic_input(builder: Builder, planted: Planted) -> bool:
    """The last operator reads a value that depends on an earlier result: a fused operator would need its own result."""
    source, name = builder.pick(planted.ready()), builder.pick(planted.late())
    planted.steps[-1:] = [
        Step("aten.amax.default", (Ref(source),), (), ("largest",)),
        Step("aten.ge.Scalar", (Ref("largest"), 0.0), (), ("sign",)),
        Step("aten._to_copy.default", (Ref("sign"),), (("dtype", builder.values[name].dtype),), ("one",)),
        planted.steps[-1],
    ]
    _replace_late(builder, planted, Step("aten.add.Tensor", (Ref(name), Ref("one")), (), ("cyclic",)), name)
    return True


def late_input(builder: Builder, planted: Planted) -> bool:
    """An argument is computed after a result was written to memory: the write cannot wait for a fused operator."""
    source = builder.pick(planted.ready())
    target = builder.new_input(*planted.results[source], plain=True)
    planted.steps.insert(len(planted.steps) - 1, Step("aten.copy_.default", (Ref(target), Ref(source))))
    _made_late(builder, planted)
    return True


def arrives_late(builder: Builder, planted: Planted) -> None:
    """An argument is computed after a result was used; it must still fuse, because the use can wait."""
    used = Step("aten.neg.default", (Ref(builder.pick(planted.ready())),), (), ("used",))
    planted.steps.insert(len(planted.steps) - 1, used)
    planted.also_returned.append("used")
    _made_late(builder, planted)


def _made_late(builder: Builder, planted: Planted) -> None:
    name = builder.pick(planted.late())
    _replace_late(builder, planted, Step("aten.maximum.default", (Ref(name), Ref(name)), (), ("late",)), name)
