"""The results of a call: aliases of the capture's memory, or copies while an earlier result is live.

Both are ordinary tensors, as the operators of the graph would return them. A result that is no view has its own version
counter; a view is a view of the same tensor as at the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import torch
from torch.autograd.graph import increment_version

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import _npu_private, device_copies
from npugraph_ex.aclgraph.inputs import Geometry


@dataclass(frozen=True)
class _ResultView:
    """A result in the memory of another tensor: of an input, or of another result."""

    geometry: Geometry
    offset: int  # bytes, from the other tensor's own first element
    conjugated: bool  # one of the two tensors is lazily conjugated, the other is not
    negated: bool  # likewise negated
    is_view: bool  # autograd's view; the result of `detach` is none
    is_whole: bool  # it has the other tensor's geometry and first element

    @classmethod
    def from_tensors(cls, value: torch.Tensor, whole: torch.Tensor) -> _ResultView:
        offset = _first_byte(value) - _first_byte(whole)
        conjugated, negated = value.is_conj() != whole.is_conj(), value.is_neg() != whole.is_neg()
        alike = Geometry.from_tensor(value) == Geometry.from_tensor(whole) and not (offset or conjugated or negated)
        return cls(Geometry.from_tensor(value), offset, conjugated, negated, _is_view(value), alike)

    def view_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of ``whole``, as a view that shares its version counter."""
        if self.is_whole and not self.is_view:
            return whole.detach()
        start = (_first_byte(whole) + self.offset) // self.geometry.dtype.itemsize
        view = _lazily(_view(whole, self.geometry, start), conjugated=self.conjugated, negated=self.negated)
        return view if self.is_view else view.detach()


@dataclass(frozen=True)
class _OfInput:
    """An output that is an input, where ``part`` is None, or lies in its memory."""

    position: int
    part: _ResultView | None


@dataclass(frozen=True)
class _Fresh:
    """An output in memory of the captured graph: a root, where ``part`` is None, or in the memory of one."""

    root: int
    part: _ResultView | None


@dataclass(frozen=True)
class _Again:
    """An output that is the same tensor as an earlier one."""

    position: int


@dataclass(frozen=True)
class _Constant:
    """An output that is no tensor: a size, a number, None."""

    value: object


