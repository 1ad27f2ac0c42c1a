"""Device memory that processes share, as torch.multiprocessing and aclrtIpcMem* give it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch

Program = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import torch
import torch.multiprocessing as mp

def consumer(tensors, answers):
    x, strided, model = tensors.get()
    answers.put((x.sum().item(), strided.tolist(), model["w"].tolist()))
    x.mul_(2)
    torch.npu.synchronize()
    answers.put("doubled")
    assert tensors.get() == "freed"
    answers.put(strided.tolist())
    del x, strided, model
    assert tensors.get() == "end"

if __name__ == "__main__":
    mp.set_start_method("spawn")
    tensors, answers = mp.Queue(), mp.Queue()
    child = mp.Process(target=consumer, args=(tensors, answers))
    child.start()
    x = torch.arange(1000.0, device="npu")
    x += 1
    big = torch.arange(3_000_000.0, device="npu").view(3, 1_000_000)
    strided = big[:, 2::400_000]
    tensors.put((x, strided, {"w": torch.nn.Parameter(torch.full((2,), 7.0, device="npu"))}))
    print(*answers.get())
    print(answers.get(), x.sum().item())
    expected = strided.tolist()
    del big, strided
    torch.npu.empty_cache()
    tensors.put("freed")
    print(answers.get() == expected)
    tensors.put("end")
    child.join()
    print(child.exitcode, {segment["is_expandable"] for segment in torch.npu.memory_snapshot()})
"""


@pytest.mark.slow
@pytest.mark.parametrize("segments", ["False", "True"])
def test_tensors_go_through_a_queue_without_a_copy(program: Program, segments: str) -> None:
    """What was launched before counts, each process sees what the other one writes, and a view stays one."""
    done = program(SCRIPT, "--schedule=lazy", PYTORCH_NPU_ALLOC_CONF=f"expandable_segments:{segments}")
    columns = [[start + place for place in (2.0, 400_002.0, 800_002.0)] for start in (0.0, 1e6, 2e6)]
    said = [
        line for line in done.stdout.splitlines() if not line.startswith("Warning: ")
    ]  # a child's, of its environment
    assert said == [f"500500.0 {columns} [7.0, 7.0]", "doubled 1001000.0", "True", f"0 {{{segments}}}"], done.stderr


@pytest.fixture
def block() -> Iterator[torch.Tensor]:
    """Memory with an allocation of its own, whose first element is that of the allocation."""
    torch.npu.empty_cache()
    block = torch.arange(6_000_000.0, device="npu")
    torch.npu.synchronize()
    yield block
    del block
    torch.npu.empty_cache()


def _export(acl: ctypes.CDLL, tensor: torch.Tensor, flags: int = 0) -> bytes:
    key = ctypes.create_string_buffer(65)
    size = ctypes.c_size_t(tensor.nbytes)
    assert (
        acl.aclrtIpcMemGetExportKey(
            ctypes.c_void_p(tensor.data_ptr()), size, key, ctypes.c_size_t(65), ctypes.c_uint64(flags)
        )
        == 0
    )
    return key.value


def _import(acl: ctypes.CDLL, key: bytes) -> tuple[int, int | None]:
    address = ctypes.c_void_p()
    return acl.aclrtIpcMemImportByKey(ctypes.byref(address), key, ctypes.c_uint64(0)), address.value


def _permit(acl: ctypes.CDLL, key: bytes) -> None:
    assert acl.aclrtIpcMemSetImportPid(key, ctypes.byref(ctypes.c_int32(os.getpid())), ctypes.c_size_t(1)) == 0


def _numbers(acl: ctypes.CDLL, address: int | None, count: int) -> list[float]:
    found = (ctypes.c_float * count)()
    size = ctypes.c_size_t(ctypes.sizeof(found))
    assert acl.aclrtMemcpy(found, size, ctypes.c_void_p(address), size, 2) == 0
    return list(found)


