"""The extra rules, off unless switched on: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fusion_cases import Spec, assert_close, assert_same_bits, coarsest, in_float64, outputs, tensors, wide_inputs
from fx_helpers import aot_graph, optimise, targets

import npugraph_ex

HALF, BF16, SINGLE, INT32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
npu = torch.ops.npu


def swiglu(x: Any, y: Any) -> Any:
    return npu.npu_dynamic_quant(npu.npu_swiglu(x))


def swiglu_last_dim_written(x: Any, y: Any) -> Any:
    return npu.npu_dynamic_quant(npu.npu_swiglu(x, 1), dst_type=torch.int8)


def swiglu_of_a_sum(x: Any, y: Any) -> Any:
    return npu.npu_dynamic_quant(npu.npu_swiglu(x + y, dim=-1))[0]


def swiglu_first_dim(x: Any, y: Any) -> Any:
    return npu.npu_dynamic_quant(npu.npu_swiglu(x, 0))


def swiglu_smoothed(x: Any, y: Any) -> Any:
    return npu.npu_dynamic_quant(npu.npu_swiglu(x), smooth_scales=y[0, :32])


def swiglu_used_otherwise(x: Any, y: Any) -> Any:
    z = npu.npu_swiglu(x)
    return (*npu.npu_dynamic_quant(z), z)


def swiglu_to_int4(x: Any, y: Any) -> Any:
    return npu.npu_dynamic_quant(npu.npu_swiglu(x), dst_type=torch.quint4x2)[0].abs()


def scaled_sum(x: Any, y: Any) -> Any:
    return x * 0.5 + y


def swapped_sum(x: Any, y: Any) -> Any:
    return y + x * 3


def both_are_scaled(x: Any, y: Any) -> Any:
    return x * 0.5 + y * 2


def broadcast_sum(x: Any, y: Any) -> Any:
    return x * -1.5 + y[:1]


def product_used_otherwise(x: Any, y: Any) -> Any:
    z = x * 0.5
    return z + y, z


def sum_with_alpha(x: Any, y: Any) -> Any:
    return torch.add(x * 0.5, y, alpha=2)


def product_of_tensors(x: Any, y: Any) -> Any:
    return x * y + y


def sum_of_two_dtypes(x: Any, y: Any) -> Any:
    return x * 0.5 + y.float()


def integers(x: Any, y: Any) -> Any:
    return x.to(INT32) * 2 + y.to(INT32)


def biased(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = npu.npu_add_rms_norm(a, b, g, 1e-5)
    return npu.npu_quantize(y + e, s * 0.1 + 0.5, z, torch.qint8, -1), x


def biased_by_default(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return npu.npu_quantize(npu.npu_add_rms_norm(a, b, g)[0] + e, s * 0.1 + 0.5, z, torch.qint8)


def biased_by_a_row(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return npu.npu_quantize(npu.npu_add_rms_norm(a, b, g)[0] + a, s * 0.1 + 0.5, z, torch.qint8)


def biased_twice(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return npu.npu_quantize(torch.add(npu.npu_add_rms_norm(a, b, g)[0], e, alpha=2), s, z, torch.qint8)


def biased_and_used(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y = npu.npu_add_rms_norm(a, b, g)[0] + e
    return npu.npu_quantize(y, s * 0.1 + 0.5, z, torch.qint8), y


ROWS: list[Spec] = [((4, 64), HALF), ((4, 64), HALF)]
NORM: list[Spec] = [*ROWS, ((64,), HALF), ((64,), HALF), ((64,), SINGLE), ((64,), INT32)]
CASES: dict[str, tuple[Sequence[Spec], dict[Callable[..., Any], int | str]]] = {
    "swiglu_quant": (
        ROWS,
        {
            swiglu: 1, swiglu_last_dim_written: 1, swiglu_of_a_sum: 1, swiglu_first_dim: "dim is 0, the pattern has 1",
            swiglu_smoothed: "smooth_scales is", swiglu_used_otherwise: "npu_swiglu is also a result of the graph",
            swiglu_to_int4: "dst_type is 16",
        },
    ),
    "muls_add": (
        ROWS,
        {
            scaled_sum: 1, swapped_sum: 1, both_are_scaled: 1, broadcast_sum: 1,
            product_used_otherwise: "mul is also a result of the graph", sum_with_alpha: "alpha is 2",
            product_of_tensors: "scale is the node", sum_of_two_dtypes: "floating-point tensors of one dtype",
            integers: "floating-point tensors of one dtype",
        },
    ),
    "add_rms_norm_bias_quant": (
        NORM,
        {
            biased: 1, biased_by_default: 1, biased_by_a_row: "beta must be a torch.float16 vector",
            biased_twice: "alpha is 2", biased_and_used: "add is also a result of the graph",
        },
    ),
}  # fmt: skip
ALL = [(rule, function) for rule, (_, functions) in CASES.items() for function in functions]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("rule", "function"), ALL, ids=lambda value: getattr(value, "__name__", value))
def test_fuses_or_says_why_not(rule: str, function: Callable[..., Any], dynamic: bool) -> None:
    """The expected number of fusions and the same float64 values to the bit, or a reason."""
    specs, functions = CASES[rule]
    expected = functions[function]
    gm = aot_graph(function, *tensors(specs), dynamic=dynamic)
    wide = wide_inputs(gm)
    known = function is not swiglu_to_int4  # no reference for packed outputs
    before = in_float64(gm, wide) if known else []
    report = optimise(gm, fusion_rules={rule: True})
    reasons = " / ".join(miss.reason for miss in report.near_misses(rule))
    assert report.fusions(rule) == (expected if isinstance(expected, int) else 0), report.table()
    if isinstance(expected, str) and not dynamic:
        assert expected in reasons, reasons
    if known and rule != "muls_add":
        assert_same_bits(before, in_float64(gm, wide))


@pytest.mark.parametrize(("rule", "function"), ALL, ids=lambda value: getattr(value, "__name__", value))
def test_eager_and_replayed_agree(rule: str, function: Callable[..., Any]) -> None:
    """On the device, captured once and replayed on other values."""
    if function is swiglu_to_int4:
        pytest.skip("the emulated device has no kernel for packed outputs")
    specs, functions = CASES[rule]
    count = functions[function] if isinstance(functions[function], int) else 0
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="npugraph_ex", options={"fusion_rules": {rule: True}}, fullgraph=True)
    for seed in (1, 2):
        with torch.no_grad():
            expected, actual = (outputs(f(*tensors(specs, seed))) for f in (function, compiled))
        for old, new in zip(expected, actual, strict=True):
            assert_close(old, new, coarsest(specs))
    report = npugraph_ex.last_report()
    assert report is not None
    assert report.fusions(rule) == count
    assert all(record.outcome != "rolled back" for record in report.passes)


@pytest.mark.parametrize("rule", CASES)
def test_off_unless_switched_on(rule: str) -> None:
    """Without the option the graph stays, and the report does not mention the rule."""
    specs, functions = CASES[rule]
    function = next(iter(functions))
    gm = aot_graph(function, *tensors(specs))
    before = targets(gm)
    report = optimise(gm)
    assert targets(gm) == before
    assert rule not in [record.name for record in report.rules]
