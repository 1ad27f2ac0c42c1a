"""Faults of capture, replay, the update of host arguments, and the key of saved compilations."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from sys import getrefcount
from typing import Any

import torch

from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering, doing_nothing

_KEY = "npugraph_ex.cache.key"
_SAVED_INPUTS = "npugraph_ex.saving.inputs"
_CAPTURER = "npugraph_ex.aclgraph.capturer"
_INPUTS = "npugraph_ex.aclgraph.inputs"
_LAUNCHER = "npugraph_ex.aclgraph._npu_private:launcher"
_OUTPUTS = "npugraph_ex.aclgraph.outputs"
_UPDATES = "npugraph_ex.aclgraph.updates"


def _adopting(original: Any) -> Any:
    def init(self: Any, tensor: torch.Tensor, memory: object) -> None:
        del memory
        original(self, tensor, None)

    return init


def _at_the_start(original: Any) -> Any:
    """A result in the memory of another tensor begins where that tensor begins."""

    def of(value: Any, whole: Any) -> Any:
        return dataclasses.replace(original(value, whole), offset=0)

    return of


def _as_if_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """The results of each key lie in the pool of all captures."""

    def banks(capturer: Any, captures: object, plan: Any) -> Any:
        shared = original(capturer, captures, plan)
        return type(shared[0])(None), shared[-1]

    return banks


def _counting_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Who holds a result's storage alone, and no tensor, holds nothing."""

    def has_live_results(outputs: Any) -> bool:
        references = outputs._references
        outputs._references = list(map(getrefcount, outputs._storages))
        try:
            return bool(original(outputs))
        finally:
            outputs._references = references

    return has_live_results


def _first_key(original: Callable[..., Any]) -> Callable[..., Any]:
    """The sizes of the first call are those of every call."""
    seen: dict[int, Any] = {}

    def numbers(self: Any, inputs: Any) -> Any:
        return seen.setdefault(id(self), original(self, inputs))

    return numbers


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


def _believing_the_list(original: Any) -> Any:
    del original
    return lambda folder: (
        [folder / name for name in json.loads((folder / "manifest.json").read_text())] if folder.exists() else []
    )


MUTANTS = (
    Mutant(
        "replay-overwrites-results", "a result never changes because of a later call",
        f"{_OUTPUTS}:Outputs.has_live_results", answering(answer=False), "device",
    ),
    Mutant(
        "replay-overwrites-other-graphs", "no replay overwrites a result of another function's graph",
        f"{_CAPTURER}:Capturer.banks", _as_if_alone, "shared pool",
    ),
    Mutant(
        "replay-ignores-addresses", "an input that is read in place and has moved needs a new capture",
        f"{_INPUTS}:InputPlan.addresses", answering(()), "device",
    ),
    Mutant(
        "freed-memory-goes-unsaid", "the emulated device reports a replay over freed memory",
        "npu_emulator.memory.watch:MemoryWatch._check_blocks", doing_nothing, "device programs",
    ),
    Mutant(
        "chips-have-one-size", "an emulated device has the memory, streams and cores of its chip",
        "npu_emulator.settings:_of_the_chip", answering({}), "device settings",
    ),
    Mutant(
        "late-errors-go-unsaid", "a kernel that fails late fails the phase of the test that launched it",
        "npu_emulator.pytest_plugin:_finish", doing_nothing, "pytest projects",
    ),
    Mutant(
        "replay-reads-what-it-writes", "an input that stays is copied if the graph writes its storage",
        "npugraph_ex.aclgraph.stable_inputs:StableInputs._shares_memory", answering(answer=False), "callers",
    ),
    Mutant(
        "calls-on-other-streams-go-first", "a call waits for the one before it, also where that ran on another stream",
        "npugraph_ex.aclgraph.compiled_graph:CompiledGraph._wait_for_last_call", doing_nothing, "callers",
    ),
    Mutant(
        "freed-results-are-forgotten", "a result whose memory the caller freed is never handed out again",
        f"{_OUTPUTS}:Outputs.have_moved", answering(answer=False), "callers",
    ),
    Mutant(
        "replay-overwrites-storages", "a result that is kept as its storage alone never changes",
        f"{_OUTPUTS}:Outputs.has_live_results", _counting_tensors, "callers",
    ),
    Mutant(
        "replay-ignores-sizes", "each size has a capture of its own",
        f"{_INPUTS}:InputPlan.numbers", _first_key, "device dynamic",
    ),
    Mutant(
        "capture-adopts-inputs", "a caller's tensor does not become the graph's buffer",
        f"{_INPUTS}:Buffer.__init__", _adopting, "device",
    ),
    Mutant(
        "outputs-forget-offsets", "an output in an input's memory keeps its offset",
        f"{_OUTPUTS}:_ResultView.from_tensors", _at_the_start, "device",
    ),
    Mutant(
        "replay-draws-the-same-numbers", "each call draws new random numbers",
        _LAUNCHER, _drawing_as_at_capture, "random numbers",
    ),
    Mutant(
        "changed-packages-are-installed", "a kept package of kernels that was changed is not executed",
        "npugraph_ex.aclgraph.static_kernels.packages:_sound", _believing_the_list, "static kernels",
    ),
    Mutant(
        "update-never-happens", "a replay sees its own host arguments",
        f"{_UPDATES}:Updates.apply", doing_nothing, "updates",
    ),
    Mutant(
        "update-lists-are-shared", "an update changes only the graph that is replayed next",
        f"{_UPDATES}:Updates.__init__", _one_list, "updates",
    ),
    Mutant(
        "cache-key-ignores-options", "a compilation with other options is not used",
        f"{_KEY}:_options", answering(""), "cache",
    ),
    Mutant(
        "cache-key-ignores-rules", "a compilation with other rules is not used",
        f"{_KEY}:_rule", answering(()), "cache",
    ),
    Mutant(
        "loaded-graph-takes-any-input", "a loaded graph refuses inputs that it was not compiled for",
        f"{_SAVED_INPUTS}:InputCheck.__call__", doing_nothing, "saved graphs",
    ),
)  # fmt: skip
