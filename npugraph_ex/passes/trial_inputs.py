"""Values on the CPU for a trial run of a graph: those of the current call, and random ones.

The operators of the graph accept the call's own values. They may refuse random ones, because some need an index, a
probability or a positive definite matrix. So there are several ways to draw, the most general first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from npugraph_ex import _torch_private

_SIZE_WITHOUT_HINT = 8
_INTEGERS = 3
"""Random integers are below this limit, so that most of them are valid indices."""


def own_inputs(gm: fx.GraphModule, values: Sequence[Any]) -> list[Any] | None:
    """A copy of the current call's values; None if some of them are unknown.

    Args:
        gm: AOT's graph.
        values: the values of its placeholders, in order. A tensor without elements, such as a fake tensor, is unknown.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(values) != len(placeholders):
        return None
    fakes = [node.meta.get("val") for node in placeholders]
    inputs = [_own(fake, value) for fake, value in zip(fakes, values, strict=True)]
    return None if any(value is NotImplemented for value in inputs) else _in_memory(inputs, fakes)


def _own(fake: Any, value: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return _hint(fake) if isinstance(fake, torch.SymInt) else fake
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    size = [_hint(number) for number in fake.size()]
    if not real or list(value.shape) != size or value.dtype != fake.dtype:
        return NotImplemented
    return value.detach().cpu()


def drawn_inputs(gm: fx.GraphModule) -> Iterator[list[Any]]:
    """Random inputs, equal at each call: first of any sign, then closer and closer to what every operator accepts."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    for gentle in (False, True):
        for integers in (_INTEGERS, 1):
            generator = torch.Generator().manual_seed(0)
            drawn = [_drawn(value, generator, gentle=gentle, integers=integers) for value in values]
            yield _in_memory(drawn, values)


def copies(values: Sequence[Any]) -> list[Any]:
    """The values with tensors in new memory, with the same strides; tensors that share memory still share it."""
    return _in_memory(values, values)


def in_float64(values: Sequence[Any]) -> list[Any]:
    """As ``copies``, with float64 for every floating-point dtype, and each number a little closer to zero.

    The change is at most a thousandth. It avoids ties between two integers, which round numbers would cause.
    """
    generator = torch.Generator().manual_seed(0)
    return _in_memory([_widened(value, generator) for value in values], values)


def _widened(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.double() * (1 - torch.rand(value.shape, generator=generator, dtype=torch.float64) / 1000)


def _drawn(value: Any, generator: torch.Generator, *, gentle: bool, integers: int) -> Any:
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    size = [_hint(number) for number in value.size()]
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        values = torch.randint(0, integers, size, generator=generator)
    elif gentle:
        values = _probabilities(size, generator)
    else:
        values = torch.randn(size, generator=generator, dtype=torch.float32)
    return values.to(value.dtype)


def _probabilities(size: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Numbers between 0 and 1. Square matrices are symmetric and positive definite, because their diagonal dominates."""
    values = torch.rand(size, generator=generator, dtype=torch.float32)
    if len(size) < 2 or size[-1] != size[-2] or 0 in size:
        return values
    return (values + values.mT) / (4 * size[-1]) + torch.eye(size[-1]) / 2


def _in_memory(values: Sequence[Any], templates: Sequence[Any]) -> list[Any]:
    """Copies of ``values`` with the strides of ``templates``; they share memory if the templates do.

    If elements share memory, the last tensor's values win, and within it the first element. Gaps are zeros.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for position, template in enumerate(templates):
        if isinstance(template, torch.Tensor):
            groups[_torch_private.storage_key(template)].append(position)
    made = list(values)
    for group in groups.values():
        size = max(_end(values[position], templates[position]) for position in group)
        memory = torch.zeros(size, dtype=torch.uint8).untyped_storage()
        for position in group:
            made[position] = _placed(values[position], templates[position], memory)
    return made


def _end(value: torch.Tensor, template: torch.Tensor) -> int:
    """The number of bytes up to the last element."""
    last = sum((size - 1) * step for size, step in zip(value.shape, _strides(template), strict=True))
    return (_hint(template.storage_offset()) + last + 1) * value.element_size() if value.numel() else 0


def _placed(value: torch.Tensor, template: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
    strides = _strides(template)
    placed = torch.empty(0, dtype=value.dtype).set_(memory, _hint(template.storage_offset()), value.shape, strides)
    once = tuple(slice(1 if step == 0 else None) for step in strides)
    placed[once].copy_(value[once])
    return placed


def _strides(template: torch.Tensor) -> list[int]:
    return [_hint(step) for step in template.stride()]


def _hint(number: int | torch.SymInt) -> int:
    """The value of a symbolic size in the example inputs."""
    if isinstance(number, int):
        return number
    hint = number.node.hint
    return int(hint) if hint is not None else _SIZE_WITHOUT_HINT
