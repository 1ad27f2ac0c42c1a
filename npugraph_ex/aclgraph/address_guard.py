"""Guards on addresses: whether a call's inputs are where an earlier call's were. Every call asks, so the answer takes few steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from npugraph_ex.aclgraph import _npu_private

_STRIDE = torch.Tensor.stride


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks the values at ``positions``, in one call into C where it can: models have hundreds of inputs."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda inputs: [inputs[position] for position in positions]


class AddressGuard:
    """Matches inputs at known addresses.

    Args:
        positions: of the inputs.
        addresses: of their first elements, in the same order.
    """

    def __init__(self, positions: Sequence[int], addresses: Sequence[int]) -> None:
        known = dict(zip(positions, addresses, strict=False))
        self._positions = list(known)
        # By position, as the comparison in C wants them.
        self._addresses = [known.get(position) for position in range(max(known, default=-1) + 1)]
        self._are_equal = _npu_private.address_comparison()

    def matches(self, inputs: list[Any]) -> bool:
        """Whether the inputs of this call are at the same addresses."""
        return self._are_equal(inputs, self._addresses, self._positions)


class FrozenAddressGuard:
    """Matches frozen parameters by identity, and other inputs by address: `frozen_parameter` promises that parameters stay.

    Args:
        frozen: the positions of the frozen parameters.
        inputs: the earlier call's.
        others: the guard on the other inputs.
    """

    def __init__(self, frozen: Sequence[int], inputs: Sequence[Any], others: AddressGuard) -> None:
        self._others = others
        self._pick = picker(frozen)
        parameters = self._pick(inputs)
        self._identities: list[int] | None = list(map(id, parameters))
        # A new tensor may get the id of a freed one, so the first that is freed ends all matches.
        self._alive = [weakref.ref(parameter, self._forget) for parameter in parameters]

    def _forget(self, _: object) -> None:
        self._identities = None

    def matches(self, inputs: list[Any]) -> bool:
        """Whether the parameters of this call are the same objects, and the other inputs at the same addresses."""
        return list(map(id, self._pick(inputs))) == self._identities and self._others.matches(inputs)


class LayoutGuard:
    """Matches tensors at the same addresses with the same strides; the graph key has compared their sizes.

    Args:
        positions: of the tensors.
        inputs: the earlier call's.
    """

    def __init__(self, positions: Sequence[int], inputs: Sequence[Any]) -> None:
        self._pick = picker(positions)
        tensors = self._pick(inputs)
        self._addresses = AddressGuard(positions, [tensor.data_ptr() for tensor in tensors])
        self._strides = list(map(_STRIDE, tensors))

    def matches(self, inputs: list[Any]) -> bool:
        """Whether the tensors of this call have the same addresses and strides."""
        return self._addresses.matches(inputs) and list(map(_STRIDE, self._pick(inputs))) == self._strides
