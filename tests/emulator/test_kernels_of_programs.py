"""Kernels that a program registers: what they return is what the operator's fake implementation says, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import npu_emulator
from npu_emulator.errors import EmulatorError

_LIBRARY = torch.library.Library("kernels_of_programs", "DEF")


def _run(name: str, kernel: Callable[..., Any], dtype: torch.dtype) -> torch.Tensor:
    """The result of a new operator with this kernel, for ones."""
    qualified = f"kernels_of_programs::{name}"
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    npu_emulator.register_kernel(qualified, kernel)
    torch.library.register_fake(qualified, lambda x: torch.empty_like(x, dtype=dtype))
    result: torch.Tensor = getattr(torch.ops.kernels_of_programs, name)(torch.ones(3, 4, device="npu"))
    return result.cpu()


def _without_return(x: torch.Tensor) -> None:
    x * 2


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (_without_return, "returned None"),
    "other_size": (lambda x: x.amax(-1), r"returned torch.float32 \[3\]"),
    "one_size_fits_all": (lambda x: x[:1], r"returned torch.float32 \[1, 4\]"),
    "a_number": (lambda _: 2.0, "returned 2.0"),
    "two_results": (lambda x: (x, x), r"returned torch.float32 \[3, 4\] and torch.float32 \[3, 4\]"),
    "of_numpy": (lambda x: x.numpy(), "returned a ndarray"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_results_are_refused(name: str) -> None:
    """With what came and what was expected; nothing of old memory is taken for a result."""
    kernel, said = WRONG[name]
    with pytest.raises(EmulatorError, match=said) as caught:
        _run(name, kernel, torch.float32)
    assert f"kernels_of_programs.{name}.default" in str(caught.value)
    assert "says torch.float32 [3, 4]" in str(caught.value)


def test_fractions_are_no_whole_numbers() -> None:
    """They would be cut off."""
    with pytest.raises(EmulatorError, match=r"says torch.int32 \[3, 4\]"):
        _run("fractions", lambda x: x / 2, torch.int32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_another_floating_point_dtype_is_rounded(dtype: torch.dtype) -> None:
    """As a kernel does that computes in float32."""
    found = _run(f"rounded_{str(dtype)[6:]}", lambda x: x.double() / 3, dtype)
    assert torch.equal(found, torch.full((3, 4), 1 / 3, dtype=dtype))


def test_wrong_arguments_are_named() -> None:
    """What came and what is taken."""
    with pytest.raises(ValueError, match=r"namespace::operator.*got 7"):
        npu_emulator.register_kernel(7, torch.neg)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"function without arguments.*got 5"):
        next(npu_emulator.every_order(5))  # type: ignore[arg-type]
