"""Guards on addresses: whether the inputs have the addresses of an earlier call. Each call runs a guard, so it must be fast."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from npugraph_ex.aclgraph import _npu_private


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks the values at ``positions``, if possible in one call into C, because models have hundreds of inputs."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda inputs: [inputs[position] for position in positions]


class AddressGuard:
    """Matches inputs that have known addresses.

    Args:
        positions: the positions of the inputs.
        addresses: the addresses of their first elements, in the same order.
    """

    def __init__(self, positions: Sequence[int], addresses: Sequence[int]) -> None:
        known = dict(zip(positions, addresses, strict=False))
        self._positions = list(known)
        # By position, because the comparison in C takes them so.
        self._addresses = [known.get(position) for position in range(max(known, default=-1) + 1)]
        self._are_equal = _npu_private.address_comparison()

    def matches(self, inputs: list[Any]) -> bool:
        """Whether the inputs of this call have the same addresses."""
        return self._are_equal(inputs, self._addresses, self._positions)


class FrozenAddressGuard:
    """Matches frozen parameters by identity and other inputs by address.

    The option `frozen_parameter` promises that parameters do not move.

    Args:
        frozen: the positions of the frozen parameters.
        inputs: the inputs of the earlier call.
        others: the guard on the other inputs.
    """

    def __init__(self, frozen: Sequence[int], inputs: Sequence[Any], others: AddressGuard) -> None:
        self._others = others
        self._pick = picker(frozen)
        parameters = self._pick(inputs)
        self._identities: list[int] | None = list(map(id, parameters))
        # A new tensor may get the id of a freed one. So once a parameter is freed, nothing matches any more.
        self._alive = [weakref.ref(parameter, self._forget) for parameter in parameters]

    def _forget(self, _: object) -> None:
        self._identities = None

    def matches(self, inputs: list[Any]) -> bool:
        """Whether the parameters of this call are the same objects, and the other inputs at the same addresses."""
        return list(map(id, self._pick(inputs))) == self._identities and self._others.matches(inputs)


class LayoutGuard:
    """Matches tensors with the same addresses and strides. The graph key compares their sizes.

    Args:
        positions: the positions of the tensors.
        inputs: the inputs of the earlier call.
    """

    def __init__(self, positions: Sequence[int], inputs: Sequence[Any]) -> None:
        tensors = [inputs[position] for position in positions]
        self._known = [(at, one.data_ptr(), one.stride()) for at, one in zip(positions, tensors, strict=True)]

    def matches(self, inputs: list[Any]) -> bool:
        """Whether the tensors of this call have the same addresses and strides."""
        # These are the few tensors of a caller; `AddressGuard`, which takes all inputs, would cost more.
        for position, address, stride in self._known:
            tensor = inputs[position]
            if tensor.data_ptr() != address or tensor.stride() != stride:
                return False
        return True
