"""Communicators in the forms that torch_npu does not use by itself: devices of one process, rank tables, parts of another one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hccl_ranks import RANKS, on_emulated_ranks

from npugraph_ex.versions import missing_interfaces

pytestmark = on_emulated_ranks

_FORMS = (
    RANKS
    + """
import ctypes
import numpy
lib = ctypes.CDLL("libhccl.so")
u64, vp = ctypes.c_uint64, ctypes.c_void_p
def on_devices(call):                        # both devices of this process, each with its current stream
    for d in range(2):
        torch.npu.set_device(d)
        call(d, vp(torch.npu.current_stream().npu_stream))
def finish():
    on_devices(lambda d, stream: torch.npu.synchronize())
def at(tensor):
    return vp(tensor.data_ptr())
def communicators():
    torch.npu.set_device(0)
    comms = (vp * 2)()
    assert lib.HcclCommInitAll(2, (ctypes.c_int32 * 2)(0, 1), comms) == 0
    return comms
def reduced(comms, xs, counts, dtype=4, operation=0):
    def call(d, stream):
        assert lib.HcclAllReduce(at(xs[d]), at(xs[d]), u64(counts[d]), dtype, operation, vp(comms[d]), stream) == 0
    finish()
    on_devices(call)
    finish()
def unequal(comms, counts):
    places, counts = (u64 * 2)(0, counts[0]), (u64 * 2)(*counts)
    parts = [torch.full((counts[d],), d + 1.0, device=f"npu:{d}") for d in range(2)]
    wholes = [torch.full((sum(counts),), -1.0, device=f"npu:{d}") for d in range(2)]
    sums = [torch.full((counts[d],), -1.0, device=f"npu:{d}") for d in range(2)]
    def gather(d, stream):
        assert lib.HcclAllGatherV(at(parts[d]), u64(counts[d]), at(wholes[d]), counts, places, 4, vp(comms[d]), stream) == 0
    def scatter(d, stream):
        assert lib.HcclReduceScatterV(at(wholes[d]), counts, places, at(sums[d]), u64(counts[d]), 4, 0, vp(comms[d]), stream) == 0
    finish()
    on_devices(gather)
    on_devices(scatter)
    finish()
    return [x.tolist() for x in wholes + sums]
def wrong_dtypes(comms):
    dtypes = {0: "int8", 1: "int16", 2: "int32", 5: "int64", 7: "uint8", 8: "uint16", 9: "uint32", 6: "uint64"}
    random, wrong = numpy.random.default_rng(0), []
    for number, name in (dtypes | {3: "float16", 4: "float32", 10: "float64"}).items():
        for operation, right in enumerate((numpy.add, numpy.multiply, numpy.maximum, numpy.minimum)):
            words = [random.integers(0, 256, 72, numpy.uint8).view(name)[:9] for _ in range(2)]
            given = [random.integers(-99, 99, 9).astype(name) for _ in range(2)] if name[0] == "f" else words
            xs = [torch.from_numpy(value.copy().view(numpy.uint8)).to(f"npu:{d}") for d, value in enumerate(given)]
            reduced(comms, xs, (9, 9), number, operation)
            wrong += [[name, operation] for x in xs if not (x.cpu().numpy().view(name) == right(*given)).all()]
    return wrong
def gathered_wide(comms):                    # 128 bits
    parts = [torch.full((2,), d + 1, dtype=torch.int64, device=f"npu:{d}") for d in range(2)]
    wholes = [torch.full((4,), -1, dtype=torch.int64, device=f"npu:{d}") for d in range(2)]
    def gather(d, stream):
        assert lib.HcclAllGather(at(parts[d]), at(wholes[d]), u64(1), 12, vp(comms[d]), stream) == 0
    finish()
    on_devices(gather)
    finish()
    return [x.tolist() for x in wholes]
def said(fault):
    try:
        fault()
    except RuntimeError as error:
        return str(error)
def crossing():
    groups, x = (communicators(), communicators()), [torch.ones(4, device=f"npu:{d}") for d in range(2)]
    def call(d, stream):
        for comms in groups[:: -1 if d else 1]:
            assert lib.HcclAllReduce(at(x[d]), at(x[d]), u64(4), 4, 0, vp(comms[d]), stream) == 0
    finish()
    on_devices(call)
    finish()
