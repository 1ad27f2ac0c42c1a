"""Falls back to eager execution if inputs share memory in another way than at compilation.

AOT's graph computes an input's new value and writes it at the end. That is right for inputs without common memory. It is also
right if AOT saw the common memory at compilation: then it passes the base, with that call's offsets as constants. No guard of
torch 2.13 checks either case. So a graph that writes an input checks each call, before AOT's wrapper runs; other graphs need
no check. Memory that a program reaches other than through its graph's inputs is not covered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph.address_guard import AddressGuard, picker
from npugraph_ex.errors import CaptureError, SavedGraphError, address_of
from npugraph_ex.frontend.upstream_repairs.as_strided_writes import required_offsets
from npugraph_ex.observe.logger import logger
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A graph that writes an input is used for inputs that share memory in another way than at compilation.",
    threads=("pytorch#139789",),
    test="tests/frontend/test_shared_inputs.py",
)


_ADDRESS = torch.Tensor.data_ptr
UNSAVED = "its inputs share memory and one is written, or it writes one and uses as_strided"
"""Why a graph is not saved whose inputs have a known place."""
NOT_TRACED = (
    "inputs of sizes that are symbols share memory that the graph writes, and torch cannot trace that for inference tensors; "
    "pass a clone, or make the tensors outside of torch.inference_mode()"
)
"""Why a graph runs operator by operator at which AOT fails."""
_LAYOUTS_REMEMBERED = 64
"""The number of correct layouts that are recognised by their addresses, because loops repeat a few."""


@dataclass(frozen=True)
class Writes:
    """AOT's facts about the inputs that a graph writes.

    Attributes:
        inputs: positions among the inputs of the Dynamo graph, without inputs that a base replaces.
        bases: whether AOT passes bases instead of inputs that share memory.
        offsets: where inputs must begin in their storage, by position; see `as_strided_writes`.
    """

    inputs: frozenset[int]
    bases: bool
    offsets: Mapping[int, int]


class _Savable(Protocol):
    def never_saved(self, reason: str) -> None: ...


class _ByteRange(NamedTuple):
    """The memory from a tensor's first element to its last, in bytes."""

    device: int
    start: int
    end: int
    position: int


class _StoragePosition(NamedTuple):
    """An input's position in its storage; None for parts that vary from call to call, which the graph computes itself.

    ``base`` is the shape of the tensor of which it is a view to autograd; AOT passes that tensor as the base. The lengths
    matter because a captured graph may copy a whole base, at an address where a shorter one may lie now.
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
    """The number of bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    steps = [(size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)]
    return (1 + sum(steps)) * tensor.element_size()


