"""Captured and replayed graphs against eager mode: values, strides, aliasing, mutation, over calls with results kept alive."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from device_helpers import NPU, check, compiled, random

from npugraph_ex.aclgraph import compiled_graph
from npugraph_ex.report.captures import capture_records, captures_so_far


def test_new_values_at_new_addresses() -> None:
    """Each call sees its own inputs, and earlier results stay as they were."""
    check(lambda x, y: (x @ y).relu() + 1, [(random(4, 8), random(8, 3)) for _ in range(6)])


def test_results_dropped_cost_one_capture_and_no_copy() -> None:
    """A caller that drops each result before the next call gets the same memory each time."""
    graph = compiled(lambda x: x * 2 + 1)
    mark = captures_so_far()
    addresses = set()
    for _ in range(5):
        result = graph(random(16))
        addresses.add(result.data_ptr())
        del result
    assert len(addresses) == 1
    assert len(capture_records(after=mark)) == 1


def test_feeding_a_result_back_needs_two_captures_and_no_copy() -> None:
    """`x = f(x)` holds one result while the next is computed; two instances take turns."""
    graph = compiled(lambda x: x * 0.5 + 1)
    mark = captures_so_far()
    x = random(16)
    expected = x.cpu()
    addresses = set()
    for _ in range(8):
        x = graph(x)
        expected = expected * 0.5 + 1
        addresses.add(x.data_ptr())
    torch.testing.assert_close(x.cpu(), expected)
    assert len(addresses) == 2
    assert len(capture_records(after=mark)) == 2


def test_a_kept_view_of_a_result_keeps_its_values() -> None:
    """Dropping the result but keeping a view of it still protects the memory."""
    graph = compiled(lambda x: x + 1)
    first = random(8)
    view = graph(first)[2:5]
    for _ in range(4):
        graph(random(8))
    torch.testing.assert_close(view.cpu(), (first + 1)[2:5].cpu())


def test_a_user_may_change_a_result() -> None:
    """Writing into a result, or changing its metadata, does not reach later calls."""
    graph = compiled(lambda x: (x + 1, x * 2))
    for _ in range(5):
        x = random(4, 4)
        total, product = graph(x)
        torch.testing.assert_close(total.cpu(), x.cpu() + 1)
        torch.testing.assert_close(product.cpu(), x.cpu() * 2)
        total.zero_()
        product.unsqueeze_(0)


def test_clone_output_true_always_copies() -> None:
    """With `clone_output=True` one capture is enough however many results are held."""
    mark = captures_so_far()
    check(lambda x: (x + 1, (x * 3)[1:]), [(random(6),) for _ in range(5)], clone_output=True)
    assert len(capture_records(after=mark)) == 1


def test_clone_output_false_overwrites() -> None:
    """`clone_output=False` promises nothing: the next call overwrites the earlier result."""
    graph = compiled(lambda x: x + 1, clone_output=False)
    first = graph(torch.zeros(4, device=NPU))
    graph(torch.ones(4, device=NPU))
    assert first.cpu().tolist() == [2.0] * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: random(6, 4).t(),
        lambda: random(4, 1).expand(4, 6),
        lambda: random(20).as_strided((4, 6), (3, 1)),
        lambda: random(4, 12)[:, ::2],
        lambda: random(24)[4:].view(4, 5),
        lambda: random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: random(0, 6),
        lambda: random(1, 1),
        lambda: torch.tensor(3.0, device=NPU),
    ],
    ids=["transposed", "expanded", "sliding", "gaps", "offset", "channels-last", "empty", "one", "scalar"],
)
def test_strided_inputs(make: Callable[[], torch.Tensor]) -> None:
    """Copied inputs keep their strides, whatever these are."""
    check(lambda x: (x * 2, x + x.sum()), [(make(),) for _ in range(4)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Every dtype passes through copied inputs and results."""
    check(lambda x: torch.where(x != 0, x, torch.ones_like(x)), [(random(5, 3).to(dtype),) for _ in range(4)])


