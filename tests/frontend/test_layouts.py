"""What a program writes in place keeps its strides, and what is then read by strides is eager's (pytorch#186328, #133512)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from device_helpers import NPU, check, random

from npugraph_ex import explain


def _out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x + 1
    torch.add((y + 1).t(), 1, out=result)
    return result


def _out_into_an_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch.add(y.t(), 1, out=x)
    return x * 1.5


def _gaps(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = torch.empty_strided((4, 4), (8, 1), device=NPU)
    result.copy_(x)
    result += y
    return result


def _assigned(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    result = torch.empty_strided((4, 4), (8, 1), device=NPU).fill_(2)
    result[1:] = x[1:]
    return result, torch.as_strided_copy(F.relu(result, True), (3, 4), (8, 1)) + y[:3]


def _read_by_strides(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return torch.as_strided_copy(x, (3,), (2,))


def _read_by_strides_of_a_part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    part = (x + 1)[:, 1]
    part.mul_(y[0])
    return torch.as_strided(part, (2,), (4,), 1) * 2


def _turned(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts = (x + 1).view(4, 2, 2)
    turned = parts.transpose(0, 1)
    turned.masked_fill_(turned > 1, 0).cumsum_(0)
    z = y * 1
    z.view(2, 2, 4).transpose(1, 2).tril_()
    return parts.clone(), z * 2


PROGRAMS = (_turned, _out, _gaps, _assigned, _read_by_strides, _read_by_strides_of_a_part)


@pytest.mark.parametrize(
    ("program", "gaps"),
    # Dynamo breaks the graph at an out= with gaps, so that one is written for dense inputs alone.
    [(_out_into_an_input, False), *((program, gaps) for program in PROGRAMS for gaps in (False, True))],
)
def test_strides_and_values_are_those_of_eager_mode(program: Callable[..., torch.Tensor], *, gaps: bool) -> None:
    """Over three calls with all results alive, for inputs with gaps in their memory too."""

    def make() -> torch.Tensor:
        return random(4, 8)[:, ::2] if gaps else random(4, 4)

    check(program, [(make(), make()) for _ in range(3)])


@pytest.mark.slow
def test_symbolic_sizes() -> None:
    """The same where sizes vary."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = x + 1
        torch.add((y + 1).t(), 1, out=result)
        return result

    check(program, [(random(size, size), random(size, size)) for size in (4, 5, 4)], dynamic=True)


def test_an_input_costs_nothing_more() -> None:
    """The write of an input with gaps is one kernel, in the input's own memory, as in eager mode."""
    seen = explain(lambda x: x.add_(1), random(4, 8)[:, ::2])
    assert [graph.graph.kernels_after for graph in seen.graphs] == [1]
