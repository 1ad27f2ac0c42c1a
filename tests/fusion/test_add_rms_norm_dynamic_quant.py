"""The default rule npu_add_rms_norm + npu_dynamic_quant: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_cases import Edit, check_on_device, check_refused, limited_cores, on_stream, written_before
from fx_helpers import aot_graph, evaluate, optimise, targets

RULE = "add_rms_norm_dynamic_quant"
FUSED = "npu_add_rms_norm_dynamic_quant"

norm = torch.ops.npu.npu_add_rms_norm
quant = torch.ops.npu.npu_dynamic_quant


def plain(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    return (*quant(y), x)


def smoothed(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    return (*quant(y, smooth_scales=s), x)


def written_epsilon(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g, 1e-5)
    return (*quant(y, smooth_scales=s), x)


def default_epsilon_written(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g, epsilon=1e-6)
    return (*quant(y), x)


def no_residual(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g, 1e-4)[0], smooth_scales=s)


def scale_unused(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0])[0]


def only_scale(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0])[1]


def defaults_spelled_out(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0], smooth_scales=None, group_index=None, dst_type=torch.int8, quant_mode="pertoken")


def residual_used_early(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    early = x * 2
    return (*quant(y), early)


def smooth_defined_late(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    early = x + 1
    return (*quant(y, smooth_scales=s * 2), early)


def same_tensor_twice(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, a, g)
    return (*quant(y, smooth_scales=g), x)


def twice_in_a_row(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    q, t = quant(y)
    y2, _, x2 = norm(x, b, g, 1e-5)
    return (q, t, *quant(y2, smooth_scales=s), x2)


def residual_written_after(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    q, t = quant(y)
    a.copy_(x)
    return q, t


def flattened(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.unsqueeze(0), b.unsqueeze(0), g)
    q, t = quant(y.flatten(0, 1))
    return q, t.view(-1, 1), x


def flattened_by_view(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, -1), b.view(2, 2, -1), g, 1e-5)
    q, t = quant(y.view(-1, y.size(-1)))
    return q, t.view(-1, 1), x


def flattened_and_smoothed(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, _ = norm(a.unsqueeze(1), b.unsqueeze(1), g)
    return quant(y.flatten(0, 1), smooth_scales=s)


def partly_flattened(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, 1, -1), b.view(2, 2, 1, -1), g)
    q, t = quant(y.flatten(0, 1))
    return q, t.view(-1, 1), x


MUST_FUSE: dict[Callable[..., Any], int] = {
    plain: 1,
    smoothed: 1,
    written_epsilon: 1,
    default_epsilon_written: 1,
    no_residual: 1,
    scale_unused: 1,
    only_scale: 1,
    defaults_spelled_out: 1,
    residual_used_early: 1,
    smooth_defined_late: 1,
    same_tensor_twice: 1,
    twice_in_a_row: 2,
    residual_written_after: 1,
    flattened: 1,
    flattened_by_view: 1,
    flattened_and_smoothed: 1,
    partly_flattened: 1,
}


def norm_used_elsewhere(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, _ = norm(a, b, g)
    return (*quant(y), y * 2)


def norm_is_a_result(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, _ = norm(a, b, g)
    return (*quant(y), y)


def rstd_used(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, rstd, _ = norm(a, b, g)
    return (*quant(y), rstd)


def int4_output(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0], dst_type=torch.quint4x2)


def per_tensor(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0], quant_mode="pertensor")


def grouped(a: Any, b: Any, g: Any, s: Any) -> Any:
    index = torch.full((1,), a.shape[0], dtype=torch.int32, device=a.device)
    return quant(norm(a, b, g)[0], smooth_scales=s.unsqueeze(0), group_index=index)


def custom_maximum(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0], dst_type_max=15.0)


def quantises_the_residual(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    return (*quant(x), y)


def smooth_depends_on_residual(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quant(y, smooth_scales=x[0] * 2)


def something_in_between(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0] * 2)


def permuted_layout(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.unsqueeze(0).repeat(2, 1, 1).transpose(0, 1), b.unsqueeze(1).repeat(1, 2, 1), g)
    return (*quant(y), x)


def two_dimensional_gamma(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a.unsqueeze(0), b.unsqueeze(0), g.expand(a.shape))[0])


def flattened_otherwise(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, -1), b.view(2, 2, -1), g)
    return (*quant(y.view(8, -1)), x)


def flattened_at_the_end(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, -1), b.view(2, 2, -1), g)
    return (*quant(y.flatten(1, 2)), x)


def flat_norm_used_elsewhere(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, -1), b.view(2, 2, -1), g)
    flat = y.flatten(0, 1)
    return (*quant(flat), flat * 2, x)


MUST_NOT_FUSE: dict[Callable[..., Any], str] = {
    norm_used_elsewhere: "output 0 of npu_add_rms_norm is also used by mul",
    norm_is_a_result: "output 0 of npu_add_rms_norm is also a result of the graph",
    rstd_used: "output 1 of npu_add_rms_norm is also a result of the graph",
    int4_output: "dst_type is 16",
    per_tensor: "quant_mode is pertensor",
    grouped: "group_index is full",
    custom_maximum: "dst_type_max is 15.0",
    smooth_depends_on_residual: "depends on a replaced output",
    permuted_layout: "would have strides",
    two_dimensional_gamma: "gamma must be",
    quantises_the_residual: "output 2 of npu_add_rms_norm, the pattern has output 0",
    something_in_between: "",
    flattened_otherwise: "size is (8, 32), the pattern has (4, 64)",
    flattened_at_the_end: "size is (2, 128), the pattern has (4, 64)",
    flat_norm_used_elsewhere: "view_2 is also used by mul",
}


def inputs(dtype: torch.dtype, device: str, shape: tuple[int, ...] = (4, 64)) -> list[torch.Tensor]:
    """Two rows, gamma and a smoothing vector, none of them trivial."""
    generator = torch.Generator().manual_seed(1)
    shapes = (shape, shape, shape[-1:], shape[-1:])
    return [(torch.randn(size, generator=generator) + 0.25).to(dtype).to(device) for size in shapes]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", MUST_FUSE, ids=lambda f: f.__name__)
def test_fuses_and_computes_the_same(function: Callable[..., Any], dynamic: bool) -> None:
    """The expected number of fusions; in float64, where nothing is rounded in between, equal to the bit."""
    gm = aot_graph(function, *inputs(torch.float16, "npu"), dynamic=dynamic)
    wide = inputs(torch.float64, "cpu")
    symbols = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    sizes = {str(s): 4 for s in symbols if isinstance(s, torch.SymInt)}
    values = by_shape(gm, wide, sizes)
    before = evaluate(gm, *[v.clone() if isinstance(v, torch.Tensor) else v for v in values])
    report = optimise(gm)
    assert report.fusions(RULE) == MUST_FUSE[function], report.table()
    assert report.near_misses(RULE) == ()
    assert targets(gm).count(FUSED) == MUST_FUSE[function]
    assert "npu_dynamic_quant" not in targets(gm)
    after = evaluate(gm, *[v.clone() if isinstance(v, torch.Tensor) else v for v in values])
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


def by_shape(gm: Any, tensors: list[torch.Tensor], sizes: dict[str, int]) -> list[Any]:
    """Inputs in the order of the placeholders, which Dynamo chooses by first use."""
    rows = [t for t in tensors if t.dim() == 2]
    vectors = [t for t in tensors if t.dim() == 1]
    chosen: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            chosen.append({"4": 4, "64": 64}.get(str(value.node.hint), sizes[str(value)]))
        else:
            chosen.append((rows if value.dim() == 2 else vectors).pop(0))
    return chosen


@pytest.mark.parametrize("function", MUST_NOT_FUSE, ids=lambda f: f.__name__)
def test_is_left_alone_with_a_reason(function: Callable[..., Any]) -> None:
    """No fusion, and the report says why wherever the graph looks like the pattern."""
    gm = aot_graph(function, *inputs(torch.float16, "npu"))
    before = targets(gm)
    report = optimise(gm)
    assert report.fusions() == 0
    assert targets(gm) == before
    reasons = " / ".join(miss.reason for miss in report.near_misses(RULE))
    assert MUST_NOT_FUSE[function] in reasons
    assert bool(reasons) == bool(MUST_NOT_FUSE[function])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", MUST_FUSE, ids=lambda f: f.__name__)
def test_eager_fused_and_replayed_agree(function: Callable[..., Any], dynamic: bool) -> None:
    """On the device, in float16: eager mode, the fused graph, and its replay on other values."""
    check_on_device(function, SPECS, dynamic=dynamic, rule=RULE, count=MUST_FUSE[function])


SPECS = [((4, 64), torch.float16)] * 2 + [((64,), torch.float16)] * 2
EDITS: dict[str, tuple[Edit, str]] = {
    "other stream": (on_stream("npu_dynamic_quant"), "has 'side'"),
    "core limit": (limited_cores("npu_dynamic_quant"), "core_limit"),
    "input written in between": (written_before("npu_dynamic_quant"), "writes arg0_1 between the matched operators"),
}


@pytest.mark.parametrize("name", EDITS)
def test_scopes_and_writes_keep_operators_apart(name: str) -> None:
    """Two streams, two core limits, a write in between: the operators stay as they are."""
    edit, reason = EDITS[name]
    check_refused(RULE, plain, SPECS, reason, edit=edit)


@pytest.mark.parametrize(("dtype", "fusions"), [(torch.float16, 1), (torch.bfloat16, 1), (torch.float32, 0)], ids=str)
def test_only_documented_dtypes_fuse(dtype: torch.dtype, fusions: int) -> None:
    """float16 and bfloat16 do; float32 is a near-miss that names the dtype."""
    report = optimise(aot_graph(plain, *inputs(dtype, "npu")))
    assert report.fusions(RULE) == fusions
    assert all("torch.float32" in miss.reason for miss in report.near_misses())


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (2, 1, 3, 16), (1, 16), (5, 2)], ids=str)
def test_every_documented_rank_fuses(shape: tuple[int, ...]) -> None:
    """Ranks 2 to 4 and sizes of one."""
    assert optimise(aot_graph(smoothed, *inputs(torch.float16, "npu", shape))).fusions(RULE) == 1


def test_empty_tensors_do_not_fuse() -> None:
    """The fused operator is documented not to take them."""
    report = optimise(aot_graph(plain, *inputs(torch.float16, "npu", (0, 16))))
    assert report.fusions() == 0
    assert "empty" in report.near_misses()[0].reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_differs_by_one_step_at_most(dtype: torch.dtype) -> None:
    """The fused operator rounds less; int8 values move by at most one, the residual not at all."""
    gm = aot_graph(smoothed, *inputs(dtype, "npu"))
    values = by_shape(gm, inputs(dtype, "cpu"), {})
    before = evaluate(gm, *values)
    assert optimise(gm).fusions() == 1
    after = evaluate(gm, *values)
    for old, new in zip(before, after, strict=True):
        if old.dtype == torch.int8:
            assert int((old.int() - new.int()).abs().max()) <= 1
            assert float((old == new).float().mean()) > 0.75
        else:
            torch.testing.assert_close(new, old, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_option_turns_fusion_off() -> None:
    """``pattern_fusion_pass=False`` leaves the graph's operators."""
    gm = aot_graph(plain, *inputs(torch.float16, "npu"))
    report = optimise(gm, pattern_fusion_pass=False)
    assert report.fusions() == 0
    assert FUSED not in targets(gm)


def test_near_miss_names_the_source_line() -> None:
    """The user's file and line, not a node number alone."""
    report = optimise(aot_graph(norm_used_elsewhere, *inputs(torch.float16, "npu")))
    (miss,) = report.near_misses()
    assert miss.node == "npu_dynamic_quant"
    line = norm_used_elsewhere.__code__.co_firstlineno + 2
    assert miss.source == f"{__file__}:{line}"
