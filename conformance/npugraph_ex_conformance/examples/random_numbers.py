"""Examples about random numbers in captured graphs: from one seed, calls draw what eager calls draw, no two alike."""

from __future__ import annotations

from collections.abc import Callable

import torch

_PROGRAMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: torch.nn.functional.dropout(x, 0.5, training=True) * 2,
    lambda x: x + torch.rand_like(x) * torch.randn(x.shape, device=x.device),
    lambda x: torch.bernoulli(x.abs().clamp(0, 1)) + x.clone().normal_(),
    lambda x: torch.randint(0, 9, x.shape, device=x.device) + x,
    lambda x: (torch.rand_like(x), torch.rand_like(x) + x)[1],
    lambda x: x * torch.rand(()).to(x.device),
)
"""The last draws on the host; the one before draws numbers that nobody uses."""
_CALLS = 4


def random_number_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is. ``seed`` modulo 6 chooses the program."""
    program = _PROGRAMS[seed % len(_PROGRAMS)]
    values = torch.randn(16 + seed, generator=torch.Generator().manual_seed(seed)).to("npu")
    torch.compiler.reset()
    compiled = torch.compile(program, backend="npugraph_ex", dynamic=False, fullgraph=True)
    try:
        with torch.no_grad():
            compiled(values)
            actual, eager = (_drawn(draw, values, seed) for draw in (compiled, program))
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"
    for call, (have, want) in enumerate(zip(actual, eager, strict=True)):
        if not torch.equal(have, want):
            frozen = call and torch.equal(have, actual[call - 1])
            return f"replay, call {call}: " + (
                "the numbers of the call before" if frozen else "other numbers than eager mode"
            )
    return ""


def _drawn(draw: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """The results of some calls after seeding."""
    torch.manual_seed(seed)
    return [draw(values).cpu() for _ in range(_CALLS)]
