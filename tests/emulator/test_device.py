"""Tensors, copies, streams, events and memory statistics on the emulated device."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
import torch_npu

from npu_emulator import build, schedule
from npu_emulator.activation import current
from npugraph_ex.versions import missing_interfaces


def test_the_name_says_emulated() -> None:
    """Nobody who asks for the device's name can take it for hardware."""
    assert torch.npu.get_device_name() == "Ascend910B2 (emulated)"
    assert torch.npu.get_device_properties(0).name == "Ascend910B2 (emulated)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_values_survive_host_device_device_host(dtype: torch.dtype) -> None:
    """H2D, D2D and D2H copies keep every value and dtype."""
    host = torch.arange(12).reshape(3, 4).to(dtype)
    device = host.npu()
    again = torch.empty_like(device).copy_(device)
    assert device.device == torch.device("npu:0")
    assert device.data_ptr() != again.data_ptr()
    assert torch.equal(again.cpu(), host)


def test_copies_keep_strides_and_cast() -> None:
    """A copy between differently strided, differently typed tensors converts element by element."""
    source = torch.randn(4, 6)
    target = torch.zeros(6, 4, dtype=torch.float64, device="npu").t()
    target.copy_(source.npu())
    assert torch.equal(target.cpu(), source.double())
    assert target.stride() == (1, 4)


def test_pageable_memory_may_change_after_a_non_blocking_copy() -> None:
    """A host tensor that is not pinned is read before `to` returns."""
    host = torch.ones(4)
    with schedule("lazy"):
        device = host.to("npu", non_blocking=True)
        host.zero_()
        assert device.cpu().tolist() == [1, 1, 1, 1]


def test_pinned_memory_is_recognised() -> None:
    """Page-locked memory comes from the runtime and answers `is_pinned`."""
    host = torch.ones(4).pin_memory()
    assert host.is_pinned()
    assert not torch.ones(4).is_pinned()


def test_views_share_memory_with_their_base() -> None:
    """Writing through a view of a device tensor changes the tensor."""
    base = torch.zeros(3, 4, device="npu")
    base.t()[1].fill_(2)
    base[0, 2:].add_(5)
    assert base.cpu().tolist() == [[0, 2, 5, 5], [0, 2, 0, 0], [0, 2, 0, 0]]


def test_memory_statistics_follow_allocations() -> None:
    """Allocated bytes rise with a tensor, fall with its end, and the peak remembers."""
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    tensor = torch.empty(1 << 20, device="npu")
    assert torch.npu.memory_allocated() - before >= 4 << 20
    del tensor
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before >= 4 << 20
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    assert 0 < free <= total == 64 << 30
    tensor = torch.empty(1 << 26, device="npu")  # larger than anything that the allocator may have kept
    assert tensor.numel() == 1 << 26
    assert free - torch.npu.mem_get_info()[0] >= 4 << 26


def test_a_training_step_equals_the_cpu() -> None:
    """Forward, backward on autograd's threads, clipping and a foreach optimizer give the CPU's bits."""
    results = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 3)
        )
        data, labels = torch.randn(5, 8).to(device), torch.tensor([0, 2, 1, 1, 0]).to(device)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data), labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        results.append([parameter.detach().cpu() for parameter in model.parameters()])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_boolean_indexing_waits_for_its_values() -> None:
    """Operators whose output shape depends on values compute it from finished work."""
    data = torch.arange(6, device="npu")
    assert data[data % 2 == 0].cpu().tolist() == [0, 2, 4]
    assert torch.nonzero(data > 3).cpu().tolist() == [[4], [5]]


def test_wrong_shapes_fail_at_launch() -> None:
    """An impossible operator raises where it is called, as it does on hardware, not at a synchronisation."""
    with pytest.raises(RuntimeError, match=r"must match|not broadcastable|size"):
        torch.ones(3, device="npu") + torch.ones(4, device="npu")


def test_seeds_reproduce_numbers_and_leave_the_host_alone() -> None:
    """Both seeding calls restart the device's numbers; drawing there does not advance the host's generator."""
    torch.manual_seed(7)
    host = torch.rand(3)
    torch.manual_seed(7)
    first = torch.rand(100, device="npu").cpu()
    assert torch.equal(torch.rand(3), host)
    assert not torch.equal(torch.rand(100, device="npu").cpu(), first)
    torch.npu.manual_seed(7)
    assert torch.equal(torch.rand(100, device="npu").cpu(), first)
    state = torch.npu.get_rng_state()
    second = torch.rand(100, device="npu").cpu()
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(100, device="npu").cpu(), second)


