"""Kernels that a program registers do what the operator declares, in results and in writes, or there is an error."""

from __future__ import annotations

import itertools
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


_NUMBER = itertools.count()


def _written(schema: str, kernel: Callable[..., Any], *given: torch.Tensor) -> list[list[float]]:
    """The arguments after a call of a new operator with this schema and kernel."""
    name = f"writer_{next(_NUMBER)}"
    _LIBRARY.define(name + schema)
    npu_emulator.register_kernel(f"kernels_of_programs::{name}", kernel)
    pure = schema.endswith("Tensor")
    torch.library.register_fake(f"kernels_of_programs::{name}", lambda x, _: torch.empty_like(x) if pure else None)
    getattr(torch.ops.kernels_of_programs, name)(*given)
    return [one.tolist() for one in given]


def _scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y.mul_(2)


def _scale(x: torch.Tensor, y: torch.Tensor) -> None:
    x.mul_(y.mul_(2))


@pytest.mark.parametrize(
    ("schema", "kernel"), [("(Tensor x, Tensor y) -> Tensor", _scaled), ("(Tensor(a!) x, Tensor y) -> ()", _scale)]
)
def test_writes_that_are_not_declared_are_refused(schema: str, kernel: Callable[..., Any]) -> None:
    """The argument is named. NaN that stays NaN, and a zero that keeps its sign, are no change."""
    x, y = torch.ones(3, device="npu"), torch.ones(3, device="npu")
    with pytest.raises(EmulatorError, match=r"changed its tensor 1 .*does not write it"):
        _written(schema, kernel, x, y)
    for same in (float("nan"), -0.0):
        _written(schema, kernel, x, torch.full((3,), same, device="npu"))


def test_declared_writes_are_taken() -> None:
    """Those of one argument, of two, and of one that shares memory with an argument that is not written."""
    x, y = torch.ones(3, device="npu"), torch.full((3,), 3.0, device="npu")
    assert _written("(Tensor x, Tensor(a!) y) -> Tensor", _scaled, x, y) == [[1.0] * 3, [6.0] * 3]
    assert _written("(Tensor(a!) x, Tensor(b!) y) -> ()", _scale, x, y) == [[12.0] * 3] * 2
    memory = torch.ones(4, device="npu")
    shared = _written("(Tensor(a!) x, Tensor y) -> ()", lambda x, y: x.add_(y.sum()), memory[1:], memory[:2])
    assert shared == [[3.0] * 3, [1.0, 3.0]]


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
