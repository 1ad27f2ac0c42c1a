"""What the tests of single options share: who shows which option, a function compiled with options, what became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from npugraph_ex.config.compiler_config import CompilerConfig, apply_flat
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.frontend.entry.explain import Watch
from npugraph_ex.observe.explain import GraphExplanation

COVERED: dict[str, str] = {}
"""The test that shows the effect, by option."""


def shows(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say which options a test is about."""

    def note(test: Callable[..., None]) -> Callable[..., None]:
        COVERED.update(dict.fromkeys(names, test.__name__))
        return test

    return note


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function under this backend with these options."""
    config = CompilerConfig()
    apply_flat(config, options)
    torch.compiler.reset()
    return torch.compile(function, backend=get_npu_backend(compiler_config=config), fullgraph=True, dynamic=False)


def told(function: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> GraphExplanation:
    """What became of the one graph of a function that was called with each of ``calls``; values are checked."""
    watch, fast, kept = Watch(), compiled(function, **options), []
    for call in calls:
        expected = function(*[value.clone() for value in call])
        kept.append((expected, fast(*call)))
    for expected, got in kept:
        # A fused operator rounds less often, so a quantised value may be the neighbour of the other.
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1 if function is quantised else 0)
    (entry,) = watch.explanation().graphs
    return entry


def outcome(entry: GraphExplanation, name: str) -> str:
    """What a pass did to the graph."""
    return next(record.outcome for record in entry.graph.report.passes if record.name == name)


def ones(*sizes: int) -> torch.Tensor:
    """A tensor on the device."""
    return torch.ones(sizes or (8,), device="npu")


def fresh(count: int) -> list[tuple[torch.Tensor]]:
    """Inputs at different addresses."""
    return [(ones() * factor,) for factor in range(count)]


def chain(x: torch.Tensor) -> torch.Tensor:
    """Something to capture."""
    return (x + 1).relu() * 2


def bump(x: torch.Tensor) -> torch.Tensor:
    """Something that writes its input."""
    x.add_(1)
    return x * 2


def quantised(x: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Something to fuse: normalisation and quantisation."""
    y, _, total = torch_npu.npu_add_rms_norm(x, x, gamma)
    quantised, scale = torch_npu.npu_dynamic_quant(y)
    return quantised, scale, total


def halves() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs for it."""
    return torch.randn(4, 32, device="npu", dtype=torch.float16), torch.ones(32, device="npu", dtype=torch.float16)
