"""What the tests of registration share: the specification's example rule, and a model that it fuses."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103, N806

from __future__ import annotations

import functools
from typing import Any

import torch
import torch_npu
from torch._inductor.pattern_matcher import Match
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.fusion.registry import Registration, register_replacement


def search_fn(x1: Any, x2: Any, gamma: Any) -> Any:
    xOut = torch.add(x1, x2)
    y, _ = torch_npu.npu_rms_norm(xOut, gamma)
    return y, xOut


def replace_fn(x1: Any, x2: Any, gamma: Any) -> Any:
    y, _, xOut = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return y, xOut


def extra_check(match: Match) -> bool:
    x1 = match.kwargs.get("x1")
    if x1 is None:
        return False
    if not hasattr(x1, "meta") or "val" not in x1.meta:
        return False
    a_shape = x1.meta["val"].shape
    return a_shape[-1] == 7168


def register_as_in_the_specification() -> Registration:
    """Register the example word by word, its condition on the last dimension included."""
    fake_mode = FakeTensorMode()
    with fake_mode:
        input_tensor = functools.partial(torch.empty, (1, 1, 2), device="npu", dtype=torch.float16)
        kwargs_tensor = functools.partial(torch.empty, 2, device="npu", dtype=torch.float16)
        return register_replacement(
            search_fn=search_fn,
            replace_fn=replace_fn,
            example_inputs=(input_tensor(), input_tensor(), kwargs_tensor()),
            extra_check=extra_check,
        )


def model(a: Any, b: Any, g: Any) -> Any:
    y, _ = torch_npu.npu_rms_norm(a + b, g)
    return y * 2
