"""How one call of a session went through Dynamo, AOT and a captured graph, so that the next such call needs only the last.

`CallNotes` records a call that torch.compile serves. If Dynamo's and AOT's code around the graph did nothing but fetch inputs and
arrange results, `record` returns a `RecordedCall`: which argument goes to which input, and which result goes where.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex._plurals import counted
from npugraph_ex.aclgraph.compiled_graph import CompiledGraph, PinnedCall
from npugraph_ex.aclgraph.first_run import Contents
from npugraph_ex.frontend.entry.compiler import CompiledFxGraph
from npugraph_ex.frontend.entry.joined_inputs import Followed, JoinedInputs, JoinedRun
from npugraph_ex.frontend.native_streams.nodes import names_streams
from npugraph_ex.inference.call_forms import Form
from npugraph_ex.report.recompilations import in_words

STATE, ARGUMENTS = "function", ("args", "kwargs")
"""The local variables of the function that a session compiles: what it closes over, and a call's arguments."""

Build = Callable[[Sequence[Any], Sequence[Any]], Any]
"""Makes what a call returns from the graph's results and the call's leaves."""


def _as_the_users(text: str) -> str:
    """Dynamo's names of what a session's function holds as the user has them: ``lin.weight``."""
    text = re.sub(rf"(?:L\['{STATE}'\]|\b{STATE})\.(?=\w)", "", text)
    return text.replace(f"L['{STATE}']", "the function")


class Probed(Exception):  # noqa: N818 - a way out of Dynamo's code, never an error
    """Raised instead of a run, with what Dynamo would have run."""


class NotRecordableError(Exception):
    """A call of this form cannot go around Dynamo; says why."""


@dataclass
class CallNotes(threading.local):
    """What this thread's last call through torch.compile did.

    Attributes:
        outer: the graph that Dynamo called, and its inputs.
        inner: the captured graphs that AOT called, likewise.
        fake_modes: those of the compilations that it made.
        probing: stop before the graph runs.
        restoring: undo what the graph writes, after it has run.
    """

    outer: tuple[Gate, tuple[Any, ...]] | None = None
    inner: list[InnerCall] = field(default_factory=list)
    fake_modes: list[FakeTensorMode] = field(default_factory=list)
    probing: bool = False
    restoring: bool = False


@dataclass(frozen=True)
class InnerCall:
    """A call of a captured graph: the inputs that AOT passed, the joined weights behind them, and the results."""

    graph: CompiledGraph
    inputs: list[Any]
    joined: list[torch.Tensor]
    results: list[Any]
    followed: Followed | None


