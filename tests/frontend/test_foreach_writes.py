"""In-place `torch._foreach_*_` on tensors that overlap: one member after the other, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_helpers import NPU, check, compiled
from torch import fx

from npugraph_ex.frontend.upstream_repairs import foreach_writes

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "views": lambda x: torch._foreach_add_([x[:4], x[2:6]], 1),
    "one tensor twice": lambda x: torch._foreach_mul_([x, x], 2),
    "read by the next": lambda x: torch._foreach_add_([x[:3], x[3:]], [x[3:], x[:3]]),
    "a number each": lambda x: torch._foreach_mul_([x[:3], x[1:]], [2, 3]),
    "named": lambda x: torch._foreach_sub_([x[:3], x[3:]], [x[3:], x[:3]], alpha=2),
    "no other argument": lambda x: torch._foreach_neg_([x[:4], x[2:]]),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_members_that_overlap(program: Callable[[torch.Tensor], Any]) -> None:
    """Results and argument are those of eager mode."""

    def called(x: torch.Tensor) -> torch.Tensor:
        program(x)
        return x * 2

    check(called, [(torch.arange(6.0, device=NPU) + call,) for call in range(2)])


@pytest.mark.slow
def test_arguments_that_overlap() -> None:
    """Two views of the caller's memory."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_([x, y], 1)
        return x + y

    memory, own = torch.zeros(6, device=NPU), torch.zeros(6, device=NPU)
    for _ in range(2):
        assert torch.equal(compiled(program)(memory[:4], memory[2:]), program(own[:4], own[2:]))
        assert torch.equal(memory, own)


@pytest.mark.parametrize(("middle", "calls"), [(3, 1), (2, 2)], ids=["apart", "overlapping"])
def test_members_apart_stay_one_call(middle: int, calls: int) -> None:
    """The fused operator of an optimizer is left, also for parts of one flat tensor."""
    seen: list[int] = []

    def backend(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        foreach_writes.split(gm)
        seen.append(len(gm.graph.find_nodes(op="call_function", target=torch._foreach_add_)))
        return gm

    def program(x: torch.Tensor) -> None:
        torch._foreach_add_([x[:3], x[middle:]], [x[:3], x[middle:]])

    torch.compile(program, backend=backend, fullgraph=True)(torch.ones(6))
    assert seen == [calls]