def all_devices():
    comms = communicators()
    xs = [torch.full((5,), d + 1.0, device=f"npu:{d}") for d in range(2)]
    reduced(comms, xs, (5, 5))
    found = {"sum": [x.tolist() for x in xs], "wrong": wrong_dtypes(comms)}
    found["unequal"] = [unequal(comms, counts) for counts in ((2, 2), (1, 3), (0, 2), (0, 0))]
    found["refused"] = [lib.HcclAllReduce(None, None, u64(1), dtype, 0, vp(comms[0]), None) for dtype in range(14, 18)]
    found["wide"] = gathered_wide(comms)
    found["unknown"] = [lib.HcclAllGather(None, None, u64(1), dtype, vp(comms[0]), None) for dtype in (13, 18, 255)]
    for d in range(2):
        assert lib.HcclCommDestroy(vp(comms[d])) == 0
    found["mismatch"] = said(lambda: reduced(communicators(), xs, (4, 5)))
    said(finish)                             # the other device's error
    found["crossing"] = said(crossing)
    return found
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
    if rank < 2:                             # two parts, made in crossing order; rank 2 waits for both, and is not told
        ids, acl = (ctypes.c_uint32 * 2)(0, 1), ctypes.CDLL("libascendcl.so")
        acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
        assert lib.HcclCreateSubCommConfig(ctypes.byref(whole), 2, ids, u64(5 + rank), rank, None, ctypes.byref(part)) == 9
        found["crossing parts"] = acl.aclGetRecentErrMsg().decode()
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
    """Three processes by a rank table, two of them as a part in another order, a matrix of counts; two devices of one process.

    The devices of one process also reduce all dtypes and parts of unequal sizes, and hear of calls that do not fit.
    """
    ranks, devices = ask(_FORMS, NPU_EMULATOR_DEVICES="3")
    rows = [[10.0 * rank + column for column in range(4)] for rank in range(3)]
    assert [found["table"] for found in ranks] == 3 * [[*rows[0], *rows[1], *rows[2]]]
    assert ranks[2]["part"] == [2, 0, [*rows[2], *rows[0]]]
    assert ranks[0]["part"] == [2, 1, [*rows[2], *rows[0]]]
    assert "part" not in ranks[1]
    assert [found["matrix"] for found in ranks] == [[1, 2, 2], [0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 2, 2]]
    waits = (
        "wait for each other",
        *(f"device {rank}, rank {rank} of group_part: its first use at" for rank in range(2)),
    )
    for found in ranks[:2]:  # the one that is told first has gone on
        assert all(text in found["crossing parts"] for text in waits), found["crossing parts"]
    assert devices["sum"] == 2 * [5 * [3.0]]
    assert devices["wrong"] == []
    assert devices["unequal"] == [
        [*2 * [first * [1.0] + second * [2.0]], first * [2.0], second * [4.0]]
        for first, second in ((2, 2), (1, 3), (0, 2), (0, 0))
    ]
    assert devices["refused"] == 4 * [1]
    assert devices["wide"] == 2 * [[1, 1, 2, 2]]
    assert devices["unknown"] == 3 * [1]
    if missing_interfaces.DIFFERENCE.older:
        return  # its errors have no text
    for other, size in enumerate((16, 20)):
        call = rf"rank {other}: all_reduce number 1 of {size} bytes of float32 \(sum\) at .* on stream \d+"
        assert re.search(call, devices["mismatch"]), devices["mismatch"]
        wait = rf"device {other}, rank {other} of .* in crossing, .* on stream \d+, waits for rank {1 - other}"
        assert re.search(wait, devices["crossing"]), devices["crossing"]
    assert "107000" in devices["mismatch"]
    assert "507048" in devices["crossing"]


