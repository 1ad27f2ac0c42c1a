"""Where inputs of an earlier call lay, and whether those of this call lie there too: checked at every call, so in few steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from npugraph_ex.aclgraph import _npu_private

_STRIDE = torch.Tensor.stride


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks what is at ``positions``, in one call into C where it can: models have hundreds of inputs."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda inputs: [inputs[position] for position in positions]


class Places:
    """The addresses of some inputs.

    Args:
        positions: of the inputs.
        addresses: of their first elements, in the same order.
    """

    def __init__(self, positions: Sequence[int], addresses: Sequence[int]) -> None:
        known = dict(zip(positions, addresses, strict=False))
        self._positions = list(known)
        # By position, as the comparison in C wants them.
        self._addresses = [known.get(position) for position in range(max(known, default=-1) + 1)]
        self._same = _npu_private.address_comparison()

    def hold(self, inputs: list[Any]) -> bool:
        """Whether the inputs of this call are at the same addresses."""
        return self._same(inputs, self._addresses, self._positions)


class FrozenPlaces:
    """As `Places`, but some tensors are promised not to move: they must only be the same objects.

    Args:
        frozen: the positions of these.
        inputs: of the call to remember.
        others: the addresses of the other inputs.
    """

    def __init__(self, frozen: Sequence[int], inputs: Sequence[Any], others: Places) -> None:
        self._others = others
        self._pick = picker(frozen)
        found = self._pick(inputs)
        self._known: list[int] | None = list(map(id, found))
        # A new tensor may get the id of a freed one.
        self._alive = [weakref.ref(tensor, self._forget) for tensor in found]

    def _forget(self, _: object) -> None:
        self._known = None

    def hold(self, inputs: list[Any]) -> bool:
        """Whether the inputs of this call are the same objects, and the others at the same addresses."""
        return list(map(id, self._pick(inputs))) == self._known and self._others.hold(inputs)


class Layouts:
    """The addresses and strides of some tensors among the inputs; their sizes are known to be equal.

    Args:
        positions: of the tensors.
        inputs: those of the call to remember.
    """

    def __init__(self, positions: Sequence[int], inputs: Sequence[Any]) -> None:
        self._pick = picker(positions)
        tensors = self._pick(inputs)
        self._places = Places(positions, [tensor.data_ptr() for tensor in tensors])
        self._strides = list(map(_STRIDE, tensors))

    def hold(self, inputs: list[Any]) -> bool:
        """Whether the tensors of this call have the same addresses and strides."""
        return self._places.hold(inputs) and list(map(_STRIDE, self._pick(inputs))) == self._strides
