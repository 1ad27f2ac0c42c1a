"""Communicators in the forms that torch_npu does not use by itself: devices of one process, rank tables, parts of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hccl_ranks import RANKS

import npu_emulator

pytestmark = pytest.mark.skipif(
    not npu_emulator.is_active(), reason="emulated processes; real ones need several devices"
)

_FORMS = (
    RANKS
    + """
import ctypes
lib = ctypes.CDLL("libhccl.so")
u64, vp = ctypes.c_uint64, ctypes.c_void_p
def all_devices():
    torch.npu.set_device(0)
    comms = (vp * 2)()
    assert lib.HcclCommInitAll(2, (ctypes.c_int32 * 2)(0, 1), comms) == 0
    xs = []
    for d in range(2):
        torch.npu.set_device(d)
        x = torch.full((5,), float(d + 1), device=f"npu:{d}")
        torch.npu.synchronize()
        xs.append(x)
    for d in range(2):
        torch.npu.set_device(d)
        at, stream = vp(xs[d].data_ptr()), vp(torch.npu.current_stream().npu_stream)
        assert lib.HcclAllReduce(at, at, u64(5), 4, 0, vp(comms[d]), stream) == 0
    for d in range(2):
        torch.npu.set_device(d)
        torch.npu.synchronize()
    out = [x.cpu().tolist() for x in xs]
    for d in range(2):
        assert lib.HcclCommDestroy(vp(comms[d])) == 0
    return out
def forms(rank, n):
    found = {}
    x = torch.arange(4, dtype=torch.float32, device="npu") + 10 * rank
    stream = vp(torch.npu.current_stream().npu_stream)
    torch.npu.synchronize()
    whole, part, solo = vp(), vp(), vp()
    assert lib.HcclCommInitClusterInfo(table.encode(), rank, ctypes.byref(whole)) == 0
    y = torch.empty(4 * n, device="npu")
    torch.npu.synchronize()
    assert lib.HcclAllGather(vp(x.data_ptr()), vp(y.data_ptr()), u64(4), 4, whole, stream) == 0
    torch.npu.synchronize()
    found["table"] = y.tolist()
    members = (2, 0)
    if rank in members:
        ids = (ctypes.c_uint32 * 2)(*members)
        assert lib.HcclCreateSubCommConfig(ctypes.byref(whole), 2, ids, u64(77), members.index(rank), None, ctypes.byref(part)) == 0
        size, at = ctypes.c_uint32(), ctypes.c_uint32()
        assert lib.HcclGetRankSize(part, ctypes.byref(size)) == lib.HcclGetRankId(part, ctypes.byref(at)) == 0
        z = torch.empty(8, device="npu")
        torch.npu.synchronize()
        assert lib.HcclAllGather(vp(x.data_ptr()), vp(z.data_ptr()), u64(4), 4, part, stream) == 0
        torch.npu.synchronize()
        found["part"] = [size.value, at.value, z.tolist()]
    else:
        assert lib.HcclCreateSubCommConfig(ctypes.byref(whole), 0, None, u64(0xFFFFFFFF), 0, None, ctypes.byref(part)) == 0
        assert not part.value
    matrix = (u64 * (n * n))(*[i + j for i in range(n) for j in range(n)])
    given = torch.full((sum(rank + other for other in range(n)),), float(rank), device="npu")
    got = torch.full_like(given, -1)
    torch.npu.synchronize()
    assert lib.HcclAlltoAllVC(vp(given.data_ptr()), matrix, 4, vp(got.data_ptr()), 4, whole, stream) == 0
    torch.npu.synchronize()
    found["matrix"] = got.tolist()
    return found
table = tempfile.mktemp()
devices = [{"device_id": str(rank), "device_ip": "", "rank_id": str(rank)} for rank in range(3)]
servers = [{"server_id": "here", "device": devices}]
with open(table, "w") as file:
    json.dump({"version": "1.0", "server_count": "1", "status": "completed", "server_list": servers}, file)
answer = [over_ranks(3, forms), all_devices()]
"""
)


def test_each_form_of_a_communicator(ask: Callable[..., Any]) -> None:
    """Three processes by a rank table, two of them as a part in another order, a matrix of counts; two devices of one process."""
    ranks, devices = ask(_FORMS, NPU_EMULATOR_DEVICES="3")
    rows = [[10.0 * rank + column for column in range(4)] for rank in range(3)]
    assert [found["table"] for found in ranks] == 3 * [[*rows[0], *rows[1], *rows[2]]]
    assert ranks[2]["part"] == [2, 0, [*rows[2], *rows[0]]]
    assert ranks[0]["part"] == [2, 1, [*rows[2], *rows[0]]]
    assert "part" not in ranks[1]
    assert [found["matrix"] for found in ranks] == [[1, 2, 2], [0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 2, 2]]
    assert devices == 2 * [5 * [3.0]]


_THREADS = """
import npu_emulator
npu_emulator.activate(quiet=True)
import ctypes, threading, time, torch

lib, vp = ctypes.CDLL("libhccl.so"), ctypes.c_void_p
root, answer = (ctypes.c_char * 4108)(), [None, None]
assert lib.HcclGetRootInfo(root) == 0

def rank(number):
    torch.npu.set_device(number)
    group = vp()
    assert lib.HcclCommInitRootInfo(2, root, number, ctypes.byref(group)) == 0
    time.sleep(0.3 * number)                 # the other thread waits for the device meanwhile; this one has launched nothing
    value = torch.full((4,), float(number + 1), device=f"npu:{number}")
    torch.npu.current_stream().synchronize()
    at, stream = vp(value.data_ptr()), vp(torch.npu.current_stream().npu_stream)
    assert lib.HcclAllReduce(at, at, ctypes.c_uint64(4), 4, 0, group, stream) == 0
    torch.npu.current_stream().synchronize()
    answer[number] = value.tolist()

threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_a_rank_in_a_thread_that_comes_late_is_no_deadlock(ask: Callable[..., Any]) -> None:
    """A thread that has made its communicator will launch, although it has not yet."""
    assert ask(_THREADS, NPU_EMULATOR_DEVICES="2") == 2 * [4 * [3.0]]