class Outputs:
    """The outputs of one captured graph.

    Each storage of the graph has a root tensor, of which the other outputs in this storage are parts. The root is the first
    output that is no view. If all are views, the root is their base, which the caller does not get. Outputs in one storage that
    do not share a version counter, as the results of `unsafe_split`, have a root for each counter.

    Args:
        values: what the graph returned while it was captured.
        arguments: its arguments by position: the caller's tensors and the graph's buffers.
    """

    def __init__(self, values: Sequence[Any], arguments: Sequence[Any]) -> None:
        homes = {
            _torch_private.storage_key(argument): position
            for position, argument in reversed(list(enumerate(arguments)))
            if isinstance(argument, torch.Tensor)
        }
        themselves = {id(argument): position for position, argument in reversed(list(enumerate(arguments)))}
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        roots = _roots([value for value in tensors if _torch_private.storage_key(value) not in homes])
        self._slots: list[_OfInput | _Fresh | _Again | _Constant] = []
        places: dict[int, int] = {}
        for position, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                self._slots.append(_Constant(value))
                continue
            if places.setdefault(id(value), position) != position:
                self._slots.append(_Again(places[id(value)]))
                continue
            if id(value) in themselves:  # of several inputs in one memory, this one
                self._slots.append(_OfInput(themselves[id(value)], None))
                continue
            key = _torch_private.storage_key(value)
            if key in homes:
                self._slots.append(_OfInput(homes[key], _ResultView.from_tensors(value, arguments[homes[key]])))
                continue
            number = next(number for number, root in enumerate(roots) if _is_counted_with(value, root))
            whole = roots[number]
            self._slots.append(_Fresh(number, None if value is whole else _ResultView.from_tensors(value, whole)))
        keys = list(map(_torch_private.storage_key, roots))
        firsts = list(map(keys.index, keys))
        self._within = {
            number: (first, _ResultView.from_tensors(roots[number], roots[first]))
            for number, first in enumerate(firsts)
            if number != first
        }
        self._roots = [root.detach() for root in roots]
        self._simple = list(map(_fills_its_storage, self._roots))
        self._storages = self._own_storages()
        self._only_roots = self._slots == [_Fresh(number, None) for number in range(len(self._roots))]
        self._handles: list[int] = []
        self._owners: list[int] = []
        self._references: list[int] = []
        self._addresses: list[int] = []

    @property
    def fresh_positions(self) -> list[int]:
        """The positions of the outputs that lie in the graph's own memory."""
        return [position for position, slot in enumerate(self._slots) if isinstance(slot, _Fresh)]

    def addresses(self) -> list[int]:
        """The addresses of the storages of the results in the graph's own memory."""
        return [storage.data_ptr() for storage in self._storages if storage.nbytes()]

    def lend(self, addresses: Container[int], keeper: object) -> None:
        """Let other captures use the memory of results, too. The replays of these captures overwrite it.

        Args:
            addresses: of the storages that are lent.
            keeper: keeps their memory alive; the storages hold it.
        """

        def lent(number: int) -> torch.Tensor:
            root = self._roots[number]
            plain = device_copies.format_question()(root) in device_copies.PLAIN_FORMATS
            if root.untyped_storage().data_ptr() not in addresses or not plain:
                return root
            weak = _rebuilt(root, _npu_private.without_ownership)
            # An attribute, because torch's storage has no owner for memory that is not its own. It lives as long as the storage.
            weak.untyped_storage().keeper = keeper
            return weak

        self._roots = self._in_their_storages(lent)
        self._storages = self._own_storages()

    def record_baseline_refcounts(self) -> None:
        """Note the reference counts and the address of each storage while no caller holds a result. Call once, after capture."""
        self._handles = [_torch_private.storage_handle(storage) for storage in self._storages]
        self._owners = list(map(_torch_private.owners_of_storage, self._handles))
        self._references = list(map(getrefcount, self._storages))
        self._addresses = list(map(torch.UntypedStorage.data_ptr, self._storages))

    def have_moved(self) -> bool:
        """Whether a caller gave a result's storage other memory (`resize_`). The graph still writes the earlier memory."""
        return list(map(torch.UntypedStorage.data_ptr, self._storages)) != self._addresses

    def has_live_results(self) -> bool:
        """Whether a caller still holds a result of an earlier call, or any view of one."""
        if list(map(_torch_private.owners_of_storage, self._handles)) != self._owners:
            return True
        # `result.untyped_storage()` returns this same object, so a caller who keeps only the storage adds no owner.
        return list(map(getrefcount, self._storages)) != self._references

    def alias_results(self, inputs: Sequence[Any]) -> list[Any]:
        """Results that alias the capture's memory; the next replay overwrites them."""
        # `.data`: with `detach` they would share a version counter with the results of earlier calls.
        roots = [root.data for root in self._roots]
        return roots if self._only_roots else self._assemble(inputs, roots)

    def copy_results(self, inputs: Sequence[Any]) -> list[Any]:
        """Copies of the results, which alias each other as the results do."""
        roots = self._in_their_storages(self._copied)
        return roots if self._only_roots else self._assemble(inputs, roots)

    def _copied(self, number: int) -> torch.Tensor:
        root = self._roots[number]
        return root.clone() if self._simple[number] else _rebuilt(root, torch.Tensor.clone)

    def _in_their_storages(self, first_of: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """The roots anew: ``first_of`` makes the first one of each storage; the others are views of it."""
        roots: list[torch.Tensor] = []
        for number in range(len(self._roots)):
            if number in self._within:
                first, part = self._within[number]
                roots.append(part.view_of(roots[first]).data)
            else:
                roots.append(first_of(number))
        return roots

    def _own_storages(self) -> list[torch.UntypedStorage]:
        return [root.untyped_storage() for number, root in enumerate(self._roots) if number not in self._within]

    def _assemble(self, inputs: Sequence[Any], roots: Sequence[torch.Tensor]) -> list[Any]:
        results: list[Any] = []
        for slot in self._slots:
            if isinstance(slot, _Constant):
                results.append(slot.value)
                continue
            if isinstance(slot, _Again):
                results.append(results[slot.position])
                continue
            whole = roots[slot.root] if isinstance(slot, _Fresh) else inputs[slot.position]
            results.append(whole if slot.part is None else slot.part.view_of(whole))
        return results


def _roots(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The root tensors of the storages of ``values``."""
    found: list[torch.Tensor] = []
    for value in sorted(values, key=_is_view):  # tensors that are no views come first
        base, key = _torch_private.autograd_base(value), _torch_private.storage_key(value)
        if not any(_is_counted_with(value, root) for root in found):
            found.append(value if base is None or _torch_private.storage_key(base) != key else base)
    return found


def _is_counted_with(value: torch.Tensor, root: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage and a write to one is counted as a write to the other."""
    if _torch_private.storage_key(value) != _torch_private.storage_key(root):
        return False
    if value is root or value.is_inference() or root.is_inference():
        return True
    before = _torch_private.version(root)
    increment_version(value)
    return _torch_private.version(root) != before


def _is_view(tensor: torch.Tensor) -> bool:
    return _torch_private.autograd_base(tensor) is not None


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether a clone of ``tensor`` is a copy of its storage too."""
    bytes_ = tensor.numel() * tensor.element_size()
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return plain and not tensor.storage_offset() and tensor.untyped_storage().nbytes() == bytes_


def _rebuilt(tensor: torch.Tensor, other: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The tensor in another storage, which ``other`` makes from a flat view of the whole one. It is no view."""
    flat = _memory(tensor, tensor.dtype)
    if flat.numel() * flat.element_size() != tensor.untyped_storage().nbytes():  # the last bytes are no whole element
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    view = _view(other(flat), Geometry.from_tensor(tensor), _first_byte(tensor) // tensor.element_size())
    return _lazily(view, conjugated=tensor.is_conj(), negated=tensor.is_neg()).data


def _first_byte(tensor: torch.Tensor) -> int:
    """The offset of a tensor in its storage, in bytes. Computed without the address, which is 0 for a tensor without elements."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _memory(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The storage of ``tensor`` as a flat view, with its bytes read as elements of ``dtype``."""
    plain = _lazily(tensor, conjugated=tensor.is_conj(), negated=tensor.is_neg())
    size = max(plain.element_size(), dtype.itemsize)
    count = plain.untyped_storage().nbytes() // size * size // plain.element_size()
    return plain.as_strided((count,), (1,), 0).view(dtype)


def _view(tensor: torch.Tensor, geometry: Geometry, offset: int) -> torch.Tensor:
    """A view of the storage of ``tensor`` from element ``offset`` on, in the shape and dtype of ``geometry``."""
    size, stride, dtype = geometry
    if dtype == tensor.dtype:
        return tensor.as_strided(size, stride, offset)
    view = _memory(tensor, dtype).as_strided(size, stride, offset)
    return _lazily(view, conjugated=tensor.is_conj(), negated=tensor.is_neg())


def _lazily(tensor: torch.Tensor, *, conjugated: bool, negated: bool) -> torch.Tensor:
    """A view that flips the lazy conjugation or negation; ``tensor`` itself if neither flips."""
    view = tensor.conj() if conjugated else tensor
    return _torch_private.negative_view(view) if negated else view