def test_an_import_is_the_same_memory_until_it_is_closed(acl: ctypes.CDLL, block: torch.Tensor) -> None:
    """It has addresses of its own, and keeps its contents when the owner frees the memory."""
    key = _export(acl, block)
    assert _export(acl, block) == key
    _permit(acl, key)
    (status, address), again = _import(acl, key), _import(acl, key)
    assert status == 0
    assert again == (0, address)
    assert address != block.data_ptr()
    block[:2] = 9
    assert _numbers(acl, address, 4) == [9, 9, 2, 3]
    assert acl.aclrtFree(ctypes.c_void_p(address)) == 107000
    assert acl.aclrtIpcMemClose(key) == 0  # the owner's
    assert _import(acl, key)[0] == 0  # known here already
    for _ in range(3):
        assert _numbers(acl, address, 4) == [9, 9, 2, 3]
        assert acl.aclrtIpcMemClose(key) == 0
    assert acl.aclrtIpcMemClose(key) == 107000
    found = (ctypes.c_float * 1)()
    four = ctypes.c_size_t(4)
    assert acl.aclrtMemcpy(found, four, ctypes.c_void_p(address), four, 2) == 507011
    assert block[:4].tolist() == [9, 9, 2, 3]


def test_an_import_outlives_the_memory_of_its_owner(acl: ctypes.CDLL) -> None:
    """What the owner allocates at the same addresses is other memory, which is zero."""
    size, own, again = ctypes.c_size_t(4 << 20), ctypes.c_void_p(), ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(own), size, 0) == 0
    assert acl.aclrtMemset(own, size, 0, size) == 0
    key = ctypes.create_string_buffer(65)
    assert acl.aclrtIpcMemGetExportKey(own, size, key, ctypes.c_size_t(65), ctypes.c_uint64(1)) == 0
    status, address = _import(acl, key.value)
    assert status == 0
    assert acl.aclrtMemset(own, size, 0x3F, size) == 0
    assert acl.aclrtFree(own) == 0
    assert acl.aclrtMalloc(ctypes.byref(again), size, 0) == 0
    assert again.value == own.value
    assert _numbers(acl, again.value, 2) == [0, 0]
    assert acl.aclrtMemset(again, size, 0, size) == 0
    assert _numbers(acl, address, 2) == [pytest.approx(0.7470589)] * 2
    assert acl.aclrtFree(again) == acl.aclrtIpcMemClose(key.value) == 0


def test_a_key_is_for_the_processes_that_its_owner_names(acl: ctypes.CDLL, block: torch.Tensor) -> None:
    """Or for all of them; nobody has one that was closed."""
    key = _export(acl, block)
    assert _import(acl, key) == (107000, None)
    _permit(acl, key)
    assert _import(acl, key)[0] == 0
    assert acl.aclrtIpcMemClose(key) == acl.aclrtIpcMemClose(key) == 0
    assert _import(acl, key) == (107000, None)
    other = torch.ones(6_000_000, device="npu")
    key = _export(acl, other, flags=1)
    assert _import(acl, key)[0] == 0
    assert acl.aclrtIpcMemClose(key) == acl.aclrtIpcMemClose(key) == 0


@pytest.mark.parametrize("key", [b"", b"#1", b"nothing", b"/dev/null#1", b"/proc/self/fd/0#1"])
def test_no_key_is_an_error(acl: ctypes.CDLL, key: bytes) -> None:
    """It is 107000, and says what a key is for."""
    assert _import(acl, key) == (107000, None)
    assert acl.aclrtIpcMemClose(key) == 107000
    assert acl.aclrtIpcMemSetImportPid(key, ctypes.byref(ctypes.c_int32(1)), ctypes.c_size_t(1)) == 107000


def test_what_is_no_allocation_is_not_shared(acl: ctypes.CDLL, block: torch.Tensor) -> None:
    """The inside of one, more than one, or memory of the host."""
    key = ctypes.create_string_buffer(65)
    for address, size in ((block.data_ptr() + 4096, 8), (block.data_ptr(), 1 << 40), (ctypes.addressof(key), 8)):
        made = acl.aclrtIpcMemGetExportKey(ctypes.c_void_p(address), ctypes.c_size_t(size), key, ctypes.c_size_t(65), 0)
        assert made == 107000


