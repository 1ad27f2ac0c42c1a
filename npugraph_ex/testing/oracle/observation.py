"""What a caller can see of a call besides values: metadata, memory and version counters shared, inputs changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from npugraph_ex import _torch_private
from npugraph_ex.testing.arguments import checked


@dataclass(frozen=True)
class Observation:
    """One call, seen right after it.

    Attributes:
        outputs: copies on the CPU; values that are no tensors as they are.
        inputs: copies of the inputs after the call.
        metadata: shape, dtype and device, then strides, then what autograd and the storage say, of each output.
        sharing: for each input and output, the first of them in the same memory and the distance to it in bytes.
        counters: for each input and output, the first of them that has the same version counter.
        bases: for each output, the first input or output of which it is a view to autograd.
        objects: for each input and output, the first of them that is the same object.
    """

    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]
    metadata: tuple[tuple[str, str, str], ...]
    sharing: tuple[tuple[int, int] | None, ...]
    counters: tuple[int | None, ...]
    bases: tuple[int | None, ...] = ()
    objects: tuple[int | None, ...] = ()


def host_copy(value: Any) -> Any:
    """A copy on the CPU, independent of the device's memory."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _described(value: Any) -> tuple[str, str, str]:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}", "", ""
    kind = f"{list(value.shape)} {value.dtype} {value.device.type}"
    return kind, f" strides {_strides(value)}", _kept_as(value)


def _kept_as(value: torch.Tensor) -> str:
    """What autograd takes it for, how its elements are read, and where in which storage it lies."""
    bits = [name for name, is_set in (("conjugated", value.is_conj()), ("negated", value.is_neg())) if is_set]
    view = _VIEW if _torch_private.autograd_base(value) is not None else _NO_VIEW
    place = f"element {value.storage_offset()} of a storage of {value.untyped_storage().nbytes()} bytes"
    return ", ".join(("inference" if value.is_inference() else view, *bits, place))


_VIEW, _NO_VIEW = "a view", "no view"


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


def _objects(values: Sequence[Any]) -> tuple[int | None, ...]:
    first: dict[int, int] = {}
    places = enumerate(values)
    return tuple(first.setdefault(id(value), at) if isinstance(value, torch.Tensor) else None for at, value in places)


def _bases(tensors: Sequence[Any], outputs: Sequence[Any]) -> tuple[int | None, ...]:
    given = {id(tensor): position for position, tensor in reversed(list(enumerate(tensors)))}
    views = [_torch_private.autograd_base(value) if isinstance(value, torch.Tensor) else None for value in outputs]
    return tuple(None if base is None else given.get(id(base)) for base in views)


def shared_counters(tensors: Sequence[Any]) -> tuple[int | None, ...]:
    """Who shares version counters: each is raised, once, to see which tensors notice."""
    counted = {
        position: tensor
        for position, tensor in enumerate(tensors)
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    }
    first: dict[int, int] = {}
    for position, tensor in counted.items():
        if position in first:
            continue
        before = {other: _torch_private.version(value) for other, value in counted.items()}
        increment_version(tensor)
        for other, value in counted.items():
            if _torch_private.version(value) != before[other]:
                first[other] = position
    return tuple(first.get(position) for position in range(len(tensors)))


@checked
def observe(inputs: Sequence[Any], outputs: Sequence[Any]) -> Observation:
    """Look at a call that has just returned."""
    return Observation(
        outputs=tuple(map(host_copy, outputs)),
        inputs=tuple(map(host_copy, inputs)),
        metadata=tuple(map(_described, outputs)),
        sharing=_sharing([*inputs, *outputs]),
        counters=shared_counters([*inputs, *outputs]),
        bases=_bases([*inputs, *outputs], outputs),
        objects=_objects([*inputs, *outputs]),
    )


@checked
def visible_difference(
    expected: Observation, actual: Observation, *, strides: bool = True, kept_as: bool = True
) -> str | None:
    """How two calls differ in anything but values; None when they do not.

    Args:
        expected: the call as it should be.
        actual: the other.
        strides: whether strides count.
        kept_as: whether it counts what is a view to autograd and of what, which are one object, who shares a version counter, what
            is read conjugated or negated, and the sizes of storages and where in them the results begin.
    """
    if len(expected.outputs) != len(actual.outputs):
        return f"{len(actual.outputs)} outputs instead of {len(expected.outputs)}"
    for position, (old, new) in enumerate(zip(expected.metadata, actual.metadata, strict=True)):
        if old[: 1 + strides] != new[: 1 + strides]:
            return f"output {position} is {''.join(new[:2])} instead of {''.join(old[:2])}"
    inputs = len(expected.inputs)
    for position, (before, after) in enumerate(zip(expected.sharing, actual.sharing, strict=True)):
        if before != after:
            return f"{_name(position, inputs)} {_where(after, inputs)} instead of {_where(before, inputs)}"
    return _kept_otherwise(expected, actual) if kept_as else None


def _kept_otherwise(expected: Observation, actual: Observation) -> str | None:
    for position, ((*_, old), (*_, new)) in enumerate(zip(expected.metadata, actual.metadata, strict=True)):
        # A view of a tensor that nobody has may become one of its own: more can be done with that, such as `detach_`.
        alone = position < len(expected.bases) and expected.bases[position] is None
        if (old.replace(_VIEW, _NO_VIEW, 1) if alone and new.startswith(_NO_VIEW) else old) != new:
            return f"output {position} is {new} instead of {old}"
    inputs = len(expected.inputs)
    for position, (first, found) in enumerate(zip(expected.counters, actual.counters, strict=True)):
        if first != found:
            return f"{_name(position, inputs)} {_counted(found, inputs)} instead of {_counted(first, inputs)}"
    for position, (base, found) in enumerate(zip(expected.bases, actual.bases, strict=True)):
        if base != found:
            return f"output {position} is {_based(found, inputs)} instead of {_based(base, inputs)}"
    for position, (first, found) in enumerate(zip(expected.objects, actual.objects, strict=True)):
        if first != found:
            return f"{_name(position, inputs)} is {_same(found, inputs)} instead of {_same(first, inputs)}"
    return None


def _name(position: int, inputs: int) -> str:
    return f"input {position}" if position < inputs else f"output {position - inputs}"


def _same(first: int | None, inputs: int) -> str:
    return "no tensor" if first is None else f"the object that is {_name(first, inputs)}"


def _counted(first: int | None, inputs: int) -> str:
    return "has no version counter" if first is None else f"has the version counter of {_name(first, inputs)}"


def _based(base: int | None, inputs: int) -> str:
    return f"a view of {'no input or output' if base is None else _name(base, inputs)}"


def _where(place: tuple[int, int] | None, inputs: int) -> str:
    return "is nowhere" if place is None else f"lies {place[1]} bytes after the start of {_name(place[0], inputs)}"
