"""Faults of capture, replay and the update of host arguments."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from npugraph_ex.testing.faults._patches import answering, doing_nothing
from npugraph_ex.testing.mutation import Mutant

_CAPTURED = "npugraph_ex.aclgraph.captured:CapturedGraph"
_FOOTPRINT = "npugraph_ex.aclgraph.footprint"
_INPUTS = "npugraph_ex.aclgraph.inputs"
_LAUNCHER = "npugraph_ex.aclgraph._npu_private:launcher"
_OUTPUTS = "npugraph_ex.aclgraph.outputs"
_UPDATES = "npugraph_ex.aclgraph.updates"


def _skipping_first(original: Any) -> Any:
    def replay(self: Any, inputs: Any) -> None:
        buffers, self._buffers = self._buffers, self._buffers[1:]
        try:
            original(self, inputs)
        finally:
            self._buffers = buffers

    return replay


def _once(original: Any) -> Any:
    """The graph runs for the first call; later ones get what is there."""

    def replay(self: Any, inputs: Any) -> None:
        if not getattr(self, "_ran", False):
            self._ran = True
            original(self, inputs)

    return replay


def _inputs_last(original: Any) -> Any:
    """The graph runs before its inputs are copied in."""

    def replay(self: Any, inputs: Any) -> None:
        if getattr(self, "_ran", False):
            self._launch()
            self._launch, launch = _idle, self._launch
            original(self, inputs)
            self._launch = launch
        else:
            original(self, inputs)
        self._ran = True

    return replay


def _idle() -> None:
    """The launch of a graph that does not run."""


def _keeping_more(original: Any) -> Any:
    """Every replay takes memory and does not give it back."""
    kept: list[torch.Tensor] = []

    def replay(self: Any, inputs: Any) -> None:
        kept.append(torch.empty(64, device="npu"))
        original(self, inputs)

    return replay


def _adopting(original: Any) -> Any:
    def init(self: Any, tensor: torch.Tensor, *, adopt: bool) -> None:
        del adopt
        original(self, tensor, adopt=True)

    return init


def _first_half(original: Any) -> Any:
    def load(self: Any, tensor: torch.Tensor) -> None:
        if tensor.dim() and tensor.shape[0] > 1 and self._extent is None:
            half = tensor.shape[0] // 2
            self.tensor[:half].copy_(tensor[:half])
        else:
            original(self, tensor)

    return load


def _at_the_start(original: Any) -> Any:
    """An output of an input's memory begins where the input begins."""

    def of(value: Any, argument: Any, position: int) -> Any:
        return dataclasses.replace(original(value, argument, position), offset=0)

    return of


def _shape_of_the_input(original: Any) -> Any:
    """An output that lies in an input's memory is the input."""
    del original
    return lambda self, inputs: inputs[self.position]


def _each_alone(original: Any) -> Any:
    """Copies of results do not share memory as the results do."""

    def copy(self: Any, inputs: Any) -> Any:
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in original(self, inputs)]

    return copy


def _without_copies(original: Any) -> Any:
    del original
    return lambda self, inputs: self.lend(inputs)


def _first_key(original: Callable[..., Any]) -> Callable[..., Any]:
    """The sizes of the first call are those of every call."""
    seen: dict[int, Any] = {}

    def numbers(self: Any, inputs: Any) -> Any:
        return seen.setdefault(id(self), original(self, inputs))

    return numbers


def _reversed(original: Any) -> Any:
    def lend(self: Any, inputs: Any) -> Any:
        return original(self, inputs)[::-1]

    return lend


def _drawing_as_at_capture(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every replay finds the generator where the capture left it."""

    def launcher(graph: Any) -> Callable[[], None]:
        launch, at_capture = original(graph), torch.npu.get_rng_state()

        def replay() -> None:
            now = torch.npu.get_rng_state()
            torch.npu.set_rng_state(at_capture)
            launch()
            torch.npu.set_rng_state(now)

        return replay

    return launcher


class _FromTheStart(list[Any]):
    """What all graphs append to; each reads as many as it has, and finds those of the first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), self._count)


