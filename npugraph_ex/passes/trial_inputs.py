"""Values on the CPU with which a graph can be tried: those of the call that is compiled for, and drawn ones.

A call's own values lie where the operators of the graph accept them. Drawn ones need not: an index, a probability and a
positive definite matrix are only some numbers. So there are several ways to draw, the most general first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

_SIZE_WITHOUT_HINT = 8
_INTEGERS = 3
"""Drawn integers are below it: they are indices of most things."""


def own_inputs(gm: fx.GraphModule, values: Sequence[Any]) -> list[Any] | None:
    """A copy of the values of the call that ``gm`` is compiled for; None where some of them are not known.

    Args:
        gm: the graph as AOT made it.
        values: of its placeholders, in their order; what is no tensor with elements, a fake one say, is not known.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(values) != len(placeholders):
        return None
    inputs = [_own(node.meta.get("val"), value) for node, value in zip(placeholders, values, strict=True)]
    return None if any(value is NotImplemented for value in inputs) else inputs


def _own(fake: Any, value: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return _hint(fake) if isinstance(fake, torch.SymInt) else fake
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    size = [_hint(number) for number in fake.size()]
    if not real or list(value.shape) != size or value.dtype != fake.dtype:
        return NotImplemented
    return _laid_out(value.detach().cpu(), [_hint(number) for number in fake.stride()])


def drawn_inputs(gm: fx.GraphModule) -> Iterator[list[Any]]:
    """Random inputs, the same ones at each call: of any sign, and then ever closer to what every operator takes."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    for gentle in (False, True):
        for integers in (_INTEGERS, 1):
            generator = torch.Generator().manual_seed(0)
            yield [_drawn(value, generator, gentle=gentle, integers=integers) for value in values]


def copy_of(value: Any) -> Any:
    """A tensor in new memory with the same strides; anything else as it is."""
    return _laid_out(value, value.stride()) if isinstance(value, torch.Tensor) else value


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
    return _laid_out(values.to(value.dtype), [_hint(number) for number in value.stride()])


def _probabilities(size: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Numbers between 0 and 1; square matrices are symmetric and positive definite, because their diagonal outweighs."""
    values = torch.rand(size, generator=generator, dtype=torch.float32)
    if len(size) < 2 or size[-1] != size[-2] or 0 in size:
        return values
    return (values + values.mT) / (4 * size[-1]) + torch.eye(size[-1]) / 2


def _laid_out(values: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy of ``values`` with these strides; elements that share memory have the value of the first."""
    shared = [step == 0 for step in stride]
    some = values[tuple(slice(1) if is_shared else slice(None) for is_shared in shared)]
    result = torch.empty_strided(some.shape, stride, dtype=values.dtype).copy_(some)
    return result.expand(values.shape) if any(shared) else result


def _hint(number: int | torch.SymInt) -> int:
    """The size that a symbol stands for in the example inputs."""
    if isinstance(number, int):
        return number
    hint = number.node.hint
    return int(hint) if hint is not None else _SIZE_WITHOUT_HINT
