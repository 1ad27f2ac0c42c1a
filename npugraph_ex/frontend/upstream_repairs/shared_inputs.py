"""Calls whose inputs share memory otherwise than those that a graph was compiled for run as they were traced.

AOT's graph computes what an input becomes and writes it in the end. That is right for inputs that are apart, and for those
that share memory if it knew: then it passes their base, with the offsets of that one call as constants. No guard of torch
2.13 watches over either. So a graph that writes an input asks at every call, before AOT's wrapper runs; a graph that
writes none is never asked. Not for memory that a program reaches by other ways than the inputs of its graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph.address_guard import AddressGuard, picker
from npugraph_ex.errors import CaptureError, SavedGraphError
from npugraph_ex.frontend.upstream_repairs.repair import Repair
from npugraph_ex.observe.logger import logger

REPAIR = Repair(
    fault="A graph that writes an input is used for inputs that share memory otherwise than when it was compiled.",
    threads=("pytorch#139789",),
    torch=("2.13",),
    test="tests/frontend/test_shared_inputs.py",
)


_ADDRESS = torch.Tensor.data_ptr
_LAYOUTS_REMEMBERED = 64
"""So many layouts in memory that were found right are known again by their addresses: loops come back to a few."""


@dataclass(frozen=True)
class Writes:
    """What AOT knows of the inputs that a graph writes.

    Attributes:
        inputs: positions among the inputs of the Dynamo graph; those that a base stands for are not among them.
        bases: whether it passes bases in place of inputs that share memory.
    """

    inputs: frozenset[int]
    bases: bool


class _Span(NamedTuple):
    """The memory from a tensor's first element to its last, in bytes."""

    device: int
    start: int
    end: int
    position: int


class _StoragePosition(NamedTuple):
    """Where in a storage an input lies; None for what varies from call to call, which the graph computes anew.

    ``base`` is the shape of the tensor that it is a view of for autograd: AOT passes that one, if any, as the base. The
    lengths count because a captured graph may copy all of a base, at an address that a shorter one has by now.
    """

    offset: int | None
    storage_bytes: int | None
    base: tuple[int, ...] | None

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> _StoragePosition:
        base = _torch_private.autograd_base(tensor)
        shape = None if base is None or not _plain(*base.size()) else tuple(base.size())
        return cls(_known(tensor.storage_offset()), _known(tensor.untyped_storage().nbytes()), shape)

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies at this position of its storage."""
        return all(known in {None, new} for known, new in zip(self, _StoragePosition.from_tensor(tensor), strict=True))


def _known(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _plain(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)


def _bytes(tensor: torch.Tensor) -> int:
    """How many bytes lie from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    steps = [(size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)]
    return (1 + sum(steps)) * tensor.element_size()


