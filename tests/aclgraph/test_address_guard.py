"""The comparison of addresses that every call begins with, and what a compiled function does when it says no."""

from __future__ import annotations

import pytest
import torch
from device_helpers import compiled, random

from npugraph_ex.aclgraph.address_guard import AddressGuard, LayoutGuard
from npugraph_ex.aclgraph.stable_inputs import MAX_PAUSE, WATCHED_CALLS
from npugraph_ex.report.captures import capture_records, captures_so_far


def test_one_tensor_elsewhere_is_noticed() -> None:
    """Each of the remembered inputs counts, the first and the last, whatever lies between them; others do not."""
    inputs = [random(4), 3, random(4), random(4), random(4)]
    guard = AddressGuard([0, 2, 4], [inputs[position].data_ptr() for position in (0, 2, 4)])
    assert guard.matches(list(inputs))
    for position in (0, 2, 4):
        assert not guard.matches([*inputs[:position], random(4), *inputs[position + 1 :]])
    assert guard.matches([inputs[0], 5, inputs[2], random(4), inputs[4]])


def test_the_same_tensor_in_other_memory_is_noticed() -> None:
    """Neither `tensor.data = ...` nor a resize makes another tensor or raises its version; its address says it."""
    tensor = random(4)
    guard = AddressGuard([0], [tensor.data_ptr()])
    tensor.data = random(4)
    assert not guard.matches([tensor])
    guard = AddressGuard([0], [tensor.data_ptr()])
    tensor.untyped_storage().resize_(0)
    elsewhere = [random(4) for _ in range(64)]  # where the memory was
    tensor.untyped_storage().resize_(1 << 12)
    assert not guard.matches([tensor])
    del elsewhere
    assert AddressGuard([], []).matches([random(4)])


def test_layouts_tell_strides_apart() -> None:
    """The transpose of a square tensor has its address and its size, and is not what was captured."""
    square, other = random(4, 4), random(4)
    guard = LayoutGuard([0, 1], [square, other])
    assert guard.matches([square, other])
    assert not guard.matches([square.t(), other])
    assert not guard.matches([random(4, 4), other])


def test_weights_that_swap_their_memory_between_two_equal_calls() -> None:
    """The call before had these very inputs, sizes and stream; the weights' memory alone differs, twice."""
    model = torch.nn.Linear(4, 4, device="npu")
    graph, x = compiled(model, dynamic=False), random(2, 4)
    with torch.no_grad():
        for _ in range(3):
            for _ in range(3):
                graph(x)
            model.weight.data = random(4, 4)
            assert torch.equal(graph(x).cpu(), model(x).cpu())


@pytest.mark.slow
def test_inputs_that_stop_moving_are_read_in_place_in_the_end() -> None:
    """However long they moved: a pause between two watches ends."""
    graph, alive, mark = compiled(lambda x: x * 2, dynamic=False), [], captures_so_far()
    for _ in range(5 * WATCHED_CALLS):
        alive.append(random(4))
        graph(alive[-1])
    assert len(capture_records(after=mark)) == 1
    for _ in range(MAX_PAUSE):
        graph(alive[-1])
    assert len(capture_records(after=mark)) == 2
