"""Applies rules that a user might register to the graph of a function on the CPU, and compares: fusions and results."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.fusion import registry
from npugraph_ex.fusion.engine import apply_rules
from npugraph_ex.fusion.registry import Registration
from npugraph_ex.graph.metadata import difference
from npugraph_ex.report.builder import ReportBuilder

_Function = Callable[..., Any]


def applied(
    function: _Function,
    inputs: Sequence[torch.Tensor],
    handles: Sequence[Registration],
    wanted: int,
    *,
    dynamic: bool = False,
) -> str:
    """Apply the rules behind ``handles`` to the graph of ``function`` and compare; ``dynamic`` makes sizes symbols."""
    with FakeTensorMode():
        fakes = [torch.empty(value.shape, dtype=value.dtype) for value in inputs]
    gm: fx.GraphModule = make_fx(function, tracing_mode="symbolic")(*inputs) if dynamic else make_fx(function)(*fakes)
    names = {handle.name for handle in handles}
    report = ReportBuilder()
    apply_rules(gm.graph, [rule for rule in registry.USER_RULES.snapshot() if rule.rule.name in names], report)
    gm.recompile()
    gm.graph.lint()
    done, before, after = report.build(), _results(function, inputs), _results(gm, inputs)
    if done.fusions() != wanted:
        return f"{done.fusions()} fusions instead of {wanted}"
    own = [miss for one in done.rules for made in one.fusions for miss in one.near_misses if miss.node in made.by]
    if own:
        return f"what a rule made itself is a near-miss of it: {own[0]}"
    changed = difference(before, after)
    if changed:
        return f"the result has {changed}"
    return "" if all(map(torch.equal, before, after)) else "the result has other values"


def _results(function: _Function, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One tensor or several; random numbers are the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        results = function(*[value.clone() for value in inputs])
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def random_inputs(draw: random.Random, *dtypes: torch.dtype) -> list[torch.Tensor]:
    """Small whole numbers, one matrix of each dtype, all of one shape."""
    shape = (draw.randint(2, 4), draw.randint(2, 4))
    generator = torch.Generator().manual_seed(draw.randint(0, 1 << 30))
    return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for dtype in dtypes]
