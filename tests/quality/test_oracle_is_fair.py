"""The oracle passes no kernel that is a little wrong, and fails none that is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npugraph_ex import testing
from npugraph_ex.reference import KERNELS, before_rounding
from npugraph_ex.testing import Case, Input, host
from npugraph_ex.testing.families import FAMILIES

SMALL = (Input((16, 64), scale=0.001, seed=1), Input((16, 64), scale=0.001, seed=2), Input((64,), seed=3))
DYNAMIC = Case(
    "def program(x0, x1, x2):\n"
    "    y, _, total = torch.ops.npu.npu_add_rms_norm.default(x0, x1, x2)\n"
    "    q, scale = torch.ops.npu.npu_dynamic_quant.default(y)\n"
    "    return (q, scale, total)\n",
    SMALL, route="fx", expected=1,
)  # fmt: skip
STATIC = Case(
    "def program(x0, x1, x2, x3, x4):\n"
    "    scales = torch.ops.aten.add.Tensor(torch.ops.aten.abs.default(x3), 0.02)\n"
    "    zero_points = torch.ops.aten.bitwise_and.Scalar(x4, 7)\n"
    "    y, _, total = torch.ops.npu.npu_add_rms_norm.default(x0, x1, x2)\n"
    "    q = torch.ops.npu.npu_quantize.default(y, scales, zero_points, torch.int8, -1, True)\n"
    "    return (q, total)\n",
    (*SMALL, Input((64,), "float32", scale=0.02, seed=4), Input((64,), "int32", seed=5)), route="fx", expected=1,
)  # fmt: skip
FUSED = {"npu::npu_add_rms_norm_dynamic_quant": DYNAMIC, "npu::npu_add_rms_norm_quant": STATIC}
ROUNDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "truncates": lambda value: value.trunc(),
    "rounds up": lambda value: value.ceil(),
    "rounds twice": lambda value: value.to(torch.bfloat16).double().round(),
    "saturates one early": lambda value: value.round().clamp(-127, 126),
    "adds one to the zero point": lambda value: value.round() + 1,
}


def _check(case: Case, fused: str, kernel: Callable[..., Any], patch: pytest.MonkeyPatch) -> list[str]:
    right = host.callable_of

    def found(target: Any) -> Any:
        is_it = isinstance(target, torch._ops.OpOverload) and target._schema.name == fused
        return kernel if is_it else right(target)

    patch.setattr(host, "callable_of", found)
    return testing.check(case).failures


@pytest.mark.parametrize("fused", FUSED)
def test_the_right_kernel_passes(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference itself, by the way that the wrong ones go."""
    assert _check(FUSED[fused], fused, KERNELS[fused], monkeypatch) == []


@pytest.mark.parametrize("wrong", ROUNDINGS)
@pytest.mark.parametrize("fused", FUSED)
def test_a_kernel_that_rounds_wrongly_fails(fused: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value before rounding is right, and the integers made of them are not."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        exact = before_rounding[fused](*args, **kwargs)
        quotient = exact[0].double()
        return (ROUNDINGS[wrong](quotient).clamp(-128, 127).to(torch.int8), *KERNELS[fused](*args, **kwargs)[1:])

    assert _check(FUSED[fused], fused, kernel, monkeypatch)


@pytest.mark.parametrize("fused", FUSED)
def test_a_kernel_without_epsilon_fails(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a thousandth make epsilon matter."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return KERNELS[fused](*args, **{**kwargs, "epsilon": 0.0})

    assert _check(FUSED[fused], fused, kernel, monkeypatch)


@pytest.mark.parametrize("fused", FUSED)
def test_a_kernel_that_rounds_the_sum_to_bfloat16_fails(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual sum has float16's eleven bits, not eight."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        results = list(KERNELS[fused](*args, **kwargs))
        results[2] = results[2].to(torch.bfloat16).to(torch.float16)
        return tuple(results)

    assert _check(FUSED[fused], fused, kernel, monkeypatch)


@pytest.mark.parametrize("family", ["planted", "planted add_rms_norm_cast", "near-miss", "exact", "device"])
def test_right_programs_raise_no_alarm(family: str) -> None:
    """Random programs through the library as it is; far more of them in the profiles of the suite."""
    alarms = {seed: message for seed in range(500, 540) if (message := FAMILIES[family](seed))}
    assert alarms == {}
