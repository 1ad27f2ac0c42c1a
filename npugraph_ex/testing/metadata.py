"""What a caller can see of a call besides values: metadata, memory shared, inputs changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npugraph_ex.testing.arguments import checked


@dataclass(frozen=True)
class Observation:
    """One call, seen right after it.

    Attributes:
        outputs: copies on the CPU; values that are no tensors as they are.
        inputs: copies of the inputs after the call.
        metadata: shape, dtype and device, then strides, of each output.
        sharing: for each input and output, the first of them in the same memory and the distance to it in bytes.
    """

    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]
    metadata: tuple[tuple[str, str], ...]
    sharing: tuple[tuple[int, int] | None, ...]


def host_copy(value: Any) -> Any:
    """A copy on the CPU, independent of the device's memory."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _described(value: Any) -> tuple[str, str]:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}", ""
    return f"{list(value.shape)} {value.dtype} {value.device.type}", f" strides {_strides(value)}"


def _strides(value: torch.Tensor) -> list[int]:
    """Strides; those of dimensions in which nothing ever moves mean nothing and are not compared."""
    if value.numel() == 0:
        return []
    return [stride if size > 1 else 0 for size, stride in zip(value.shape, value.stride(), strict=True)]


def _sharing(tensors: Sequence[Any]) -> tuple[tuple[int, int] | None, ...]:
    first: dict[int, tuple[int, int]] = {}
    found: list[tuple[int, int] | None] = []
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
            found.append(None)
            continue
        place, start = first.setdefault(tensor.untyped_storage().data_ptr(), (position, tensor.data_ptr()))
        found.append((place, tensor.data_ptr() - start))
    return tuple(found)


@checked
def observe(inputs: Sequence[Any], outputs: Sequence[Any]) -> Observation:
    """Look at a call that has just returned."""
    return Observation(
        outputs=tuple(map(host_copy, outputs)),
        inputs=tuple(map(host_copy, inputs)),
        metadata=tuple(map(_described, outputs)),
        sharing=_sharing([*inputs, *outputs]),
    )


@checked
def visible_difference(expected: Observation, actual: Observation, *, strides: bool = True) -> str | None:
    """How two calls differ in anything but values; None when they do not. ``strides`` says whether these count."""
    if len(expected.outputs) != len(actual.outputs):
        return f"{len(actual.outputs)} outputs instead of {len(expected.outputs)}"
    for position, (old, new) in enumerate(zip(expected.metadata, actual.metadata, strict=True)):
        if old[: 1 + strides] != new[: 1 + strides]:
            return f"output {position} is {''.join(new)} instead of {''.join(old)}"
    inputs = len(expected.inputs)
    for position, (before, after) in enumerate(zip(expected.sharing, actual.sharing, strict=True)):
        if before != after:
            return f"{_name(position, inputs)} {_placed(after, inputs)} instead of {_placed(before, inputs)}"
    return None


def _name(position: int, inputs: int) -> str:
    return f"input {position}" if position < inputs else f"output {position - inputs}"


def _placed(place: tuple[int, int] | None, inputs: int) -> str:
    return "is nowhere" if place is None else f"lies {place[1]} bytes after the start of {_name(place[0], inputs)}"