class NotedGraph:
    """A captured graph that notes its calls; AOT calls it in the graph's place."""

    def __init__(self, graph: CompiledGraph, notes: CallNotes, joined: JoinedInputs | None) -> None:
        self._graph = graph
        self._notes = notes
        self._joined = joined

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph."""
        notes, plan = self._notes, self._graph.plan
        before = Contents(sorted(plan.written), inputs) if notes.restoring else None
        joined, followed = [], None
        if self._joined is not None:
            followed = Followed(self._joined, inputs)
            joined = followed.weights
        results = self._graph.run([*inputs, *joined])
        if before is not None:
            before.put_back()
        notes.inner.append(InnerCall(self._graph, list(inputs), joined, list(results), followed))
        return results


class Gate:
    """One graph of Dynamo's, between Dynamo's code and AOT's.

    Args:
        gm: the graph.
        notes: of the session.
        names: the user's names of its inputs.

    Attributes:
        names: the same.
        of_state: for each input, whether it comes from the function and not from the arguments.
        names_streams: whether the program uses native streams or events.
        changes: what the code around the graph changes, so that no call of it can be recorded; empty if nothing.
    """

    def __init__(self, gm: fx.GraphModule, notes: CallNotes, names: Sequence[str]) -> None:
        roots = _torch_private.dynamo_input_roots(gm)
        self.names = [*map(_as_the_users, names)]
        self._number, self._reason = _torch_private.compilation(), _torch_private.recompile_reason()
        self.of_state = [root in {STATE, ""} for root in roots]
        self.strange = [
            f"{name} ({root})" for name, root in zip(names, roots, strict=True) if root not in {STATE, "", *ARGUMENTS}
        ]
        self.names_streams = names_streams(gm.graph)
        self.changes = ""
        self._notes = notes
        self._run: Callable[..., Sequence[Any]] | None = None
        self._graphs: list[CompiledFxGraph] = []

    def watch(self, made: CompiledFxGraph) -> None:
        """Take a compiled graph of this Dynamo graph; called before AOT takes it."""
        # A graph that depends on the current device is wrapped; a session's calls have the device of the compilation.
        graph = getattr(made.runner, "__wrapped__", made.runner)
        graph, joined = (graph.graph, graph.joined) if isinstance(graph, JoinedRun) else (graph, None)
        if isinstance(graph, CompiledGraph):
            made.runner = NotedGraph(graph, self._notes, joined)
        self._graphs.append(made)

    def differs_from(self, earlier: Gate) -> str:
        """What had changed since an earlier one was compiled, so that Dynamo compiled this one; in words."""
        # Dynamo gives the reason against one of its compilations; another one's says nothing of this one.
        if not self._reason.startswith(f"{earlier._number}: "):
            return "something that torch.compile checks, and it does not say what"
        return _as_the_users(in_words(self._reason))

    def become(self, run: Callable[..., Sequence[Any]]) -> None:
        """Run this from now on: what the backend made of the graph."""
        self._run = run

    @property
    def is_whole(self) -> bool:
        """Whether one captured graph is all that runs."""
        return len(self._graphs) == 1 and self._graphs[0].is_whole

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph, or only say what would run."""
        if self._notes.probing:
            self._notes.outer = (self, inputs)
            raise Probed
        assert self._run is not None  # noqa: S101 - Dynamo calls it after the backend has returned
        outputs = self._run(*inputs)
        self._notes.outer = (self, inputs)
        return outputs