_THREADS = """
import npu_emulator
npu_emulator.activate(quiet=True)
import ctypes, threading, time, torch

lib, vp = ctypes.CDLL("libhccl.so"), ctypes.c_void_p

def joined(root, rank):
    group = vp()
    assert lib.HcclCommInitRootInfo(2, root, rank, ctypes.byref(group)) == 0
    return group

def reduced(group, rank, count=4):
    value = torch.full((count,), float(rank + 1), device=f"npu:{rank}")
    at, stream = vp(value.data_ptr()), vp(torch.npu.current_stream().npu_stream)
    assert lib.HcclAllReduce(at, at, ctypes.c_uint64(count), 4, 0, group, stream) == 0
    return value

def finish():
    torch.npu.current_stream().synchronize()

def late(groups, rank):
    time.sleep(0.3 * rank)                   # the other thread waits for the device meanwhile; this one has launched nothing
    value = reduced(groups[0], rank)
    finish()
    return value.tolist()

def sizes(groups, rank):
    reduced(groups[0], rank, 4 + rank)

def crossing(groups, rank):
    for group in groups[:: -1 if rank else 1]:
        reduced(group, rank)

def left_out(groups, rank):
    if rank == 0:
        reduced(groups[0], rank)
    reduced(groups[1], rank)

def ended(groups, rank):
    if rank == 0:
        reduced(groups[0], rank)

def over_threads(work):
    roots, answers = [(ctypes.c_char * 4108)() for _ in range(2)], [None, None]
    for root in roots:
        assert lib.HcclGetRootInfo(root) == 0
    def run(rank):
        torch.npu.set_device(rank)
        groups = [joined(root, rank) for root in roots]
        try:
            answers[rank] = work(groups, rank)
            finish()
        except RuntimeError as error:
            answers[rank] = str(error)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers

answer = {work.__name__: over_threads(work) for work in (late, sizes, crossing, left_out, ended)}
"""


def test_ranks_in_threads_of_one_process(ask: Callable[..., Any]) -> None:
    """A thread that has made its communicator will launch, although it has not yet. Each rank gets its own device's error.

    The time limit of 1836 s would end the test.
    """
    said = ask(_THREADS, NPU_EMULATOR_DEVICES="2")
    assert said["late"] == 2 * [4 * [3.0]]
    assert said["ended"][1] is None
    if missing_interfaces.DIFFERENCE.older:
        return  # its errors have no text
    for rank in range(2):
        for other, size in enumerate((16, 20)):
            assert f"rank {other}: all_reduce number 1 of {size} bytes" in said["sizes"][rank], said["sizes"]
            for fault in ("crossing", "left_out"):
                assert f"device {other}, rank {other} of group: all_reduce number 1 " in said[fault][rank], said[fault]
        assert "507048" in said["crossing"][rank] and "507048" in said["left_out"][rank]  # noqa: PT018 - one code
    assert "device 0, rank 0 of group: all_reduce number 1 " in said["ended"][0]


_MANY = """
import npu_emulator
npu_emulator.activate(quiet=True)
import ctypes, torch

lib, acl, vp, ranks = ctypes.CDLL("libhccl.so"), ctypes.CDLL("libascendcl.so"), ctypes.c_void_p, 66
torch.npu.set_device(0)
comms, streams = (vp * ranks)(), (vp * ranks)()
assert lib.HcclCommInitAll(ranks, (ctypes.c_int32 * ranks)(*ranks * [0]), comms) == 0
values = torch.ones(ranks, device="npu")
torch.npu.synchronize()
for rank in range(ranks):
    assert acl.aclrtCreateStream(ctypes.byref(streams, rank * ctypes.sizeof(vp))) == 0

def reduce(called):
    for rank in called:
        at = vp(values[rank].data_ptr())
        assert lib.HcclAllReduce(at, at, ctypes.c_uint64(1), 4, 0, vp(comms[rank]), vp(streams[rank])) == 0
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)

reduce(range(ranks))
sums = values.tolist()
said = reduce(range(ranks - 1))
refused = lib.HcclCommInitAll(1025, (ctypes.c_int32 * 1025)(), (vp * 1025)())
answer = [sums, said, refused]
"""


@pytest.mark.slow
def test_more_than_64_ranks_are_watched(ask: Callable[..., Any]) -> None:
    """Without that the program would never end. Larger groups than the emulated HCCL serves are refused."""
    sums, said, refused = ask(_MANY)
    assert sums == 66 * [66.0]
    assert refused == 1  # a wrong parameter
    if missing_interfaces.DIFFERENCE.older:
        return  # its errors have no text
    waits = re.findall(
        r"^  device 0, rank (\d+) of group: all_reduce number 2 .*, waits for rank 65$", said, re.MULTILINE
    )
    assert sorted(map(int, waits)) == list(range(65)), said
