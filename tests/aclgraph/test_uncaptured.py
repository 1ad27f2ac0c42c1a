"""What cannot be captured runs operator by operator, with eager's values, and a warning that names the place; or it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from device_helpers import NPU, check, compiled, random
from torch._dynamo.exc import BackendCompilerFailed

from npugraph_ex import invalidate
from npugraph_ex.errors import CaptureError
from npugraph_ex.frontend.entry.explain import Watch
from npugraph_ex.report.captures import capture_records, captures_so_far


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
    assert any("nonzero" in record.message and "test_uncaptured.py" in record.message for record in caplog.records)


def test_a_cpu_tensor_among_the_inputs_is_not_frozen() -> None:
    """A host tensor would be read at capture only, so such a graph is not captured."""
    graph = compiled(lambda x, scale: x * scale)
    for value in (2.0, 3.0, 5.0):
        x = random(4)
        torch.testing.assert_close(graph(x, torch.tensor(value)).cpu(), x.cpu() * value)


def _resized_and_counted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    resized = torch.nn.functional.interpolate(x, scale_factor=2)
    return resized, torch.arange(x.shape[0]).sum().to(x.device)


ON_THE_HOST: dict[str, tuple[Callable[..., object], str]] = {
    "what follows": (_resized_and_counted, "arange"),
    "returned": (lambda x: (x * torch.tensor(x.shape[0] + 1), torch.tensor(x.shape[0])), "scalar_tensor_1"),
    "random": (lambda x: x * torch.rand(()), "rand"),
    "copied to the device": (lambda x: x + torch.tensor(x.shape[0]).to(x.device), "scalar_tensor"),
}


@pytest.mark.slow
def test_obstacles_alike_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A model has one for each layer: the message counts them, and the report names each."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x + torch.rand(())
        return x * torch.rand(())

    compiled(function)(random(4))
    (warning,) = [record.getMessage() for record in caplog.records if "operator by operator" in record.getMessage()]
    first = function.__code__.co_firstlineno + 2
    layers, last = (line for line in warning.splitlines() if "rand" in line)
    assert re.search(rf"^  rand: .*test_uncaptured\.py:{first}.*\), and 4 more like it$", layers)
    assert re.search(rf"^  rand_\w+: .*test_uncaptured\.py:{first + 1}.*\)$", last)
    assert len(Watch(from_start=True).explanation().graphs[-1].graph.obstacles) == 6


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_a_tensor_on_the_host_has_one_line(name: str) -> None:
    """The line names where it is made; what is computed from it, and scalars that a capture may have, are not named."""
    function, wanted = ON_THE_HOST[name]
    with pytest.raises(BackendCompilerFailed) as refused:
        compiled(function, dynamic=True, require_capture=True)(random(2, 3, 4, 4))
    (line,) = re.findall(
        r"^  (\w+): a tensor on device 'cpu' .*test_uncaptured\.py:\d+\)$", str(refused.value), re.MULTILINE
    )
    assert line.startswith(wanted)
    assert str(refused.value).count("on device 'cpu'") == 1


def test_a_scalar_of_the_caller_that_is_copied_to_the_device_is_named() -> None:
    """Before the capture, which the device would refuse; the line is that of the scalar, with its name."""
    with pytest.raises(
        BackendCompilerFailed, match=r"\n  scalar: a tensor on device 'cpu' .*test_uncaptured\.py:\d+\)"
    ):
        compiled(lambda x, scalar: x * scalar.to(x.device), require_capture=True)(random(2, 3), torch.tensor(0.5))


def test_a_returned_number_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A number that is computed from a changing float leaves the graph as a tensor on the CPU, which the user never made."""

    def scaled(x: torch.Tensor, rate: float) -> tuple[torch.Tensor, float]:
        return x * 2, rate + 1

    compiled = torch.compile(scaled, backend="npugraph_ex")
    x = torch.randn(4, 8, device="npu")
    for rate in (2.0, 2.5):
        result, number = compiled(x, rate)
        assert torch.equal(result, x * 2)
        assert number == rate + 1
    assert re.search(r"holds a number that the graph returns.* changing Python float", caplog.text), caplog.text


