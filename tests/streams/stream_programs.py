"""What the tests of streams share: a check of values under adversarial schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import npu_emulator
from npugraph_ex import get_npu_backend
from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat

SCHEDULES = ("fifo", "lazy", "random:3", "pct:5:3")


def compiled(function: Callable[..., Any], *, dynamic: bool = False, **options: object) -> Callable[..., Any]:
    """The function under this backend, with nothing left over from another test."""
    torch.compiler.reset()
    config = CompilerConfig()
    apply_flat(config, options)
    return torch.compile(function, backend=get_npu_backend(compiler_config=config), fullgraph=True, dynamic=dynamic)


def races_and_values(
    fast: Callable[..., Any], plain: Callable[..., Any], calls: Sequence[tuple[torch.Tensor, ...]], schedule: str
) -> int:
    """Call `fast` under a schedule, compare results and inputs with `plain` on the CPU, and return the number of races."""
    expected = []
    for inputs in calls:
        twins = [tensor.cpu().clone() for tensor in inputs]
        expected.append((_tensors(plain(*twins)), twins))
    torch.npu.synchronize()
    with torch.no_grad(), npu_emulator.detect_races() as races, npu_emulator.schedule(schedule):
        results = []
        for inputs in calls:
            mine = [tensor.clone() for tensor in inputs]
            results.append((_tensors(fast(*mine)), mine))
        for (got, mine), (want, twins) in zip(results, expected, strict=True):
            for have, wanted in zip([*got, *mine], [*want, *twins], strict=True):
                torch.testing.assert_close(have.cpu(), wanted, rtol=0, atol=0, msg=f"under {schedule}")
    return len(races)


def _tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def check(
    fast: Callable[..., Any],
    plain: Callable[..., Any],
    *calls: tuple[torch.Tensor, ...],
    schedules: Sequence[str] = SCHEDULES,
) -> None:
    """Values are right and nothing races, under every schedule."""
    for schedule in schedules:
        assert races_and_values(fast, plain, calls, schedule) == 0, schedule


def vector(*values: float) -> torch.Tensor:
    """A small tensor on the device whose sums are exact."""
    return torch.tensor(values, device="npu", dtype=torch.float32)
