"""Which operators static kernels are compiled for, on what shapes, with a stand-in for CANN's compiler."""

from __future__ import annotations

from pathlib import Path

import device_helpers
import pytest
import torch
from static_kernel_runs import model, run, warnings
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.aclgraph.static_kernels.calls import OperatorCall, operator_calls
from npugraph_ex.aclgraph.static_kernels.describe import describe
from npugraph_ex.graph.streams.ops import ENTERS, EXITS
from npugraph_ex_conformance.stand_in_cann import StandInCann


def test_each_operator_is_described_once_and_values_are_eagers(
    cann: StandInCann, caplog: pytest.LogCaptureFixture
) -> None:
    """Three calls: the compiler gets each operator of the graph on its shapes, once, and the results are eager's."""
    run(3, 3, 3)
    assert cann.compiled() == [{("aten_matmul_default", ((3, 4), (4, 4))), ("aten_add__Tensor", ((3, 4), (3, 4)))}]
    assert warnings(caplog) == []
    (call,) = cann.calls()
    assert call[call.index("-v") + 1] == torch.npu.get_device_name().split()[0]
    assert int(call[call.index("-j") + 1]) >= 1


@pytest.mark.slow
def test_new_sizes_compile_only_what_is_new(cann: StandInCann) -> None:
    """Each captured size gets kernels of its own, of the sizes of that call; what is compiled already is not again."""
    run(3, 5, 3, 5, dynamic=True)
    of_size = [{shapes[0][0] for _, shapes in compiled} for compiled in cann.compiled()]
    assert of_size == [{3}, {5}]
    run(5, 6)
    assert [{shapes[0][0] for _, shapes in compiled} for compiled in cann.compiled()] == [{3}, {5}, {6}]


def test_the_forward_runs_once(cann: StandInCann) -> None:
    """An input that is written is written once a call, and an operator of the program's own runs no extra time."""
    seen: list[torch.device] = []

    @torch.library.custom_op("static_kernel_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device)
        return x * 2

    counted.register_fake(torch.empty_like)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return counted(x) + x

    def calls(**options: object) -> int:
        seen.clear()
        x = torch.zeros(3, device="npu")
        graph = device_helpers.compiled(step, **options)
        for number in range(1, 4):
            torch.testing.assert_close(graph(x).cpu(), torch.full((3,), 3.0 * number), rtol=0, atol=0)
            torch.testing.assert_close(x.cpu(), torch.full((3,), float(number)), rtol=0, atol=0)
        return len(seen)

    for how in ({}, {"force_eager": True}):
        without = calls(**how)
        assert calls(static_kernel_compile=True, **how) == without
    assert {shapes[0] for compiled in cann.compiled() for _, shapes in compiled} == {(3,)}


def test_random_numbers_go_on_as_without(cann: StandInCann) -> None:
    """The generator is where it would be: nothing random runs to be described."""

    def noisy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x @ w) + x

    results = []
    for options in ({}, {"static_kernel_compile": True}):
        torch.npu.manual_seed(7)
        x = torch.ones(3, 4, device="npu")
        results.append(device_helpers.compiled(noisy, **options)(x, torch.ones(4, 4, device="npu")).cpu())
    assert torch.equal(*results)
    assert {name for name, _ in cann.compiled()[0]} == {"aten_matmul_default", "aten_add__Tensor"}


def test_an_operator_that_draws_untagged_leaves_the_generator(cann: StandInCann, tmp_path: Path) -> None:
    """Not every operator of torch_npu that draws random numbers has the tag for it."""

    @torch.library.custom_op("static_kernel_test::drawing", mutates_args=())
    def drawing(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    drawing.register_fake(torch.empty_like)
    torch.npu.manual_seed(3)
    expected = torch.rand(4, device="npu").tolist()
    torch.npu.manual_seed(3)
    with FakeTensorMode():
        value = torch.empty(4, device="npu")
    describe([OperatorCall(torch.ops.static_kernel_test.drawing.default, (value,), {}, ())], tmp_path)
    assert torch.rand(4, device="npu").tolist() == expected


def test_a_call_knows_its_limits_and_its_level() -> None:
    """CANN may choose another kernel in a scope; an inner one keeps what the outer one says, streams do not matter."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    graph.call_function(ENTERS[0], (["_op_aicore_num", "_op_vectorcore_num"], ["4", "8"]))
    value = graph.call_function(torch.ops.aten.add.Tensor, (value, 1))
    graph.call_function(ENTERS[0], (["_deterministic_level", "_user_stream_label"], ["1", "side"]))
    value = graph.call_function(torch.ops.aten.mul.Tensor, (value, 2))
    for _ in range(2):
        graph.call_function(EXITS[0])
    graph.output((graph.call_function(torch.ops.aten.sub.Tensor, (value, 1)),))
    calls = operator_calls(fx.GraphModule({}, graph), [torch.ones(2, device="npu")])
    limits = {"_op_aicore_num": "4", "_op_vectorcore_num": "8"}
    assert [dict(call.scope) for call in calls] == [limits, {**limits, "_deterministic_level": "1"}, {}]


def test_collectives_are_not_described() -> None:
    """One process alone would wait for its peers for ever."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.ops.npu.npu_mm_all_reduce_base.default, (x, x, "group"))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (both, 1)),))
    calls = operator_calls(fx.GraphModule({}, graph), [torch.ones(2, 2, device="npu")])
    assert [call.target for call in calls] == [torch.ops.aten.add.Tensor]


def test_vllms_sizes_are_compiled_and_no_others(cann: StandInCann) -> None:
    """Op by op, as vLLM runs it: the first size decides, and only those of its list get kernels."""
    run(3, 5, 6, 5, dynamic=True, force_eager=True, _vllm_aclnn_static_kernel_sym_range=[5, 8])
    assert [{shapes[0][0] for _, shapes in compiled} for compiled in cann.compiled()] == [{5}]


def test_another_size_than_the_first_may_decide(cann: StandInCann) -> None:
    """By vLLM's index, which TorchAir has as a setting."""
    sizes = {"_vllm_aclnn_static_kernel_sym_range": [5, 8], "_vllm_aclnn_static_kernel_sym_index": 1}
    slow = device_helpers.compiled(torch.matmul, dynamic=True, static_kernel_compile=True, force_eager=True, **sizes)
    for rows, inner in ((5, 6), (6, 5)):
        slow(torch.randn(rows, inner, device="npu"), torch.randn(inner, 7, device="npu"))
    assert [{shapes[0] for _, shapes in compiled} for compiled in cann.compiled()] == [{(6, 5)}]


def test_nothing_is_compiled_under_the_engines_own_capture(cann: StandInCann) -> None:
    """A graph that runs op by op inside somebody's capture only runs: describing would end that capture."""
    x, w = torch.randn(3, 4, device="npu"), torch.randn(4, 4, device="npu")
    fast = device_helpers.compiled(model, force_eager=True)
    fast(x, w)  # compiled, without static kernels
    slow = device_helpers.compiled(model, force_eager=True, static_kernel_compile=True)
    captured = torch.npu.NPUGraph()
    with torch.npu.graph(captured):
        result = slow(x, w)
    captured.replay()
    torch.testing.assert_close(result.cpu(), model(x, w).cpu(), rtol=0, atol=0)
    assert cann.calls() == []
    slow(x, w)
    assert len(cann.calls()) == 1