def test_a_float_of_a_training_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Torch makes a tensor on the CPU of a float that changes: the message names the argument, and values are right."""

    def step(x: torch.Tensor, rate: float) -> torch.Tensor:
        return x.clamp(-rate, rate) * rate

    graph = compiled(step, dynamic=None)
    for rate in (0.2, 0.1, 0.3):
        leaf = random(7).requires_grad_()
        for expected, got in zip(
            *(torch.autograd.grad(way(leaf, rate).sum(), leaf) for way in (step, graph)), strict=True
        ):
            assert torch.equal(got, expected)
    assert re.search(r"\n  rate: .* a Python float ", caplog.text), caplog.text


def test_what_fails_in_eager_mode_too_is_not_blamed_on_the_capture(caplog: pytest.LogCaptureFixture) -> None:
    """A product of two dtypes is refused in a capture as it is outside: the error says it, and the graph does not give up."""
    graph = compiled(torch.mm)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="same dtype"):
            graph(random(4, 4), random(4, 4).half())
    x = random(4, 4)
    assert torch.equal(graph(x, x), torch.mm(x, x))
    assert not caplog.records


@pytest.fixture(scope="module")
def reads_host() -> Callable[[torch.Tensor], torch.Tensor]:
    """A custom operator that reads from the device: what nobody can see before the device refuses it."""

    @torch.library.custom_op("npugraph_ex_tests::reads_host", mutates_args=())
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum().item()

    function.register_fake(torch.empty_like)
    return torch.ops.npugraph_ex_tests.reads_host


def test_what_the_device_refuses_runs_uncaptured(
    reads_host: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """The values are eager's, inputs are written once, and the warning names the operator and its line."""
    mark = captures_so_far()

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return reads_host(x * 2) * 2

    check(function, [(random(4),) for _ in range(4)])
    assert not capture_records(after=mark)
    (warning,) = [record.getMessage() for record in caplog.records if "operator by operator" in record.getMessage()]
    line = function.__code__.co_firstlineno + 2
    assert "npugraph_ex_tests.reads_host" in warning
    assert f"test_uncaptured.py:{line}" in warning
    assert Watch(from_start=True).explanation().graphs[-1].graph.fate == "not capturable"


def test_a_refused_graph_may_be_tried_again(reads_host: Callable[..., torch.Tensor]) -> None:
    """After `invalidate()` the next call captures what can now be captured."""
    refuse = True

    @torch.library.custom_op("npugraph_ex_tests::reads_at_first", mutates_args=())
    def fickle(x: torch.Tensor) -> torch.Tensor:
        return x + (x.sum().item() if refuse else 1)

    fickle.register_fake(torch.empty_like)
    graph, mark = compiled(lambda x: torch.ops.npugraph_ex_tests.reads_at_first(x) * 2), captures_so_far()
    for _ in range(3):
        x = random(4)
        torch.testing.assert_close(graph(x), (x + x.sum()) * 2)
    refuse = False
    assert not capture_records(after=mark)
    invalidate()
    for _ in range(3):
        x = random(4)
        torch.testing.assert_close(graph(x), (x + 1) * 2)
    assert capture_records(after=mark)
    del reads_host


def test_memory_kept_from_eager_work_stops_no_capture() -> None:
    """A capture cannot use what torch_npu keeps for eager work, so where memory is short that is given back first."""
    mebibyte, x = 2**20, random(1024)
    graph, mark = compiled(lambda x: ((x.repeat(4096) + 1).exp() * 2).sum()), captures_so_far()
    torch.npu.empty_cache()
    limit, total = torch.npu.memory_reserved() + 80 * mebibyte, torch.npu.get_device_properties(0).total_memory
    torch.npu.set_per_process_memory_fraction(limit / total)
    try:
        kept = torch.empty(64 * mebibyte, dtype=torch.uint8, device=NPU)
        del kept
        result = graph(x)
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)
    assert capture_records(after=mark)
    torch.testing.assert_close(result, ((x.repeat(4096) + 1).exp() * 2).sum())


def test_require_capture_raises(reads_host: Callable[..., torch.Tensor]) -> None:
    """Who asked for capture only gets an error, from what is found before capture and from what the device refuses."""
    with pytest.raises(CaptureError, match=r"refused to capture .*reads_host.* at .*test_uncaptured.py:\d+"):
        compiled(lambda x: reads_host(x) * 2, require_capture=True)(random(4))
    grouped_mm = torch.library.custom_op(
        "npugraph_ex_tests::grouped_mm", lambda x: x + x.sum().item(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    grouped_mm.register_fake(torch.empty_like)
    with pytest.raises(CaptureError, match=r"grouped_mm.* at .*set_experts_implementation\("):
        compiled(lambda x: grouped_mm(x) * 2, require_capture=True)(random(4))
    with pytest.raises(Exception, match=r"option require_capture is on.*\n  host: a tensor on device 'cpu'"):
        compiled(lambda x, host: (x * 2, host + 1), require_capture=True)(random(4), torch.ones(3))
    assert random(4).sum().isfinite().item()


@pytest.mark.slow
def test_control_flow_runs_uncaptured(caplog: pytest.LogCaptureFixture) -> None:
    """`torch.cond` and `while_loop` decide on the host; the graph runs as in eager mode, both ways."""

    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))

    def loop(x: torch.Tensor) -> torch.Tensor:
        return torch.while_loop(lambda x: x.sum() < 100, lambda x: (x + 10,), (x,))[0]

    for function, name in ((branch, "cond"), (loop, "while_loop")):
        caplog.clear()
        check(function, [(torch.full((3,), value, device=NPU),) for value in (2.0, -2.0, 3.0, -1.0)])
        (warning,) = [record.getMessage() for record in caplog.records if "operator by operator" in record.getMessage()]
        assert name in warning
        assert f"test_uncaptured.py:{function.__code__.co_firstlineno + 1}" in warning


