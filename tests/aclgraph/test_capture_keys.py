"""When a graph is captured, and why: keys, limits, reasons, options, and what cannot be captured at all."""

from __future__ import annotations

import pytest
import torch
from device_helpers import NPU, check, compiled, random

from npugraph_ex.errors import CaptureError
from npugraph_ex.observe.captures import capture_records, captures_so_far


def test_dynamic_shapes_capture_once_a_size() -> None:
    """A size seen before replays its graph; a new one captures, and the reason says so."""
    graph = compiled(lambda x: x.cumsum(0) * 2, dynamic=True)
    mark = captures_so_far()
    for size in (3, 7, 3, 9, 7, 3):
        x = random(size, 4)
        result = graph(x)
        torch.testing.assert_close(result.cpu(), x.cpu().cumsum(0) * 2)
        del result
    records = capture_records(after=mark)
    assert len(records) == 3
    assert records[0].reason == "the first call"
    assert "new sizes" in records[1].reason


def test_capture_limit_evicts_the_least_recently_used(caplog: pytest.LogCaptureFixture) -> None:
    """At the limit one graph goes for each new one, with one warning, and values stay right."""
    graph = compiled(lambda x: x * 3, dynamic=True, capture_limit=2)
    mark = captures_so_far()
    for size in (3, 5, 3, 7, 3, 5):
        x = random(size)
        result = graph(x)
        torch.testing.assert_close(result.cpu(), x.cpu() * 3)
        del result
    assert len(capture_records(after=mark)) == 4  # 3, 5, 7 (drops 5), 5 again; 3 was used recently
    assert [record.message for record in caplog.records if "capture_limit=2" in record.message].__len__() == 1


def test_capture_limit_of_one() -> None:
    """Even the only graph can be replaced: its pool outlives it."""
    graph = compiled(lambda x: x * 3 + 1, dynamic=True, capture_limit=1)
    for size in (3, 5, 7, 3):
        x = random(size)
        torch.testing.assert_close(graph(x).cpu(), x.cpu() * 3 + 1)


def test_a_moved_parameter_is_named_as_the_reason() -> None:
    """Replacing a weight's memory after capture recaptures, and the record names the weight."""
    model = torch.nn.Linear(4, 4, device=NPU)
    graph = compiled(model)
    x = random(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)
        model.weight.data = torch.ones(4, 4, device=NPU)
        torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)
    assert capture_records()[-1].reason == "a new address of L['fn'].weight"


def test_updating_a_parameter_in_place_needs_no_capture() -> None:
    """Parameters are read where they are."""
    model = torch.nn.Linear(4, 4, device=NPU)
    graph = compiled(model)
    x = random(2, 4)
    with torch.no_grad():
        graph(x)
        mark = captures_so_far()
        model.weight.mul_(2)
        torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)
    assert not capture_records(after=mark)


def test_clone_input_false_adopts_the_first_callers_tensors() -> None:
    """Without buffers of its own the graph copies later inputs into the first caller's tensor."""
    graph = compiled(lambda x: x + 1, clone_input=False)
    first, second = torch.zeros(4, device=NPU), torch.ones(4, device=NPU)
    graph(first)
    assert graph(second).cpu().tolist() == [2.0] * 4
    assert first.cpu().tolist() == [1.0] * 4


def test_force_eager_captures_nothing() -> None:
    """`force_eager=True` runs the optimised graph operator by operator."""
    mark = captures_so_far()
    check(lambda x: x * 2 + 1, [(random(4),) for _ in range(3)], force_eager=True)
    assert not capture_records(after=mark)


def test_graph_with_a_host_read_runs_uncaptured_and_says_where(caplog: pytest.LogCaptureFixture) -> None:
    """An operation that capture forbids is found before capture and named with its line."""
    mark = captures_so_far()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x > 0).sum(0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = compiled(function)
        for _ in range(3):
            x = random(6)
            torch.testing.assert_close(graph(x), function(x))
    assert not capture_records(after=mark)
    assert any("nonzero" in record.message and "test_capture_keys.py" in record.message for record in caplog.records)


def test_a_cpu_tensor_among_the_inputs_is_not_frozen() -> None:
    """A host tensor would be read at capture only, so such a graph is not captured."""
    graph = compiled(lambda x, scale: x * scale)
    for value in (2.0, 3.0, 5.0):
        x = random(4)
        torch.testing.assert_close(graph(x, torch.tensor(value)).cpu(), x.cpu() * value)


def test_a_refused_capture_names_the_cause() -> None:
    """What the device refuses during capture surfaces as CaptureError with advice, and the device stays usable."""

    @torch.library.custom_op("npugraph_ex_tests::reads_host", mutates_args=())
    def reads_host(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum().item()

    reads_host.register_fake(torch.empty_like)
    graph = compiled(lambda x: torch.ops.npugraph_ex_tests.reads_host(x) * 2)
    with pytest.raises(CaptureError, match="force_eager"):
        graph(random(4))
    assert random(4).sum().isfinite().item()


def test_invalidate_captures_anew() -> None:
    """`invalidate()` drops what was captured; the next call captures and says why."""
    from npugraph_ex.aclgraph.compiled import invalidate

    graph = compiled(lambda x: x + 1)
    graph(random(3))
    assert invalidate() >= 1
    mark = captures_so_far()
    x = random(3)
    torch.testing.assert_close(graph(x).cpu(), x.cpu() + 1)
    assert [record.reason for record in capture_records(after=mark)] == [
        "invalidate() having dropped the earlier graphs"
    ]


def test_a_tensor_subclass_is_refused_by_name() -> None:
    """An AOT graph handed over with a subclass among its inputs is refused, naming the input and the type."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.testing._internal.two_tensor import TwoTensor

    from npugraph_ex import compile_fx

    gm = make_fx(lambda x: [x + 1])(random(3))
    with pytest.raises(CaptureError, match="x_1 is a TwoTensor"):
        compile_fx(gm, [TwoTensor(random(3), random(3))])


def test_frozen_parameters_are_not_compared() -> None:
    """With `frozen_parameter=True` a moved weight is not noticed: that is what the option gives up."""
    model = torch.nn.Linear(4, 4, device=NPU)
    graph = compiled(model, frozen_parameter=True)
    x = random(2, 4)
    with torch.no_grad():
        old = graph(x).cpu()
        model.weight.data = torch.ones(4, 4, device=NPU)
        torch.testing.assert_close(graph(x).cpu(), old, rtol=0, atol=0)


def test_joining_the_callers_pool() -> None:
    """`use_graph_pool` captures into the pool that the caller names."""
    pool = torch.npu.graph_pool_handle()
    check(lambda x: (x @ x).relu() + 1, [(random(8, 8),) for _ in range(4)], use_graph_pool=pool)
    check(lambda x: (x @ x).exp() - 1, [(random(8, 8),) for _ in range(4)], use_graph_pool=pool)