class _Pieces:
    """Mapped memory, as torch_npu's expandable segments have it: addresses, and physical memory that is mapped there."""

    def __init__(self, acl: ctypes.CDLL) -> None:
        self.acl, self.size, self.zero = acl, ctypes.c_size_t(4 << 20), ctypes.c_uint64(0)

    def made(self) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        properties = (ctypes.c_uint64 * 8)()  # of device 0
        assert self.acl.aclrtMallocPhysical(ctypes.byref(handle), self.size, properties, self.zero) == 0
        return handle

    def mapped(self, handle: ctypes.c_void_p) -> ctypes.c_void_p:
        address = ctypes.c_void_p()
        assert self.acl.aclrtReserveMemAddress(ctypes.byref(address), self.size, 0, None, self.zero) == 0
        assert self.map(address, handle) == 0
        return address

    def map(self, address: ctypes.c_void_p, handle: ctypes.c_void_p) -> int:
        status: int = self.acl.aclrtMapMem(address, self.size, 0, handle, self.zero)
        return status

    def exported(self, handle: ctypes.c_void_p, flags: int) -> ctypes.c_uint64:
        number = ctypes.c_uint64()
        assert self.acl.aclrtMemExportToShareableHandle(handle, 0, ctypes.c_uint64(flags), ctypes.byref(number)) == 0
        return number

    def imported(self, number: ctypes.c_uint64) -> tuple[int, ctypes.c_void_p]:
        handle = ctypes.c_void_p()
        return self.acl.aclrtMemImportFromShareableHandle(number, 0, ctypes.byref(handle)), handle

    def fill(self, address: ctypes.c_void_p, byte: int) -> None:
        assert self.acl.aclrtMemset(address, self.size, byte, self.size) == 0


def test_mapped_memory_is_shared_by_a_number(acl: ctypes.CDLL) -> None:
    """What it holds at the export counts; both see each other's writes; it keeps its contents while anybody has it."""
    pieces = _Pieces(acl)
    own = pieces.made()
    here = pieces.mapped(own)
    pieces.fill(here, 0x3F)
    number = pieces.exported(own, flags=0)
    assert pieces.exported(own, flags=0).value == number.value
    assert pieces.imported(number)[0] == 107000  # nobody is permitted
    assert (
        acl.aclrtMemSetPidToShareableHandle(number, ctypes.byref(ctypes.c_int32(os.getpid())), ctypes.c_size_t(1)) == 0
    )
    status, other = pieces.imported(number)
    assert status == 0
    there = pieces.mapped(other)
    assert pieces.map(here, own) == pieces.map(there, other) == 107000  # mapped already
    assert acl.aclrtFreePhysical(own) == 107000
    assert _numbers(acl, there.value, 2) == [pytest.approx(0.7470589)] * 2
    pieces.fill(there, 0)
    assert _numbers(acl, here.value, 2) == [0, 0]
    assert acl.aclrtUnmapMem(here) == acl.aclrtFreePhysical(own) == 0
    assert pieces.imported(number)[0] == 107000  # its owner has freed it
    pieces.fill(there, 0x3F)
    again = pieces.made()
    assert pieces.map(here, again) == 0
    assert _numbers(acl, here.value, 2) == [0, 0]  # other memory
    assert acl.aclrtUnmapMem(there) == 0
    assert pieces.map(there, other) == 0
    assert _numbers(acl, there.value, 2) == [pytest.approx(0.7470589)] * 2
    for address, handle in ((here, again), (there, other)):
        assert acl.aclrtUnmapMem(address) == acl.aclrtFreePhysical(handle) == acl.aclrtReleaseMemAddress(address) == 0


@pytest.mark.parametrize("number", [0, 1, 2**64 - 1])
def test_no_number_is_an_error(acl: ctypes.CDLL, number: int) -> None:
    """It is 107000."""
    assert _Pieces(acl).imported(ctypes.c_uint64(number))[0] == 107000
    assert acl.aclrtMemSetPidToShareableHandle(ctypes.c_uint64(number), None, ctypes.c_size_t(0)) == 107000
