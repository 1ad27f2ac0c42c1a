"""Every operator in every dtype that its document lists: close to the float64 run of the same formula on the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu
from torch.utils import _pytree as pytree

from npugraph_ex.operators import OPERATORS, Call, Operator, UnsupportedArgumentError

NARROW = (torch.float16, torch.bfloat16, torch.float32)
STEPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 16}
"""How many steps of the dtype a result may be away: one rounding is half a step, and a float32 formula computes in float32."""


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def in_dtype(example: Call, dtype: torch.dtype) -> Call:
    """The example with the dtype that its first floating tensor has, else its first tensor, replaced everywhere."""
    given = tensors(example)
    before = next((tensor for tensor in given if tensor.is_floating_point()), given[0]).dtype
    return Call(*pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype == before else t, tuple(example)))


def widened(example: Call) -> Call:
    """The same numbers in float64."""
    return Call(*pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.dtype in NARROW else t, tuple(example)))


def results(function: Callable[..., Any], example: Call) -> list[torch.Tensor]:
    """What a formula returns and what it leaves in its arguments."""
    args, kwargs = copy.deepcopy(tuple(example))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        returned = function(*args, **kwargs)
    return tensors((returned, args, kwargs))


def assert_close_to_float64(record: Operator, example: Call, dtype: torch.dtype) -> None:
    """Floating results within some roundings; whole numbers equal, or the nearest to the value before rounding."""
    try:
        exact = results(record.before_rounding or record.formula, widened(example))
    except UnsupportedArgumentError:  # packed results have no value before rounding
        exact = results(record.formula, widened(example))
    step = STEPS.get(dtype, 1) * torch.finfo(dtype if dtype.is_floating_point else torch.float32).eps
    for found, expected in zip(results(record.formula, example), exact, strict=True):
        if found.is_floating_point():
            wide = expected.double()
            finite = wide[wide.isfinite()].abs()
            near = max(step, torch.finfo(found.dtype).eps)
            # What cancels leaves a larger relative error.
            small = near / 32 * (float(finite.max()) if finite.numel() else 0.0)
            torch.testing.assert_close(found.double(), wide, rtol=near, atol=small, equal_nan=True)
        elif expected.is_floating_point():
            limits = torch.iinfo(found.dtype)
            distance = (found.double() - expected.double().clamp(limits.min, limits.max)).abs()
            assert distance.nan_to_num().max() <= 0.5 + step * limits.max
        else:
            assert torch.equal(found, expected)


LISTED = [(name, dtype) for name, record in OPERATORS.items() for dtype in record.dtypes if record.formula]


@pytest.mark.parametrize(("name", "dtype"), LISTED, ids=str)
def test_each_dtype_is_close_to_float64(name: str, dtype: torch.dtype) -> None:
    """The formula rounds what it returns and, where the device does, what comes between; it loses nothing else."""
    record = OPERATORS[name]
    draws = record.draws_random_numbers or (lambda *_, **__: False)
    for example in record.calls():
        if not draws(*example.args, **example.kwargs):  # other dtypes draw other numbers
            assert_close_to_float64(record, in_dtype(example, dtype), dtype)
