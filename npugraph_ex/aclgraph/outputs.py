"""Handing out results: views of the graph's memory while nobody can be hurt by the next replay, copies otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import torch

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph.footprint import Span, span_of
from npugraph_ex.aclgraph.inputs import Geometry


@dataclass(frozen=True)
class _OfInput:
    """An output that lies in an input's memory: it is handed out as a view of the caller's tensor."""

    position: int
    geometry: Geometry
    offset: int  # bytes, from the input's own first element
    conjugated: bool  # lazily, and the input is not; or the other way round
    negated: bool  # likewise

    @classmethod
    def of(cls, value: torch.Tensor, argument: torch.Tensor, position: int) -> _OfInput:
        return cls(
            position,
            Geometry.of(value),
            value.data_ptr() - argument.data_ptr(),
            value.is_conj() != argument.is_conj(),
            value.is_neg() != argument.is_neg(),
        )

    def hand_out(self, inputs: Sequence[Any]) -> torch.Tensor:
        tensor: torch.Tensor = inputs[self.position]
        if self.offset == 0 and Geometry.of(tensor) == self.geometry:
            same = tensor
        else:
            start = tensor.storage_offset() * tensor.element_size() + self.offset
            same = _view(tensor, self.geometry, start // self.geometry.dtype.itemsize)
        return _lazily(same, conjugated=self.conjugated, negated=self.negated)


@dataclass(frozen=True)
class _Fresh:
    """An output in memory of the captured graph; outputs of one storage share a number."""

    tensor: torch.Tensor
    storage: int


@dataclass(frozen=True)
class _Constant:
    """An output that is no tensor: a size, a number, None."""

    value: object


class Outputs:
    """The outputs of one captured graph.

    Args:
        values: what the graph returned while it was captured.
        arguments: what it was called with, by position: the caller's tensors and the graph's buffers.
    """

    def __init__(self, values: Sequence[Any], arguments: Sequence[Any]) -> None:
        homes = {
            argument.untyped_storage().data_ptr(): position
            for position, argument in reversed(list(enumerate(arguments)))
            if isinstance(argument, torch.Tensor) and argument.numel()
        }
        storages: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._slots: list[_OfInput | _Fresh | _Constant] = []
        for value in values:
            if not isinstance(value, torch.Tensor):
                self._slots.append(_Constant(value))
                continue
            storage = value.untyped_storage()
            home = homes.get(storage.data_ptr()) if value.numel() else None
            if home is not None:
                self._slots.append(_OfInput.of(value, arguments[home], home))
                continue
            key = storage.data_ptr() or -id(value)
            if key not in storages:
                storages[key] = len(self._storages)
                self._storages.append(storage)
            self._slots.append(_Fresh(value.detach(), storages[key]))
        del values, arguments
        slots = [slot for slot in self._slots if isinstance(slot, _Fresh)]
        # Elements of the smallest dtype fill a storage whatever its size, those of a larger one may leave bytes over.
        finest = {slot.storage: slot.tensor for slot in sorted(slots, key=lambda slot: -slot.tensor.element_size())}
        self._finest = [finest[storage] for storage in range(len(self._storages))]
        fresh = [slot.tensor for slot in slots]
        self._all_fresh = fresh if len(fresh) == len(self._slots) else None
        self._handles: list[int] = []
        self._owners: list[int] = []
        self._references: list[int] = []

    @property
    def fresh_positions(self) -> list[int]:
        """The positions of the outputs that lie in the graph's own memory."""
        return [position for position, slot in enumerate(self._slots) if isinstance(slot, _Fresh)]

    def spans(self) -> list[Span]:
        """Where the results lie that are in the graph's own memory."""
        return [span_of(storage) for storage in self._storages if storage.nbytes()]

    def settle(self) -> None:
        """Remember how many owners each storage has while no caller holds a result. Call once, after capture."""
        self._handles = [_torch_private.storage_handle(storage) for storage in self._storages]
        self._owners = list(map(_torch_private.owners_of_storage, self._handles))
        self._references = list(map(getrefcount, self._storages))

    def held(self) -> bool:
        """Whether a caller still holds a result of an earlier call, or any view of one."""
        if list(map(_torch_private.owners_of_storage, self._handles)) != self._owners:
            return True
        # `result.untyped_storage()` gives this very object, so that who keeps only that is no further owner.
        return list(map(getrefcount, self._storages)) != self._references

    def lend(self, inputs: Sequence[Any]) -> list[Any]:
        """Hand the results out where they are; the next replay overwrites them."""
        if self._all_fresh is not None:
            return [tensor.detach() for tensor in self._all_fresh]
        return [
            slot.tensor.detach()
            if isinstance(slot, _Fresh)
            else slot.hand_out(inputs)
            if isinstance(slot, _OfInput)
            else slot.value
            for slot in self._slots
        ]

    def copy(self, inputs: Sequence[Any]) -> list[Any]:
        """Hand out copies, aliased among each other as the results are."""
        copies: dict[int, torch.Tensor] = {}
        results: list[Any] = []
        for slot in self._slots:
            if not isinstance(slot, _Fresh):
                results.append(slot.hand_out(inputs) if isinstance(slot, _OfInput) else slot.value)
                continue
            if slot.storage not in copies:
                copies[slot.storage] = _whole(self._finest[slot.storage]).clone()
            base, tensor = copies[slot.storage], slot.tensor
            results.append(
                _lazily(
                    _view(base, Geometry.of(tensor), tensor.storage_offset()),
                    conjugated=tensor.is_conj(),
                    negated=tensor.is_neg(),
                )
                if base.numel()
                else tensor.clone()
            )
        return results


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor`` as one flat tensor of its dtype, with the elements as they are in memory."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return _lazily(tensor.as_strided((elements,), (1,), 0), conjugated=tensor.is_conj(), negated=tensor.is_neg())


def _view(tensor: torch.Tensor, geometry: Geometry, offset: int | torch.SymInt) -> torch.Tensor:
    """Memory of ``tensor`` from the element ``offset`` of its storage on, in the shape and dtype of ``geometry``."""
    size, stride, dtype = geometry
    if dtype == tensor.dtype:
        return tensor.as_strided(size, stride, offset)
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset, size, stride)


def _lazily(tensor: torch.Tensor, *, conjugated: bool, negated: bool) -> torch.Tensor:
    """A view that is read conjugated or negated, or no longer so; ``tensor`` itself where it is neither."""
    view = tensor.conj() if conjugated else tensor
    return _torch_private.negative_view(view) if negated else view