def test_a_tensor_subclass_is_refused_by_name() -> None:
    """An AOT graph handed over with a subclass among its inputs is refused, naming the input and the type.

    Whether or not torch can take it apart; a parameter is plain memory and no such subclass.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.testing._internal.logging_tensor import LoggingTensor
    from torch.testing._internal.two_tensor import TwoTensor

    from npugraph_ex import compile_fx

    gm = make_fx(lambda x: [x + 1])(random(3))
    for value in (TwoTensor(random(3), random(3)), LoggingTensor(random(3))):
        with pytest.raises(CaptureError, match=f"x_1 is a {type(value).__name__}"):
            compile_fx(gm, [value])
    weight = torch.nn.Parameter(random(3), requires_grad=False)
    (result,) = compile_fx(gm, [weight])(weight)
    torch.testing.assert_close(result.cpu(), weight.cpu() + 1)


def test_indexing_by_numbers_is_captured_and_by_a_mask_is_not() -> None:
    """The operator is the same; only a mask makes the host wait for how many elements there are."""
    table, rows = random(8, 4), torch.tensor([3, 1, 3]).to("npu")
    by_number = compiled(lambda x, i: x[i] * 2, dynamic=False)
    mark = captures_so_far()
    for shift in range(3):
        assert torch.equal(by_number(table, rows + shift).cpu(), table.cpu()[rows.cpu() + shift] * 2)
    assert len(capture_records(after=mark)) == 1

    def by_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x[mask] * 2

    from npugraph_ex import compile_fx

    mask = table[:, 0] > 0
    gm = torch.fx.experimental.proxy_tensor.make_fx(by_mask, tracing_mode="fake", _allow_non_fake_inputs=True)(
        table, mask
    )
    graph = compile_fx(gm, [table, mask])
    for rows_wanted in (mask, ~mask):
        (found,) = graph(table, rows_wanted)
        assert torch.equal(found.cpu(), table.cpu()[rows_wanted.cpu()] * 2)


def test_a_scalar_that_comes_back_is_no_constant() -> None:
    """A graph that returns a scalar of the host runs operator by operator, and the caller gets the value of the call."""
    from npugraph_ex import compile_fx

    def program(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, scale + 1

    example, scale = random(4), torch.tensor(2.0)
    graph = compile_fx(torch.fx.experimental.proxy_tensor.make_fx(program, tracing_mode="fake")(example, scale))
    for number in (2.0, 3.0, 2.0):
        product, more = graph(example, torch.tensor(number))
        assert torch.equal(product.cpu(), example.cpu() * number)
        assert more.item() == number + 1
        more.add_(100)  # the caller's own; the next call with this number must not see it
        del more


def test_memory_given_to_an_input_is_given_at_each_call() -> None:
    """`x.data = y` changes the tensor itself, on the host: a replay left the argument as it was, once an address came back."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data = y * 2
        return x + 1

    graph = compiled(program)
    for step in range(5):
        x, y = torch.arange(4.0, device=NPU), torch.full((4,), step + 2.0, device=NPU)
        got = graph(x, y)
        assert (x.tolist(), got.tolist()) == ([2.0 * step + 4] * 4, [2.0 * step + 5] * 4)


@pytest.mark.slow
def test_nested_tensors_run_operator_by_operator() -> None:
    """Their lengths are tensors of the CPU, and one of their sizes stands for several numbers."""
    fast = torch.compile(lambda x: x * 2 + 1, backend="npugraph_ex")
    for rows in ((2, 4), (3, 1), (5, 2)):
        parts = [random(count, 3) for count in rows]
        with torch.no_grad():
            found = fast(torch.nested.as_nested_tensor(parts, layout=torch.jagged))
        for mine, part in zip(found.unbind(), parts, strict=True):
            torch.testing.assert_close(mine.cpu(), (part * 2 + 1).cpu(), rtol=0, atol=0)