def _one_list(original: Callable[..., Any]) -> Callable[..., Any]:
    """All captured graphs of an FX graph, which have one plan, share their list of task groups."""
    lists: dict[int, tuple[Any, _FromTheStart]] = {}  # the plan as well, so that its number is not given to another

    def init(self: Any, plan: Any) -> None:
        original(self, plan)
        _, self._tasks = lists.setdefault(id(plan), (plan, _FromTheStart(len(plan.calls))))

    return init


MUTANTS = (
    Mutant(
        "replay-skips-an-input", "every input is copied in before every replay",
        f"{_CAPTURED}.replay", _skipping_first, "device",
    ),
    Mutant(
        "replay-runs-once", "every call runs the graph",
        f"{_CAPTURED}.replay", _once, "device",
    ),
    Mutant(
        "replay-copies-inputs-late", "inputs are copied in before the graph runs",
        f"{_CAPTURED}.replay", _inputs_last, "device",
    ),
    Mutant(
        "replay-copies-half-an-input", "the whole of an input is copied in",
        f"{_INPUTS}:Buffer.load", _first_half, "device",
    ),
    Mutant(
        "replay-takes-memory", "a replay allocates nothing",
        f"{_CAPTURED}.replay", _keeping_more, "device",
    ),
    Mutant(
        "replay-overwrites-results", "a result never changes because of a later call",
        f"{_OUTPUTS}:Outputs.held", answering(answer=False), "device",
    ),
    Mutant(
        "replay-overwrites-other-graphs", "no replay overwrites what a graph of another function handed out",
        f"{_FOOTPRINT}:Footprint.is_overwritten", answering(answer=False), "shared pool",
    ),
    Mutant(
        "captures-know-no-others", "a new capture has its results where no graph of its pool writes",
        f"{_FOOTPRINT}:_written_in", answering([]), "shared pool",
    ),
    Mutant(
        "replay-lends-copies", "the instance that copies results hands out copies",
        f"{_OUTPUTS}:Outputs.copy", _without_copies, "device",
    ),
    Mutant(
        "replay-parts-aliases", "copies of results share memory as the results do",
        f"{_OUTPUTS}:Outputs.copy", _each_alone, "device",
    ),
    Mutant(
        "replay-reverses-results", "results are handed out in the graph's order",
        f"{_OUTPUTS}:Outputs.lend", _reversed, "device",
    ),
    Mutant(
        "replay-ignores-addresses", "an input that is used in place and has moved is captured anew",
        f"{_INPUTS}:InputPlan.addresses", answering(()), "device",
    ),
    Mutant(
        "replay-ignores-sizes", "another size is another graph",
        f"{_INPUTS}:InputPlan.numbers", _first_key, "device dynamic",
    ),
    Mutant(
        "capture-adopts-inputs", "a caller's tensor does not become the graph's buffer",
        f"{_INPUTS}:Buffer.__init__", _adopting, "device",
    ),
    Mutant(
        "capture-copies-written-inputs", "an input that the graph writes is used where it is",
        f"{_INPUTS}:mutated_inputs", answering(frozenset()), "device",
    ),
    Mutant(
        "outputs-forget-offsets", "an output in an input's memory lies where the graph put it",
        f"{_OUTPUTS}:_OfInput.of", _at_the_start, "device",
    ),
    Mutant(
        "outputs-are-inputs", "an output in an input's memory has its own shape and strides",
        f"{_OUTPUTS}:_OfInput.hand_out", _shape_of_the_input, "device",
    ),
    Mutant(
        "replay-draws-the-same-numbers", "random numbers are other ones at every call",
        _LAUNCHER, _drawing_as_at_capture, "random numbers",
    ),
    Mutant(
        "update-never-happens", "a replay sees its own host arguments",
        f"{_UPDATES}:Updates.apply", doing_nothing, "updates",
    ),
    Mutant(
        "update-sees-no-difference", "another host argument is an update",
        f"{_UPDATES}:_Task.differs", answering(answer=False), "updates",
    ),
    Mutant(
        "update-is-not-launched", "an update reaches the captured kernel",
        f"{_UPDATES}:_Task.update", doing_nothing, "updates",
    ),
    Mutant(
        "update-lists-are-shared", "an update is of the graph that is replayed next, and of no other",
        f"{_UPDATES}:Updates.__init__", _one_list, "updates",
    ),
)  # fmt: skip