@pytest.mark.parametrize("size", [(5, 3), (0, 3)], ids=["full", "empty"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_writes_in_every_dtype(dtype: torch.dtype, size: tuple[int, int]) -> None:
    """Inputs of every dtype, without elements too, are written in place, concatenated and assigned to in part."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.copy_(torch.where(x == y, x, y))
        y[:, 1:] = x[:, :1]
        return torch.cat([x, y == x, y]), y

    check(function, [tuple((random(*size) * 2).to(dtype) for _ in "xy") for _ in range(3)])


def test_lazily_conjugated_inputs() -> None:
    """A conjugated view among the inputs, written or only read, is not taken for the bytes it lies in."""

    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(1 + 2j).add_(x)
        return x * 2

    graph = compiled(function)
    for call in range(4):
        x, base = random(4, dtype=torch.complex64) * 1j + 1, random(4, dtype=torch.complex64) * 1j
        twin = base.clone()
        given, state, other = (value.conj() if call < 3 else value for value in (x, base, twin))
        torch.testing.assert_close(graph(given, state), function(given, other), rtol=0, atol=0)
        torch.testing.assert_close(base.cpu(), twin.cpu(), rtol=0, atol=0)


def test_random_numbers_differ_from_call_to_call() -> None:
    """Replays draw new numbers, and the same seed gives the same sequence."""
    graph = compiled(lambda x: x + torch.rand_like(x))
    zero = torch.zeros(64, device=NPU)
    graph(zero)
    torch.manual_seed(5)
    first = [graph(zero).cpu() for _ in range(3)]
    torch.manual_seed(5)
    second = [graph(zero).cpu() for _ in range(3)]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("draw", [torch.rand_like, torch.bernoulli], ids=lambda draw: draw.__name__)
def test_random_numbers_drawn_on_the_host(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A number drawn for a scalar on the CPU is another at every call, and the scalar's key does not stand for it."""
    graph, scalar = compiled(lambda x, scalar: x + draw(scalar)), torch.tensor(0.5)
    zero = torch.zeros(1, device=NPU)
    for function in (graph, lambda x, scalar: x + draw(scalar)):
        torch.manual_seed(5)
        drawn = [function(zero, scalar).item() for _ in range(12)]
        if function is graph:
            expected = drawn
    assert drawn == expected
    assert len(set(drawn)) > 1


def test_inference_mode_and_reset() -> None:
    """Calls under inference_mode, and compilation after a reset, give eager's values."""
    for _ in range(2):
        graph = compiled(lambda x: (x * 2).relu())
        with torch.inference_mode():
            for _ in range(4):
                x = random(5)
                torch.testing.assert_close(graph(x).cpu(), (x.cpu() * 2).relu())


@pytest.mark.slow
def test_training_forward_and_backward() -> None:
    """A graph that needs gradients runs forward captured and gives eager's gradients."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).to(NPU)
    graph = compiled(model)
    for _ in range(4):
        x = random(3, 4)
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        got = torch.autograd.grad(graph(x).square().sum(), list(model.parameters()))
        for want, have in zip(expected, got, strict=True):
            torch.testing.assert_close(have.cpu(), want.cpu())


def test_calls_from_two_threads() -> None:
    """Two threads that share one compiled graph each get their own results.

    `thread_local`, because under the default mode one thread's host read may not meet another thread's capture.
    """
    graph = compiled(lambda x: x * 2 + 1, capture_error_mode="thread_local")
    graph(random(32))

    def work(seed: int) -> bool:
        x = torch.full((32,), float(seed), device=NPU)
        return all(graph(x).cpu().eq(2 * seed + 1).all().item() for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, [3, 4, 5, 6]))


def test_a_thread_that_waits_while_another_gives_the_graph_up() -> None:
    """It runs what the other has put in the graph's place, and does not capture the graph."""
    function = compiled(lambda x: x * 2)
    x = random(4)
    function(x)
    graph = max(compiled_graph._living(), key=lambda one: one.number)
    begun, mark = threading.Event(), captures_so_far()
    asked = graph.plan.numbers

    def numbers(inputs: Sequence[Any]) -> tuple[Any, ...]:  # the last question before the lock
        begun.set()
        return asked(inputs)

    object.__setattr__(graph.plan, "numbers", numbers)
    with ThreadPoolExecutor(1) as pool:
        with graph._lock:
            waiting = pool.submit(function, x)
            assert begun.wait(60)
            graph.invalidate()
            graph._instead = graph._eager
        assert torch.equal(waiting.result().cpu(), x.cpu() * 2)
    assert graph.pin([x]) is None
    assert not capture_records(after=mark)


def test_poisoned_results() -> None:
    """With `clone_output=False`, `poison_results` spoils what the next call is allowed to overwrite, and nothing else."""
    graph = compiled(lambda x: (x + 1, x.int(), x), clone_output=False, poison_results=True)
    first_input = random(4)
    copy = first_input.cpu()
    floats, integers, same = graph(first_input)
    assert floats.isfinite().all().item()
    second = graph(random(4))
    assert floats.isnan().all().item()
    assert integers.eq(torch.iinfo(torch.int32).max).all().item()
    assert torch.equal(same.cpu(), copy)
    assert second[0].isfinite().all().item()


DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
NOT_COPIED = re.compile(r"torch\.(u?int[1-7]|qu?int\w+)")
"""Dtypes of which neither torch nor the device copies a tensor."""


@pytest.mark.parametrize(
    "dtype", sorted((one for one in DTYPES if not NOT_COPIED.fullmatch(str(one))), key=str), ids=str
)
def test_results_of_every_dtype_are_poisoned(dtype: torch.dtype) -> None:
    """Each value that is read late is another one, of all dtypes that the device holds and copies."""
    given = torch.zeros(16, dtype=torch.uint8, device=NPU).view(dtype)
    graph = compiled(torch.clone, clone_output=False, poison_results=True)
    first = graph(given)
    graph(given)
    assert all(map(any, first.view(torch.uint8).reshape(-1, dtype.itemsize).tolist()))
    assert not given.view(torch.uint8).any().item()


def test_poisoned_bools() -> None:
    """Whichever it was, a late reader finds the opposite, also where results share memory."""

    def masks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = x > 0
        return mask, mask[1:], mask.view(torch.uint8), (x < 0).expand(2, -1), x * 2

    graph = compiled(masks, clone_output=False, poison_results=True)
    x = torch.tensor([1.0, -1.0, 2.0], device=NPU)
    *late, doubled = graph(x)
    *right, _ = graph(x)
    assert [value.tolist() for value in late] == [value.logical_not().to(value.dtype).tolist() for value in right]
    assert doubled.isnan().all().item()


def test_results_are_poisoned_by_a_call_of_another_size_but_not_before_they_are_read() -> None:
    """`x = f(x)` is right, also where the graph writes its input; what is kept over the call is not."""
    graph = compiled(lambda x: x.add_(1) * 2, clone_output=False, poison_results=True, dynamic=True)
    first = graph(torch.ones(3, device="npu"))
    second = graph(first)
    assert (first.tolist(), second.tolist()) == ([5.0] * 3, [10.0] * 3)
    last = graph(torch.ones(5, device="npu"))
    assert first.isnan().all().item()
    assert second.isnan().all().item()
    assert last.tolist() == [4.0] * 5


def test_a_result_kept_as_its_storage_alone_stays() -> None:
    """Who holds no tensor but only `result.untyped_storage()` still holds the result."""
    graph = compiled(lambda x: x * 2, dynamic=False)
    kept = [graph(torch.full((4,), float(number), device="npu")).untyped_storage() for number in range(4)]
    seen = [torch.empty(0, device="npu").set_(storage, 0, (4,)) for storage in kept]
    assert [tensor.tolist() for tensor in seen] == [[2.0 * number] * 4 for number in range(4)]
