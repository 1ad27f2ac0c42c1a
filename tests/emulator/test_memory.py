"""Memory that tells: reads of bytes that nothing wrote, replays over freed memory, poison, and addresses that are nobody's."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

import npu_emulator
from npu_emulator import MemoryFaultError, check_memory, schedule
from npu_emulator.errors import EmulatorError
from npu_emulator.memory.report import FaultKind

Program = Callable[..., subprocess.CompletedProcess[str]]


def kinds(faults: list[object]) -> list[FaultKind]:
    """What each fault is."""
    return [fault.kind for fault in faults]  # type: ignore[attr-defined]


def test_a_read_of_unwritten_memory_names_operator_stream_and_origin() -> None:
    """The report counts the bytes and names the launch, its stream and the line that allocated."""
    with check_memory() as faults:
        side = torch.npu.Stream()
        x = torch.empty(8, device="npu")
        x[:3] = 1
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x + 1
        side.synchronize()
        del y
    assert kinds(faults) == [FaultKind.UNWRITTEN]
    assert (faults[0].operator, faults[0].bytes) == ("aten.add.Tensor", 20)
    assert faults[0].stream != 0
    text = str(faults[0])
    assert text.count("test_memory.py") == 2
    assert "20 bytes" in text
    assert "torch.zeros" in text


def test_blocks_nest() -> None:
    """A fault in the inner block is in both lists, also of the outer block's memory; one outside is in the outer alone."""
    with check_memory() as outer:
        x = torch.empty(8, device="npu")
        with check_memory(poison=False) as inner:
            y = x + 1
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                z = y + 1
            assert kinds(inner) == kinds(outer) == [FaultKind.UNWRITTEN]
        del y
        graph.replay()
        torch.npu.synchronize()
        assert torch.isnan(torch.empty(5, device="npu").cpu()).all()
        del z
    assert kinds(inner) == [FaultKind.UNWRITTEN]
    assert kinds(outer) == [FaultKind.UNWRITTEN, FaultKind.FREED, FaultKind.UNWRITTEN]
    with pytest.raises(MemoryFaultError, match=r"aten\.neg"), check_memory() as outer, check_memory(stop_at_first=True):
        torch.neg(torch.empty(2, device="npu"))
    assert kinds(outer) == [FaultKind.UNWRITTEN]


def test_copies_carry_ignorance_along() -> None:
    """Copying unwritten memory is no fault; computing on the copy is, and only on the unwritten part."""
    with check_memory() as faults:
        x = torch.empty(4, 6, device="npu")
        x[:, ::2].fill_(1)
        copy = x.t().contiguous().to(torch.float64)
        (copy[::2] * 2).sum().item()
        assert faults == []
        copy[1].sum()
    assert kinds(faults) == [FaultKind.UNWRITTEN]
    assert faults[0].bytes == 4 * 8


def test_host_reads_are_reads() -> None:
    """`cpu` and `item` on unwritten memory are reported."""
    with check_memory() as faults:
        torch.empty(3, device="npu").cpu()
        torch.empty((), device="npu").item()
    assert kinds(faults) == [FaultKind.UNWRITTEN] * 2


@pytest.mark.parametrize("order", ["fifo", "lazy"])
@pytest.mark.parametrize("ends", ["", "with an error"])
def test_a_check_knows_nothing_of_an_earlier_one(order: str, ends: str) -> None:
    """What the first one saw allocated may be written, or be another tensor's, before the second one begins."""
    with schedule(order):
        with suppress(ArithmeticError), check_memory():
            x, dropped = torch.empty(16, device="npu"), torch.empty(32, device="npu")
            if ends:
                raise ArithmeticError
        address = dropped.data_ptr()
        del dropped
        x.fill_(1)
        there = torch.ones(32, device="npu")
        assert there.data_ptr() == address
        with check_memory() as faults:
            assert (x.clone() * 2).tolist() == [2.0] * 16
            assert (there.clone() * 2).tolist() == [2.0] * 32
            torch.empty(8, device="npu").clone().tolist()
        assert [fault.kind for fault in faults] == [FaultKind.UNWRITTEN]