def test_a_context_is_a_choice_of_its_device() -> None:
    """A thread has no device until it chooses one, by number or by a context that it was handed; other contexts are refused."""
    library = ctypes.CDLL(str(build.libraries()[0]))
    context, found = ctypes.c_void_p(), []
    assert library.aclrtGetCurrentContext(ctypes.byref(context)) == 0

    def ask() -> int:
        return int(library.aclrtGetDevice(ctypes.byref(ctypes.c_int())))

    def other_thread() -> None:
        found.append(ask())
        found.append(library.aclrtSetCurrentContext(ctypes.c_void_p(context.value + 64)))
        found.append(ask())
        found.append(library.aclrtSetCurrentContext(context))
        found.append(ask())

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert found == [107002, 107002, 107002, 0, 0]


def test_tensors_of_host_and_device_do_not_meet() -> None:
    """As on hardware: an error that names both devices; scalars of the host and indices on it are allowed."""
    ours, host = torch.ones(4, 4, device="npu"), torch.ones(4, 4)
    for mix in (
        lambda: ours + host,
        lambda: host + ours,
        lambda: torch.cat([ours, host]),
        lambda: torch.nn.functional.linear(ours, host),
        lambda: ours.add_(host),
        lambda: torch.where(host > 0, ours, ours),
    ):
        with pytest.raises(RuntimeError, match=r"same device.*npu:0.*cpu"):
            mix()
    assert torch.equal((ours * torch.tensor(2.0)).cpu(), host * 2)
    assert torch.equal(ours[torch.tensor([0, 2])].cpu(), host[:2])
    assert torch.equal(ours.copy_(host * 3).cpu(), host * 3)


def test_the_device_computes_on_memory_of_the_host() -> None:
    """`empty_with_swapped_memory` maps pages of the host; operators, views and copies take them, and several live and die."""
    for size in (1, 3, 5000):
        swapped = torch_npu.empty_with_swapped_memory([size, 4], dtype=torch.float32, device="npu:0").fill_(2.0)
        swapped[:, 1:] += torch.arange(3.0, device="npu")
        assert (swapped[-1] * 2).tolist() == [4, 4, 6, 8]
        swapped.copy_(torch.ones(size, 4))
        assert swapped.sum().item() == 4 * size


@pytest.mark.skipif(missing_interfaces.DIFFERENCE.older, reason=missing_interfaces.DIFFERENCE.what)
def test_host_memory_of_no_bytes_is_not_registered() -> None:
    """Memory that is registered is pinned; no bytes, and no address, are refused."""
    runtime, host = torch_npu.npu.npurt(), torch.ones(1024)
    assert int(runtime.npuHostRegister(host.data_ptr(), 4096, 0)) == 0
    assert int(runtime.npuHostUnregister(host.data_ptr())) == 0
    assert int(runtime.npuHostRegister(host.data_ptr(), 0, 0)) == 107000


def test_an_interrupt_where_an_operator_begins_leaves_the_device_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises Ctrl-C as soon as the call into the runtime returns. The device was busy for ever: 507009, or a hang."""
    runtime, x = current().launcher.runtime, torch.ones(3, device="npu")
    begin = runtime.begin

    def interrupted(stream: int, number: int) -> int:
        begin(stream, number)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        x + 1
    assert (x + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "remainder"])
def test_a_number_in_place(name: str, dtype: torch.dtype) -> None:
    """An operator that takes a number gives the same in place and for a list, in 16 bits, too: the number is not rounded first."""
    x = torch.rand(200, dtype=dtype, device="npu") + 0.5
    new, in_place = getattr(torch.ops.aten, name).Scalar, getattr(torch.ops.aten, f"{name}_").Scalar
    expected = new(x, 0.9).cpu()
    assert torch.equal(in_place(x.clone(), 0.9).cpu(), expected)
    if name != "remainder":
        for number in (0.9, [0.9]):
            several = [x.clone()]
            getattr(torch, f"_foreach_{name}_")(several, number)
            assert torch.equal(several[0].cpu(), expected)


def test_factors_are_written_into_out_of_columns() -> None:
    """As the CPU returns them; `R` had its old contents there, because all views of the device's memory share a storage."""
    matrix = torch.randn(4, 4)
    expected = torch.linalg.qr(matrix)
    out = [torch.ones_like(factor).npu() for factor in expected]
    assert out[1].stride() == (1, 4)
    torch.linalg.qr(matrix.npu(), out=tuple(out))
    for factor, found in zip(expected, out, strict=True):
        torch.testing.assert_close(found.cpu(), factor, rtol=0, atol=0)