class SharedInputs:
    """How the inputs of a compiled graph share memory.

    Args:
        example_inputs: the fake inputs of the compilation, numbers included.
        writes: the inputs that it writes.
        static: positions of inputs that never move: parameters.
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
        } | {position: _StoragePosition(offset, None, None) for position, offset in writes.offsets.items()}
        self._written = writes.inputs.union(self._positions)
        # If inputs shared a storage without a base, AOT has checked that they have no element in common.
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
        """Whether the inputs' place can matter, because the graph writes one, and there are two or more or its offset counts."""
        return bool(self._written) and (len(self._devices) > 1 or bool(self._positions))

    @property
    def offsets_count(self) -> bool:
        """Whether the graph is right only for inputs at certain offsets of their storage."""
        return bool(self._positions)

    def saved(self, serialize: Callable[[], Any]) -> Callable[[], Any]:
        """How to save a graph with these inputs; not if their place in memory counts, because nothing would check it."""

        def refuse() -> None:
            raise SavedGraphError(f"this compiled graph cannot be saved: {UNSAVED}")

        return refuse if self._positions or self._known else serialize

    def difference(self, inputs: list[Any]) -> tuple[int, ...]:
        """Positions of inputs that share memory in another way than at compilation; empty if there are none."""
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
            self._before = addresses  # no `AddressGuard`, because an input may move at every call
        elif not self._varying:
            self._last = AddressGuard(self._moving, addresses)
        return ()

    def _moved(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Inputs that begin at another offset, or inputs of a common base that have no common base any more."""
        for group in self._together:
            if len({_torch_private.storage_key(inputs[position]) for position in group}) > 1:
                return tuple(group)
        return tuple(position for position, known in self._positions.items() if not known.matches(inputs[position]))

    def _overlap(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Two inputs, one of them written, that overlap in another way than at compilation."""
        spans = sorted(self._spans(inputs))
        open_: list[_ByteRange] = []
        for span in spans:
            open_ = [other for other in open_ if other.end > span.start and other.device == span.device]
            for other in open_:
                if self._differ(other, span):
                    return tuple(sorted((other.position, span.position)))
            open_.append(span)
        return ()

    def _spans(self, inputs: Sequence[Any]) -> list[_ByteRange]:
        found = []
        for position, device in self._devices.items():
            tensor = inputs[position]
            size = self._bytes.get(position)
            start = tensor.data_ptr()
            end = start + (_bytes(tensor) if size is None else size)
            if end > start:
                found.append(_ByteRange(device, start, end, position))
        return found

    def _differ(self, one: _ByteRange, other: _ByteRange) -> bool:
        if one.position not in self._written and other.position not in self._written:
            return False
        first, second = sorted((one, other), key=lambda span: span.position)
        if (first.position, second.position) not in self._known:
            return True
        known = self._known[first.position, second.position]
        return known is not None and known != second.start - first.start


def _distances(tensors: Mapping[int, torch.Tensor], group: Sequence[int]) -> list[tuple[tuple[int, int], int | None]]:
    """The distance in bytes between each two inputs of one storage; None if it varies, because then torch has a guard."""
    starts = {position: tensors[position].storage_offset() * tensors[position].element_size() for position in group}
    return [
        ((first, second), _known(starts[second] - starts[first]))
        for index, first in enumerate(group)
        for second in group[index + 1 :]
    ]


def of(graph: fx.Graph, example_inputs: Sequence[Any]) -> list[SharedInputs]:
    """How the inputs of a Dynamo graph share memory, for `guard`; None if the graph writes no input.

    Args:
        graph: AOT's graph, while AOT's metadata is available.
        example_inputs: the inputs of the Dynamo graph, see `examples`.
    """
    written = _torch_private.written_inputs(graph)
    if written is None or not (written[0] or written[1]):
        return []
    # Not buffers, although AOT counts them as static: a program may replace one by a view of a written input.
    parameters = [p for p, example in enumerate(example_inputs) if isinstance(example, torch.nn.Parameter)]
    offsets = required_offsets(graph, example_inputs, written[0])
    return [SharedInputs(example_inputs, Writes(*written, offsets), parameters)]


def refuse_saving(made: _Savable, shared: Sequence[SharedInputs]) -> None:
    """Make a compiled graph that is right only for inputs at certain places one that is not saved."""
    if any(inputs.offsets_count for inputs in shared):
        made.never_saved(UNSAVED)


def examples(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a Dynamo graph as fake tensors of its trace, whose sizes may be symbolic.

    Dynamo passes the tensors of the first call, which do not represent later calls. A graph from elsewhere may have no fake
    tensors; then the examples represent all calls.
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
    """Check the inputs before each call of a compiled graph.

    Args:
        compiled: the graph, a function of its inputs.
        as_traced: the graph operator by operator, which is right however inputs share memory.
        shared: how the inputs shared memory at compilation.
        names: the input names for messages.
        require_capture: raise instead of falling back.

    Returns:
        A function of the same inputs, which raises `CaptureError` under ``require_capture`` if memory is shared in another
        way.
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

    if hasattr(compiled, "serialize"):  # it assumes the same of its inputs as all saved graphs
        run.serialize = shared.saved(compiled.serialize)  # type: ignore[attr-defined]
    return run


def _refuse_or_warn(names: Sequence[str], positions: Sequence[int], *, require_capture: bool) -> None:
    which = ", ".join(names[position] for position in positions)
    expected = (
        f"A graph that writes an input was compiled for another place of {which} in memory: they came apart where they had "
        "shared it, overlapping where they had not, or at other offsets; or what it writes through as_strided may lie outside of it"
    )
    advice = (
        "Pass the tensor that holds the memory, and a number or an index tensor, and take the part inside of the compiled "
        "function; or pass a clone"
    )
    if require_capture:
        raise CaptureError(f"{expected}; the compiled graph would give wrong values. {advice}")
    logger.warning(
        "%s. Such calls run operator by operator, as in eager mode. %s\n%s",
        expected,
        advice,
        address_of("CaptureError"),
    )