def test_what_programs_do_rightly_is_not_reported() -> None:
    """Caches filled row by row, random fills, out variants, gathers, normalisation and a training step read nothing unwritten."""
    with check_memory(stop_at_first=True):
        cache = torch.empty(16, 4, device="npu")
        rows = torch.tensor([1, 3], device="npu")
        cache.index_copy_(0, rows, torch.ones(2, 4, device="npu"))
        cache[rows] = torch.ones(2, 4, device="npu")
        assert cache.index_select(0, rows).sum().item() == 8
        for fill in ("normal_", "uniform_", "exponential_", "zero_"):
            getattr(torch.empty(5, device="npu"), fill)().sum().item()
        out = torch.empty(4, device="npu")
        torch.add(torch.ones(4, device="npu"), 1, out=out)
        assert out.sum().item() == 8
        model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 2), torch.nn.BatchNorm1d(3), torch.nn.Dropout()).npu()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 2, 6).npu()).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("order", ["fifo", "lazy", "random:3"])
def test_marks_follow_the_work_and_not_the_launches(order: str) -> None:
    """Memory that is freed and handed out again while work is queued is judged in the order of its stream."""
    with schedule(order), check_memory(stop_at_first=True):
        for _ in range(8):
            x = torch.ones(32, device="npu")
            y = x * 2
            del x
            z = torch.empty(32, device="npu").copy_(y)
            del y
            assert z.sum().item() == 64


@pytest.mark.parametrize(
    "use", [lambda y: y.sum(), lambda y: y.add_(1), lambda y: y.cpu(), lambda y: torch.ones(10, device="npu").copy_(y)]
)
@pytest.mark.parametrize(("start", "address"), [(0, "0x0"), (10, "0x28")])
def test_a_storage_without_memory_is_an_error(use: Callable[[torch.Tensor], object], start: int, address: str) -> None:
    """What a resize of the storage gave back is at no address; its view as another tensor is not read as the host's memory."""
    x = torch.ones(64, device="npu")
    y = x[start : start + 10]
    x.untyped_storage().resize_(0)
    assert y[:0].sum().item() == 0
    with pytest.raises(RuntimeError, match=rf"touches 40 bytes at {address},.* error 507011\).*test_memory\.py"):
        use(y)
    x.untyped_storage().resize_(256)
    x.fill_(2)
    assert y.sum().item() == 20


def test_poison_spoils_fresh_and_freed_memory() -> None:
    """With poison, what was never written is not a number; without it nothing is filled."""
    with check_memory(poison=True):
        assert torch.isnan(torch.empty(5, device="npu").cpu()).all()
        assert torch.empty(3, dtype=torch.int64, device="npu").cpu().tolist() == [-1] * 3
    with check_memory(poison=False):
        x = torch.full((5,), 7.0, device="npu")
        address = x.data_ptr()
        del x
        again = torch.empty(5, device="npu")
        assert again.data_ptr() == address
        assert again.cpu().tolist() == [7.0] * 5


def test_memory_that_another_stream_still_uses_is_not_poisoned() -> None:
    """After `record_stream`, the queued reader of a freed tensor sees its values."""
    with schedule("lazy"), check_memory(stop_at_first=True):
        side = torch.npu.Stream()
        x = torch.ones(16, device="npu")
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x + 1
        x.record_stream(side)
        del x
        torch.npu.current_stream().synchronize()  # whatever the first stream does to the freed memory is done now
        side.synchronize()
        torch.npu.current_stream().wait_stream(side)
        assert y.sum().item() == 32


def test_stopping_at_the_first_fault() -> None:
    """Eager work raises at its line; work inside a replay at the next synchronisation; and the device stays usable."""
    with check_memory(stop_at_first=True):
        x = torch.empty(4, device="npu")
        with pytest.raises(MemoryFaultError, match=r"aten\.neg"):
            torch.neg(x)
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.abs(x)
        graph.replay()
        with pytest.raises(RuntimeError, match=r"(?s)abs.*nothing has written"):
            torch.npu.synchronize()
        assert torch.ones(2, device="npu").sum().item() == 2


@pytest.mark.slow
def test_the_settings_check_a_whole_program(program: Program) -> None:
    """`--check-memory` stops a program at its first fault; `--poison` alone only fills."""
    text = "import torch\nx = torch.empty(4, device='npu')\nprint((x * 0).sum().item())\n"
    checked = program(text, "--quiet", "--check-memory")
    assert checked.returncode == 1
    assert "MemoryFaultError: aten.mul.Tensor reads" in checked.stderr
    assert "program.py:2" in checked.stderr
    assert program(text, "--quiet", NPU_EMULATOR_POISON="1").stdout == "nan\n"