class RecordedCall:
    """A call that goes straight to a captured graph.

    Args:
        pinned: the captures.
        gate: the Dynamo graph of the call.
        state: the inputs of that graph that come from the function.
        inputs: the inputs of the captured graph; None where an argument goes.
        moving: positions of inputs, and of the leaves that go there.
        build: makes what the call returns.
        leaves: of the recorded call.
        followed: the parameters of joined weights; None if there are none.

    Attributes:
        form: of the recorded call.
        is_flat: whether its leaves are its positional arguments.
        compiled: the function of torch.compile that served it.
    """

    compiled: Callable[..., Any]

    def __init__(  # noqa: PLR0913 - the parts of one call
        self,
        pinned: PinnedCall,
        gate: Gate,
        state: Mapping[int, Any],
        *,
        inputs: list[Any],
        moving: Sequence[tuple[int, int]],
        build: Build,
        leaves: Sequence[Any],
        followed: Followed | None = None,
    ) -> None:
        plan = pinned.graph.plan
        self.form: Form = ()
        self.is_flat = False
        plain = bool(leaves) and all(type(leaf) is torch.Tensor for leaf in leaves)
        self._likeness = _torch_private.likeness(leaves) if plain else None
        self._count = len(leaves)
        self._graph, self._pinned = pinned.graph, pinned
        self._gate = gate
        self._state = {position: (value, _address(value)) for position, value in state.items()}
        # A weight that gets other memory (`weight.data = ...`) must not free what the captures read and write.
        self._memory = [value.untyped_storage() for value in state.values() if isinstance(value, torch.Tensor)]
        self._inputs = inputs
        self._moving = moving
        self._build = build
        self._followed = followed
        in_place = set(plan.in_place)
        self._fixed = [
            (leaf, leaves[leaf].data_ptr(), leaves[leaf].storage_offset())
            for position, leaf in moving
            if position in in_place
        ]
        written = [inputs[position] for position in plan.written if inputs[position] is not None]
        places = dict(moving)
        self._written_state = written
        self._written_leaves = [places[position] for position in plan.written if position in places]
        storages = [*written, *[leaves[leaf] for leaf in self._written_leaves]]
        self._written_storages = {tensor.untyped_storage().data_ptr() for tensor in storages}
        self._free = [leaf for position, leaf in moving if position not in in_place] if storages else []
        self._versions = [tensor for tensor in written if not tensor.is_inference()]

    def has_form(self, args: tuple[Any, ...]) -> bool:
        """Whether positional arguments have the recorded form; False where it takes more to tell."""
        if self._likeness is None or not self.is_flat:
            return False
        return len(args) == self._count and self._likeness(*args)

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether a call of the recorded form has its addresses too, and no argument in memory that it writes."""
        for leaf, address, offset in self._fixed:
            if leaves[leaf].data_ptr() != address or leaves[leaf].storage_offset() != offset:
                return False
        if not self._free:
            return True
        written = self._written_storages
        return all(leaves[leaf].untyped_storage().data_ptr() not in written for leaf in self._free)

    def run(self, leaves: Sequence[Any]) -> tuple[bool, Any]:
        """Run it, if the captures are still there and joined weights are up to date: whether so, and what the call returns."""
        if self._followed is not None and not self._followed.are_unwritten():
            return False, None
        inputs = self._inputs
        for position, leaf in self._moving:
            inputs[position] = leaves[leaf]
        try:
            results = self._graph.run_pinned(self._pinned, inputs)
        finally:
            for position, _ in self._moving:
                inputs[position] = None  # a caller's tensor must not outlive the call
        if results is None:
            return False, None
        if self._versions or self._written_leaves:
            changed = [leaves[leaf] for leaf in self._written_leaves if not leaves[leaf].is_inference()]
            torch.autograd.graph.increment_version([*self._versions, *changed])
        return True, self._build(results, leaves)

    def changes(self, gate: Gate, inputs: Sequence[Any]) -> list[str]:
        """What torch.compile would run otherwise now, in words; empty if nothing."""
        if gate is not self._gate:
            return [gate.differs_from(self._gate)]
        changed = [
            gate.names[position]
            for position, (value, address) in self._state.items()
            if inputs[position] is not value or _address(inputs[position]) != address
        ]
        if self._followed is not None and self._followed.changed_unseen():
            changed.append("weights that join_projections joined, without a new version")
        return changed


def _address(value: Any) -> int | None:
    return value.data_ptr() if isinstance(value, torch.Tensor) else None


def record(notes: CallNotes, leaves: Sequence[Any], result: Any) -> RecordedCall:
    """The call that ``notes`` are of.

    Raises:
        NotRecordableError: more happened than one captured graph.
    """
    gate, call = _only_graph(notes)
    inner = call.inputs
    pinned = call.graph.pin([*inner, *call.joined])
    if pinned is None:
        raise NotRecordableError("the call was not served by captures")
    home = {id(leaf): number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    if len(home) != sum(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise NotRecordableError("one tensor is passed twice")
    inputs, moving, state = [*inner, *call.joined], [], {}
    for position, value in enumerate(inner):
        if gate.of_state[position]:
            if id(value) in home:
                raise NotRecordableError(f"{gate.names[position]} is an argument, too")
            state[position] = value
        elif isinstance(value, torch.Tensor):
            if id(value) not in home:
                raise NotRecordableError(f"{gate.names[position]} is no argument but computed from one")
            moving.append((position, home[id(value)]))
            inputs[position] = None
    build = _arrangement(result, call.results, home, state)
    return RecordedCall(
        pinned, gate, state, inputs=inputs, moving=moving, build=build, leaves=leaves, followed=call.followed
    )


def _only_graph(notes: CallNotes) -> tuple[Gate, InnerCall]:
    """The Dynamo graph of a call, and the call of the captured graph."""
    if notes.outer is None:
        raise NotRecordableError("nothing of it runs on the device")
    gate, outer = notes.outer
    if gate.changes:
        raise NotRecordableError(gate.changes)
    if gate.strange:
        raise NotRecordableError(f"torch computes {', '.join(gate.strange)} anew at each call")
    if len(notes.inner) != 1 or not gate.is_whole:
        raise NotRecordableError(_why_not_one_graph(notes, gate))
    (call,) = notes.inner
    inner = call.inputs
    if len(inner) != len(outer) or any(one is not other for one, other in zip(inner, outer, strict=True)):
        raise NotRecordableError("AOT passes other inputs to the graph than the function has")
    return gate, call


def _why_not_one_graph(notes: CallNotes, gate: Gate) -> str:
    if gate.names_streams:
        return (
            "it uses native streams or events, and a session replays one captured graph with no calls of the host around it. "
            "Scopes of npugraph_ex.scope.npu_stream_switch put work on streams inside the graph"
        )
    if len(notes.inner) != 1:
        found = counted(len(notes.inner), "captured graph") if notes.inner else "no captured graph"
        return f"{found} ran, and a session replays one; `npugraph-ex explain` shows what is not captured"
    return "AOT changes inputs or results of it beside the captured graph"


def _hint_at(value: object) -> str:
    """What to do about a result that a session cannot hand out."""
    if is_dataclass(value):
        return "; return its fields"
    of_transformers = type(value).__module__.startswith("transformers.")
    return ", which `model.config.use_cache = False` leaves out" if of_transformers else ""


def _arrangement(result: Any, results: Sequence[Any], home: Mapping[int, int], state: Mapping[int, Any]) -> Build:
    """How the function's result is made from the graph's results."""
    places = {id(value): number for number, value in enumerate(results) if isinstance(value, torch.Tensor)}
    held = {id(value) for value in state.values()}
    values, spec = pytree.tree_flatten(result)
    picks: list[tuple[int | None, int | None, Any]] = []  # of the results, or of the leaves, or a constant
    for value in values:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, (int, float, str, type(None), torch.dtype, torch.device)):
                raise NotRecordableError(f"a result is a {type(value).__qualname__}{_hint_at(value)}")
            picks.append((None, None, value))
        elif value.requires_grad and torch.is_grad_enabled():
            raise NotRecordableError(
                "a result carries a gradient; make the session, and call it, under torch.no_grad() or torch.inference_mode()"
            )
        elif id(value) in home:
            picks.append((None, home[id(value)], None))
        elif id(value) in places:
            picks.append((places[id(value)], None, None))
        elif id(value) in held:
            picks.append((None, None, value))
        else:
            raise NotRecordableError("a result is a view of an argument, of a weight or of another result")
    return _fast(spec, picks, len(results))


def _fast(spec: pytree.TreeSpec, picks: Sequence[tuple[int | None, int | None, Any]], count: int) -> Build:
    """The shortest function for an arrangement: most models return one tensor, or the graph's results in their order."""
    in_order = [pick[0] for pick in picks] == list(range(count))
    flat = all(child.is_leaf() for child in spec.children())
    if spec.is_leaf() and picks[0][0] is not None:
        number = picks[0][0]
        return lambda results, _: results[number]
    if in_order and flat and spec.type is tuple:
        return lambda results, _: tuple(results)
    if in_order and flat and spec.type is list:
        return lambda results, _: list(results)

    def build(results: Sequence[Any], leaves: Sequence[Any]) -> Any:
        values = [
            results[result] if result is not None else leaves[leaf] if leaf is not None else constant
            for result, leaf, constant in picks
        ]
        return pytree.tree_unflatten(values, spec)

    return build
