"""How far roundings move the results of a graph: the spread of a few runs in float64 with noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from npugraph_ex.testing.oracle.reference64 import Reference, WideGraph
from npugraph_ex.testing.oracle.rounding_noise import Noise

FEW_RUNS, MANY_RUNS = 4, 64
"""How often a graph runs with noise: a few runs excuse nearly everything that is right, many the one element in millions."""


@dataclass(frozen=True)
class Spread:
    """How far roundings move each value and each quotient of a ``Reference``; None for what is not floating point."""

    values: tuple[torch.Tensor | None, ...]
    quotients: tuple[torch.Tensor | None, ...]

    def times(self, factor: float) -> Spread:
        """Everything ``factor`` times as far."""
        values, quotients = (
            tuple(None if moved is None else moved * factor for moved in part) for part in (self.values, self.quotients)
        )
        return Spread(values, quotients)


def run_spread(  # noqa: PLR0913 - keyword arguments but for three
    gm: fx.GraphModule | WideGraph,
    inputs: Sequence[Any],
    reference: Reference,
    *,
    seed: int = 0,
    runs: int = FEW_RUNS,
    forced: Mapping[str, Any] | None = None,
    exactly: bool = False,
) -> Spread:
    """Run a graph ``runs`` times with noise; ``pooled`` combines the differences.

    With ``exactly``, nothing is moved that eager mode does not round. Otherwise only integers and masks are spared: a replacement
    may round where eager mode does not.
    """
    graph = gm if isinstance(gm, WideGraph) else WideGraph(gm)
    noise = Noise(torch.Generator().manual_seed(seed))
    exact = graph.exact(inputs, forced or {}, every=exactly)
    noisy = [graph.compute(inputs, forced or {}, noise, exact) for _ in range(runs)]
    return Spread(
        tuple(_spread(base, [run.values[i] for run in noisy]) for i, base in enumerate(reference.values)),
        tuple(_spread(base, [run.quotients[i] for run in noisy]) for i, base in enumerate(reference.quotients)),
    )


def _spread(base: Any, noisy: Sequence[Any]) -> torch.Tensor | None:
    if not isinstance(base, torch.Tensor) or base.dtype != torch.float64 or base.numel() == 0:
        return None
    return pooled(base, torch.stack([(value - base).abs().nan_to_num(posinf=0.0) for value in noisy]).amax(0))


def pooled(base: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """The larger of ``moved`` and the usual relative movement in the row.

    A few random runs leave some elements unmoved by luck. Elements of one row went through the same roundings, so the
    row's root mean square of the relative movement is a fair lower bound for each of them.
    """
    relative = torch.where(base != 0, moved / base.abs(), 0.0).nan_to_num(posinf=0.0).clamp(max=1.0)
    usual = relative.square().mean(dim=-1, keepdim=True).sqrt() if base.dim() else relative
    return torch.maximum(moved, usual * base.abs().nan_to_num(posinf=0.0))