@pytest.mark.slow
def test_memory_given_back_to_the_device_is_nobodys(program: Program) -> None:
    """A replay over memory that the allocator returned to the device fails with 507011 and the Python line."""
    text = """
import torch
x = torch.ones(300 << 20, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    y = x[:4] + 1
graph.replay()
print(y.cpu().tolist())
del x
big = torch.empty(400 << 20, device="npu")  # does not fit beside it, so the allocator gives memory back
del big
torch.empty(1 << 20, device="npu").zero_()
graph.replay()
try:
    torch.npu.synchronize()
except RuntimeError as error:
    print("507011" in str(error), "program.py:6" in str(error), "CHECK_MEMORY" in str(error))
print((torch.ones(2, device="npu") + 1).cpu().tolist())
"""
    done = program(text, "--quiet", "--memory-gb", "2")
    assert done.stdout.splitlines()[0] == "[2.0, 2.0, 2.0, 2.0]", done.stdout + done.stderr


def test_an_emptied_cache_goes_back_to_the_device() -> None:
    """`empty_cache` returns what no tensor uses: reserved and free bytes of the device both say so."""
    x = torch.empty(1 << 26, device="npu")
    reserved, free = torch.npu.memory_reserved(), torch.npu.mem_get_info()[0]
    del x
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() <= reserved - (4 << 26)
    assert torch.npu.mem_get_info()[0] >= free + (4 << 26)


@pytest.mark.slow
def test_expandable_segments() -> None:
    """Segments grow in reserved addresses: a tensor covers several pieces, and empty pieces go back to the device."""
    runtime, settings = npu_emulator.current().runtime, torch.npu.memory._set_allocator_settings
    torch.npu.empty_cache()
    unused, reserved = torch.npu.mem_get_info()[0], torch.npu.memory_reserved()
    settings("expandable_segments:True")
    try:
        small = torch.full((3,), 7.0, device="npu")
        large = [torch.full((11 << 20,), float(i), device="npu") for i in range(3)]  # pieces have 20 MiB, these 44
        with torch.npu.stream(torch.npu.Stream()):
            elsewhere = torch.arange(12 << 20, device="npu")  # a stream has its own segment
        assert any(segment["is_expandable"] for segment in torch.npu.memory_snapshot())
        assert [tensor.unique().tolist() for tensor in large] == [[0.0], [1.0], [2.0]]
        assert torch.npu.mem_get_info()[0] == unused - (torch.npu.memory_reserved() - reserved)
        address = large[1].data_ptr()
        assert not runtime.is_outside_allocations(address, large[1].nbytes)
        del large[1]
        torch.npu.empty_cache()
        assert runtime.is_outside_allocations(address + (20 << 20), 1)
        assert [tensor.unique().tolist() for tensor in large] == [[0.0], [2.0]]
        assert small.tolist() == [7.0] * 3
        assert torch.equal(elsewhere.cpu(), torch.arange(12 << 20))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(70 << 30, dtype=torch.uint8, device="npu")
        del small, large, elsewhere
        torch.npu.empty_cache()
    finally:
        settings("expandable_segments:False")
    assert torch.npu.mem_get_info()[0] >= unused  # what tests before this one have left may go meanwhile


def test_eager_work_on_memory_that_went_back_to_the_device_is_507011() -> None:
    """A weak reference whose tensor died and whose memory was given back: operator, stream and Python line, at the launch."""
    import torch_npu

    x = torch.ones(1 << 24, device="npu")
    weak = torch_npu._C._weak_ref_tensor(x)
    del x
    torch.npu.empty_cache()
    with pytest.raises(RuntimeError, match=r"aten\.zero_\S* on stream 0 .*no live allocation.*507011.*test_memory\.py"):
        weak.zero_()
    assert torch.ones(2, device="npu").sum().item() == 2


def test_eager_work_on_a_dead_tensor_s_memory_names_its_origin() -> None:
    """While the allocator still holds the memory the check tells where it was allocated and freed."""
    import torch_npu

    with check_memory() as faults:
        x = torch.ones(1 << 10, device="npu")
        weak = torch_npu._C._weak_ref_tensor(x)
        weak.add_(1)
        assert faults == []
        del x
        weak.mul_(2)
    assert kinds(faults) == [FaultKind.FREED]
    assert faults[0].operator == "aten.mul_.Tensor"
    assert all("test_memory.py" in lines[0] for lines in (faults[0].frames, faults[0].allocated, faults[0].freed))