class SharedInputs:
    """How the inputs of a compiled graph share memory.

    Args:
        example_inputs: those that it was compiled for, fake; numbers among them.
        writes: what it writes.
        static: positions of inputs that stay where they are: parameters.
    """

    def __init__(self, example_inputs: Sequence[Any], writes: Writes, static: Sequence[int]) -> None:
        tensors = {position: value for position, value in enumerate(example_inputs) if isinstance(value, torch.Tensor)}
        sharing: dict[int, list[int]] = defaultdict(list)
        for position, tensor in tensors.items():
            sharing[_torch_private.storage_key(tensor)].append(position)
        groups = [group for group in sharing.values() if len(group) > 1]
        self._together = groups if writes.bases else []
        self._positions = {
            position: _StoragePosition.from_tensor(tensors[position]) for group in self._together for position in group
        }
        self._written = writes.inputs.union(self._positions)
        # Of inputs that shared a storage without a base, AOT has found that no element of one is an element of another.
        self._known = {pair: distance for group in groups for pair, distance in _distances(tensors, group)}
        devices = {device: number for number, device in enumerate({tensor.device for tensor in tensors.values()})}
        self._devices = {position: devices[tensor.device] for position, tensor in tensors.items()}
        self._bytes = {position: _bytes(t) for position, t in tensors.items() if _plain(*t.size(), *t.stride())}
        self._varying = [position for position in tensors if position not in self._bytes]
        self._moving = [position for position in tensors if position in self._written or position not in static]
        self._pick = picker(self._moving)
        self._last: AddressGuard | None = None
        self._before: tuple[int, ...] = ()
        self._found: set[tuple[Any, ...]] = set()

    @property
    def can_differ(self) -> bool:
        """Whether a call can share memory in another way that matters: one input is written, and there are two."""
        return bool(self._written) and len(self._devices) > 1

    def saved(self, serialize: Callable[[], Any]) -> Callable[[], Any]:
        """How to save a graph with these inputs: not at all where they shared memory, since nobody would watch over it."""

        def refuse() -> None:
            raise SavedGraphError("this compiled graph cannot be saved: its inputs share memory and one is written")

        return refuse if self._together or self._known else serialize

    def difference(self, inputs: list[Any]) -> tuple[int, ...]:
        """Positions of inputs that share memory otherwise than in the call that was compiled; none where all is well."""
        moved = self._moved(inputs) if self._positions else ()
        if moved:
            return moved
        if self._last is not None and self._last.matches(inputs):
            return ()
        addresses = tuple(map(_ADDRESS, self._pick(inputs)))
        layout: tuple[Any, ...] = addresses
        if self._varying:
            layout += tuple([(inputs[position].size(), inputs[position].stride()) for position in self._varying])
        if layout not in self._found:
            different = self._overlap(inputs)
            if different:
                return different
            if len(self._found) >= _LAYOUTS_REMEMBERED:
                self._found.clear()
            self._found.add(layout)
        if addresses != self._before:
            self._before = addresses  # an input that moves at every call is not worth an `AddressGuard`
        elif not self._varying:
            self._last = AddressGuard(self._moving, addresses)
        return ()

    def _moved(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Inputs with a common base that lie elsewhere in it, or have none in common any more."""
        for group in self._together:
            if len({_torch_private.storage_key(inputs[position]) for position in group}) > 1:
                return tuple(group)
        return tuple(position for position, known in self._positions.items() if not known.matches(inputs[position]))

    def _overlap(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Two inputs, one of them written, that overlap in a way in which those of the compiled call did not."""
        spans = sorted(self._spans(inputs))
        open_: list[_Span] = []
        for span in spans:
            open_ = [other for other in open_ if other.end > span.start and other.device == span.device]
            for other in open_:
                if self._differ(other, span):
                    return tuple(sorted((other.position, span.position)))
            open_.append(span)
        return ()

    def _spans(self, inputs: Sequence[Any]) -> list[_Span]:
        found = []
        for position, device in self._devices.items():
            tensor = inputs[position]
            size = self._bytes.get(position)
            start = tensor.data_ptr()
            end = start + (_bytes(tensor) if size is None else size)
            if end > start:
                found.append(_Span(device, start, end, position))
        return found

    def _differ(self, one: _Span, other: _Span) -> bool:
        if one.position not in self._written and other.position not in self._written:
            return False
        first, second = sorted((one, other), key=lambda span: span.position)
        if (first.position, second.position) not in self._known:
            return True
        known = self._known[first.position, second.position]
        return known is not None and known != second.start - first.start


def _distances(tensors: Mapping[int, torch.Tensor], group: Sequence[int]) -> list[tuple[tuple[int, int], int | None]]:
    """How many bytes lie between each two inputs of one storage; None where that varies, and a guard of torch's sees to it."""
    starts = {position: tensors[position].storage_offset() * tensors[position].element_size() for position in group}
    return [
        ((first, second), _known(starts[second] - starts[first]))
        for index, first in enumerate(group)
        for second in group[index + 1 :]
    ]


def of(graph: fx.Graph, example_inputs: Sequence[Any]) -> list[SharedInputs]:
    """How the inputs of a Dynamo graph share memory, for `guard`; none where the graph writes no input.

    Args:
        graph: as AOT gives it, while it can be asked for its metadata.
        example_inputs: those of the Dynamo graph, see `examples`.
    """
    written = _torch_private.written_inputs(graph)
    if written is None or not (written[0] or written[1]):
        return []
    # Not buffers, though AOT counts them as static: a program may assign one that lies in a written input.
    parameters = [p for p, example in enumerate(example_inputs) if isinstance(example, torch.nn.Parameter)]
    return [SharedInputs(example_inputs, Writes(*written), parameters)]


def examples(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """What is known of the inputs of a Dynamo graph: the fake tensors that it was traced with, whose sizes may be symbolic.

    Dynamo hands the backend the tensors of the first call, which say nothing of those that follow. A graph that somebody
    else made may have no fake tensors; then it is for inputs like the examples.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [node.meta.get("example_value", given) for node, given in zip(placeholders, example_inputs, strict=True)]


def guard(
    compiled: Callable[..., Any],
    as_traced: Callable[..., Any],
    shared: SharedInputs,
    *,
    names: Sequence[str],
    require_capture: bool,
) -> Callable[..., Any]:
    """Put the question before each call of a compiled graph.

    Args:
        compiled: the graph, a function of its inputs.
        as_traced: the same operator by operator as in eager mode, which is right however inputs share memory.
        shared: how they shared it when the graph was compiled.
        names: what messages call each input.
        require_capture: raise where the graph would not be replayed.

    Returns:
        A function of the same inputs, which raises `CaptureError` under ``require_capture`` where memory is shared otherwise.
    """
    if not shared.can_differ:
        return compiled
    warn = partial(_refuse_or_warn, names, require_capture=require_capture)
    warned = False

    def run(*inputs: Any) -> Any:
        nonlocal warned
        different = shared.difference(list(inputs))
        if not different:
            return compiled(*inputs)
        if require_capture or not warned:
            warned = True
            warn(different)
        return as_traced(*inputs)

    if hasattr(compiled, "serialize"):  # what `aot_compile` saves assumes of its inputs what all saved compilations do
        run.serialize = shared.saved(compiled.serialize)  # type: ignore[attr-defined]
    return run


def _refuse_or_warn(names: Sequence[str], positions: Sequence[int], *, require_capture: bool) -> None:
    which = ", ".join(names[position] for position in positions)
    expected = (
        f"A graph that writes an input was compiled for another place of {which} in memory: they came apart where they had "
        "shared it, overlapping where they had not, or at other offsets"
    )
    advice = (
        "Pass the tensor that holds the memory, and a number or an index tensor, and take the part inside of the compiled "
        "function; or pass a clone"
    )
    if require_capture:
        raise CaptureError(f"{expected}; the compiled graph would give wrong values. {advice}")
    logger.warning("%s. Such calls run operator by operator, as in eager mode. %s", expected, advice)
