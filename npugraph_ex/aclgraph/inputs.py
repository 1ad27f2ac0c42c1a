"""The treatment of each input of a captured graph: used in place, copied into a buffer, or part of the graph key."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import _npu_private, device_copies
from npugraph_ex.aclgraph.address_guard import picker
from npugraph_ex.aclgraph.host_scalars import host_scalars
from npugraph_ex.aclgraph.host_scalars import values as scalar_values
from npugraph_ex.aclgraph.host_updates import UpdatePlan, shape_symbols
from npugraph_ex.errors import NpuGraphExError
from npugraph_ex.graph.memory.aliases import AliasFacts, inputs_left_behind, mutated_inputs


class Geometry(NamedTuple):
    """Shape, strides and dtype of a tensor: all that a captured kernel knows of it besides its address."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Geometry:
        """Describe ``tensor``."""
        return cls(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)


_ADDRESS = torch.Tensor.data_ptr


@dataclass(frozen=True)
class InputPlan:
    """The class of every input, by position.

    Attributes:
        names: the input names for messages.
        in_place: tensors that the graph reads or writes at the caller's address: parameters, buffers, mutated inputs,
            and views, if the graph uses more of their storage than the view covers.
            written: the in-place inputs that it writes.
        copied: device tensors that are copied into buffers of the captured graph before each replay.
        keyed: numbers (sizes, scalars) that a capture fixes.
        scalars: CPU tensors without dimensions, which a capture fixes too.
        updates: the numbers and CPU tensors that a replay updates in the captured kernels; None if there are none.
        unshaped_scalars: which of `numbers` are in no tensor's shape, with their names; each value needs its own capture.
        dimensions: (position, dimension) of sizes that no number among the inputs gives.
        offsets: tensors of whose storage the graph uses more than the tensor covers; their storage offset is part of the key.
        device: the index of the device that the graph runs on.
    """

    names: tuple[str, ...]
    in_place: tuple[int, ...]
    written: frozenset[int]
    copied: tuple[int, ...]
    keyed: tuple[int, ...]
    scalars: tuple[int, ...]
    updates: UpdatePlan | None
    unshaped_scalars: Mapping[int, str]
    dimensions: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    device: int

    @classmethod
    def from_graph(
        cls,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        static: Sequence[int],
        names: Sequence[str] | None = None,
        updates: UpdatePlan | None = None,
    ) -> InputPlan:
        """Classify the inputs of ``gm``.

        Args:
            gm: the graph, after all passes.
            example_inputs: its inputs, fake or real.
            static: positions of inputs whose address does not change from call to call.
            names: the input names for messages; None for the placeholders' names.
            updates: the host arguments that replays update.
        """
        nodes = gm.graph.find_nodes(op="placeholder")
        updated = updates.positions if updates is not None else frozenset()
        known = host_scalars(gm.graph)
        scalars = tuple(position for position, node in enumerate(nodes) if node in known and position not in updated)
        facts = AliasFacts(gm.graph)
        left_behind = inputs_left_behind(gm.graph, facts)
        written = mutated_inputs(gm.graph, facts)
        at_home = written | left_behind
        tensors = [
            position
            for position, value in enumerate(example_inputs)
            if isinstance(value, torch.Tensor) and position not in updated and position not in scalars
        ]
        in_place = tuple(
            position
            for position in tensors
            if position in static or position in at_home or isinstance(example_inputs[position], torch.nn.Parameter)
        )
        numbers = tuple(position for position in range(len(nodes)) if position not in {*tensors, *scalars})
        named = tuple(names if names is not None else (str(node.target) for node in nodes))
        keyed = tuple(position for position in numbers if position not in updated)
        return cls(
            names=named,
            in_place=in_place,
            written=written,
            copied=tuple(position for position in tensors if position not in set(in_place)),
            keyed=keyed,
            scalars=scalars,
            updates=updates,
            unshaped_scalars={
                index: named[position]
                for index, position in enumerate((*keyed, *scalars))
                if position in scalars or _is_unshaped(example_inputs[position], gm.graph)
            },
            dimensions=tuple(_unnamed_dimensions(example_inputs, numbers)),
            offsets=tuple(position for position in tensors if position in left_behind),
            device=_device_index(gm),
        )

    def numbers(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The values of the graph key: sizes, scalars, and the storage offsets of some tensors."""
        keyed = tuple(self._of_keyed(inputs)) if self.keyed else ()
        if self.scalars:
            keyed += scalar_values(inputs, self.scalars)
        if self.offsets:
            keyed += tuple([inputs[position].storage_offset() for position in self.offsets])
        if not self.dimensions:
            return keyed
        return keyed + tuple([inputs[position].size(dimension) for position, dimension in self.dimensions])

    @property
    def sizes_vary(self) -> bool:
        """Whether one graph serves calls of several sizes or numbers."""
        return bool(self.keyed or self.dimensions)

    def frozen_parameters(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The positions of parameters that are only read. Buffers are not included, because programs replace them."""
        return tuple(
            position
            for position in self.in_place
            if position not in self.written and isinstance(inputs[position], torch.nn.Parameter)
        )

    def addresses(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The addresses of the graph key."""
        return tuple(map(_ADDRESS, self._of_in_place(inputs)))

    def reading_in_place(self, positions: Collection[int]) -> InputPlan:
        """The same plan, except that it reads the inputs at ``positions`` in place instead of copying them."""
        return replace(self, copied=tuple(position for position in self.copied if position not in positions))

    @cached_property
    def _of_in_place(self) -> Callable[[Sequence[Any]], Sequence[torch.Tensor]]:
        return picker(self.in_place)

    @cached_property
    def _of_keyed(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        return picker(self.keyed)


def _is_unshaped(value: object, graph: fx.Graph) -> bool:
    """Whether a number that varies is in no tensor's shape."""
    if isinstance(value, torch.SymInt):
        return not free_symbols(value) & shape_symbols(graph)
    return isinstance(value, torch.SymFloat)


def _unnamed_dimensions(example_inputs: Sequence[Any], numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes that vary and that no scalar input carries, as in a graph traced without Dynamo."""
    named = {str(example_inputs[position]) for position in numbers}
    found: list[tuple[int, int]] = []
    for position, value in enumerate(example_inputs):
        if not isinstance(value, torch.Tensor):
            continue
        for dimension, size in enumerate(value.size()):
            if isinstance(size, torch.SymInt) and str(size) not in named:
                found.append((position, dimension))
    return found


def _device_index(gm: fx.GraphModule) -> int:
    """The one device of the graph's tensors; the current device if the graph has no tensors."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "npu" and value.device.index is not None:
            return value.device.index
    return int(torch.npu.current_device())


def size_key(example_inputs: Sequence[Any]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that returns the sizes of a call's inputs, those that are numbers first.

    Args:
        example_inputs: the inputs, fake or real, with symbols where sizes vary.
    """
    numbers = [position for position, value in enumerate(example_inputs) if isinstance(value, (int, torch.SymInt))]
    dimensions = _unnamed_dimensions(example_inputs, numbers)

    def key(inputs: Sequence[Any]) -> tuple[Any, ...]:
        given_numbers = [inputs[position] for position in numbers]
        return (*given_numbers, *[inputs[position].size(dimension) for position, dimension in dimensions])

    return key


class InputMemory:
    """The memory of the buffers of copied inputs. The captures of all sizes share it, as each replay fills its buffers first."""

    def __init__(self) -> None:
        # Weak, because captures that read their inputs in place need no block any more.
        self._blocks: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def at(self, position: int) -> Callable[[int, torch.device], torch.Tensor]:
        """A function that returns a flat tensor of at least so many bytes for the input at ``position``."""

        def block(size: int, device: torch.device) -> torch.Tensor:
            known = self._blocks.get(position)
            if known is None or known.numel() < size:
                # Sizes that grow call by call take a new block a few times only.
                capacity = size if known is None else max(size, 2 * known.numel())
                known = self._blocks[position] = torch.empty(capacity, dtype=torch.uint8, device=device)
            return known

        return block


class Buffer:
    """Memory for one copied input, with the caller's strides.

    Args:
        tensor: the input at capture.
        memory: see `InputMemory.at`; None to use ``tensor`` itself as the buffer.
    """

    def __init__(self, tensor: torch.Tensor, memory: Callable[[int, torch.device], torch.Tensor] | None) -> None:
        self.geometry = Geometry.from_tensor(tensor)
        self._extent = _extent(tensor)
        self._memory: torch.Tensor | None = None
        adopt = memory is None
        if memory is None:
            self.tensor = tensor.detach()
        else:
            with torch.inference_mode(mode=False):  # a view of an inference tensor does not say that it is a view
                self._allocate(tensor, memory)
        self._address = self.tensor.data_ptr()
        if not adopt:
            self.load(tensor)
        extent = tensor.numel() if self._extent is None else self._extent
        # Not into an adopted tensor: its storage may be given other memory, and the next input may overlap it.
        count = 0 if adopt else device_copies.bytes_to_copy(tensor, self.tensor, extent)
        self._copy = device_copies.DeviceCopy(self._address, count) if count else None
        self._format = device_copies.format_question()
        self._index = self.tensor.get_device()
        self._likeness = _torch_private.likeness([tensor])

    def _allocate(self, tensor: torch.Tensor, memory: Callable[[int, torch.device], torch.Tensor]) -> None:
        extent = tensor.numel() if self._extent is None else self._extent
        if device_copies.format_question()(tensor) not in device_copies.PLAIN_FORMATS:
            self.tensor = _npu_private.empty_in_its_format(tensor)
        elif not extent:
            self.tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        else:
            size = extent * tensor.element_size()
            self._memory = memory(size, tensor.device)
            flat = _npu_private.without_ownership(self._memory[:size]).view(tensor.dtype)
            self.tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.tensor.set_(flat.untyped_storage(), 0, tensor.size(), tensor.stride())

    def load_bytes(self, tensor: torch.Tensor, stream: ctypes.c_void_p) -> None:
        """Copy the caller's values in as bytes, if its bytes mean the same as the buffer's; otherwise as `load` does.

        Args:
            tensor: the caller's.
            stream: CANN's handle of the current stream.
        """
        if not (
            self._copy is not None
            and (self._likeness(tensor) or self._has_its_geometry(tensor))
            and self._format(tensor) in device_copies.PLAIN_FORMATS
            and self._copy.start(tensor.data_ptr(), stream)
        ) and not self._is(tensor):
            self.load(tensor)

    def _is(self, tensor: torch.Tensor) -> bool:
        """Whether the caller gives the tensor that was adopted: a write into it would be one for autograd, too."""
        return tensor.data_ptr() == self._address and self._has_its_geometry(tensor)

    def _has_its_geometry(self, tensor: torch.Tensor) -> bool:
        """Whether the elements lie as in the buffer, where autograd's facts differ."""
        plain = tensor.get_device() == self._index and not tensor.is_neg()
        return plain and Geometry.from_tensor(tensor) == self.geometry

    def load(self, tensor: torch.Tensor) -> None:
        """Copy the caller's values in. The graph key or Dynamo's guards have checked that the shapes are equal.

        Raises:
            NpuGraphExError: an adopted tensor was given other memory, and the graph still reads the old.
        """
        if self.tensor.data_ptr() != self._address:
            raise NpuGraphExError(
                "clone_input=False made a tensor of an earlier call the graph's buffer, and its storage was resized or replaced "
                "since. Call npugraph_ex.invalidate(), or keep the memory of the first call's tensors."
            )
        if self._extent is None:
            self.tensor.copy_(tensor)
        elif self._extent:
            # Elements that share memory (expanded tensors, sliding windows) cannot be written one by one, so copy the memory.
            flat = self.tensor.as_strided((self._extent,), (1,))
            flat.copy_(tensor.as_strided((self._extent,), (1,)))


def _extent(tensor: torch.Tensor) -> int | None:
    """None if each element has its own memory without gaps; otherwise the number of elements that the tensor spans."""
    if tensor.numel() == 0:
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return None if span == tensor.numel() and 0 not in _moving_strides(tensor) else span


def _moving_strides(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1]