def test_an_access_past_the_end_of_a_block() -> None:
    """A kernel that is handed more bytes than its tensor has is told the operator, the stream and the allocation."""
    launcher = npu_emulator.current().launcher
    number = launcher.number("test::past_the_end")
    with check_memory() as faults:
        x = torch.ones(128, device="npu")
        for size in (512, 2048):  # the allocator rounds up, but not so far
            view = launcher.views.of(x.view(torch.uint8)).as_strided((size,), (1,))
            launcher.launch("test::past_the_end", number, 0, lambda: None, [], [view])
    assert kinds(faults) == [FaultKind.OUTSIDE]
    assert (faults[0].bytes, faults[0].stream) == (2048, 0)
    assert "test_memory.py" in faults[0].allocated[0]
    assert "past the end" in str(faults[0])


def test_synchronous_copies_stay_inside_allocations() -> None:
    """`aclrtMemcpy` and `aclrtMemset` on bytes that are nobody's return 507011 and say which; inside they do their work."""
    import ctypes

    from npu_emulator import build

    library = ctypes.CDLL(str(build.libraries()[0]))
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    pointer = ctypes.c_void_p()
    assert library.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(1024), 0) == 0
    host = ctypes.create_string_buffer(b"x" * 2048, 2048)
    size, more = ctypes.c_size_t(1024), ctypes.c_size_t(1025)
    assert library.aclrtMemset(pointer, size, 7, size) == 0
    assert library.aclrtMemcpy(host, size, pointer, size, 2) == 0
    assert host.raw[1022:1026] == b"\x07\x07xx"
    for call in (
        lambda: library.aclrtMemset(pointer, more, 7, more),
        lambda: library.aclrtMemcpy(host, more, pointer, more, 2),
        lambda: library.aclrtMemcpy(pointer, more, host, more, 1),
    ):
        assert call() == 507011
        message = library.aclGetRecentErrMsg()
        assert b"1025 bytes" in message
        assert b"keep memory allocated" in message
    assert library.aclrtFree(pointer) == 0
    assert library.aclrtMemset(pointer, size, 7, size) == 507011


def test_tensors_freed_by_a_collection_in_a_frame_without_builtins_are_seen() -> None:
    """The collector may free memory in the constructor of a named tuple, which cannot import; a replay over it is reported."""
    collect = eval("lambda: collect()", {"__builtins__": {}, "collect": gc.collect})  # noqa: S307 - as `namedtuple` makes it
    graph = torch.npu.NPUGraph()
    with check_memory() as faults:
        gc.disable()
        try:
            tensor = torch.ones(300, device="npu")
            with torch.npu.graph(graph):
                y = tensor + 1
            cycle = {"tensor": tensor}
            cycle["itself"] = cycle
            tensor = cycle = None
            collect()
        finally:
            gc.enable()
        graph.replay()
        torch.npu.synchronize()
    assert kinds(faults) == [FaultKind.FREED]
    assert y.device.type == "npu"


def test_an_exception_that_drops_a_tensor_survives_the_report_of_the_free() -> None:
    """torch_npu reports the free while the exception is pending. It was lost there, and Python crashed."""
    graph, held = torch.npu.NPUGraph(), list[torch.Tensor]()
    with check_memory() as faults:
        held.append(torch.ones(300, device="npu"))
        with torch.npu.graph(graph):
            y = held[0] + 1
        with pytest.raises(ZeroDivisionError):
            torch.add(held.pop(), 1 // 0)
        graph.replay()
        torch.npu.synchronize()
    assert kinds(faults) == [FaultKind.FREED]
    assert y.device.type == "npu"


def test_a_check_that_nobody_would_tell_anything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its cache torch_npu's allocator reports no allocation."""
    monkeypatch.setenv("PYTORCH_NO_NPU_MEMORY_CACHING", "1")
    with pytest.raises(EmulatorError, match="unset PYTORCH_NO_NPU_MEMORY_CACHING"), check_memory():
        pass
    monkeypatch.setenv("PYTORCH_NO_NPU_MEMORY_CACHING", "0")
    with check_memory() as faults:
        assert faults == []
