"""The first use of a group whose ranks nobody has named: by HCCL's C interface or a rank table, and with settings of torch_npu."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hccl_ranks import RANKS, on_emulated_ranks

from npugraph_ex.versions import missing_interfaces

pytestmark = on_emulated_ranks

_C_INTERFACE = (
    RANKS
    + """
import ctypes, time
lib, acl, vp = ctypes.CDLL("libhccl.so"), ctypes.CDLL("libascendcl.so"), ctypes.c_void_p
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p

def made(call, *arguments):                  # a communicator, or why there is none
    group = vp()
    return group if call(*arguments, ctypes.byref(group)) == 0 else acl.aclGetRecentErrMsg().decode()

def by_table(name, rank, ranks=2):
    path = f"{folder}/{name}{ranks}"
    listed = [{"device_id": str(number), "rank_id": str(number)} for number in range(ranks)]
    with open(f"{path}.{rank}", "w") as file:
        json.dump({"server_list": [{"server_id": name, "device": listed}]}, file)
    return made(lib.HcclCommInitClusterInfo, f"{path}.{rank}".encode(), rank)

def by_root(name, rank, ranks=2):
    path, root = f"{folder}/root {name}", (ctypes.c_char * 4108)()
    if rank == 0:
        assert lib.HcclGetRootInfo(root) == 0
        with open(f"{path}.new", "wb") as file:
            file.write(root)
        os.rename(f"{path}.new", path)
    while rank != 0 and not os.path.exists(path):
        time.sleep(0.01)
    if rank != 0:
        root = open(path, "rb").read()
    return made(lib.HcclCommInitRootInfo, ranks, root, rank)

def left_out(make, rank, missing=1):
    return "" if rank == missing else make(f"left out {missing}", rank)

def crossing(make, rank):                    # each is the first rank of a group that the other one does not come to
    return make(f"crossing {rank}", 0)

def elsewhere(make, rank):                   # rank 1 goes on with the world
    if rank == 0:
        return make("elsewhere", 0)
    try:
        reduced()
    except RuntimeError as error:
        return str(error)

def late(make, rank):
    time.sleep(0.3 * rank)
    return "" if isinstance(make("late", rank), vp) else "no communicator"

def computes(make, rank):                    # rank 1 lives, and waits for nothing that the device knows
    path = f"{folder}/computes {make.__name__}"
    if rank == 0:
        os.environ["HCCL_CONNECT_TIMEOUT"] = "1"   # only here: the ranks may need longer for the world's first use
        told = make("computes", 0)
        open(path, "w").close()
        return told
    while not os.path.exists(path):
        time.sleep(0.01)
    return ""

def three(make, rank):                       # rank 2 has ended; 0 and 1 have both come
    return "" if rank == 2 else make("three", rank, 3)

def reduced():
    dist.all_reduce(torch.ones(4, device="npu"))
    torch.npu.synchronize()

def said_by(work, *arguments):
    def told(rank, ranks):
        if dist.is_initialized():
            reduced()
        return work(*arguments[:1], rank, *arguments[1:])
    return told

folder = tempfile.mkdtemp()
answer = {}
os.environ["HCCL_CONNECT_TIMEOUT"] = "1800"
for make in (by_table, by_root):
    for work in (left_out, crossing, elsewhere, late):
        answer[f"{make.__name__} {work.__name__}"] = over_ranks(2, said_by(work, make))
    answer[f"{make.__name__} three"] = over_ranks(3, said_by(three, make))
    answer[f"{make.__name__} computes"] = over_ranks(2, said_by(computes, make))
answer["by_table without rank 0"] = over_ranks(2, said_by(left_out, by_table, 0))
dist.init_process_group = lambda *_, **__: None  # a program that does not say how many processes it has
os.environ["HCCL_CONNECT_TIMEOUT"] = "1"
answer["undeclared"] = over_ranks(2, said_by(left_out, by_root))
os.environ["HCCL_CONNECT_TIMEOUT"] = "1800"
answer["undeclared table"] = over_ranks(2, said_by(left_out, by_table))
os.environ["WORLD_SIZE"] = "2"
answer["declared"] = over_ranks(2, said_by(left_out, by_root))
"""
)


def test_a_rank_that_nobody_has_named_and_that_does_not_come_is_found_at_once(ask: Callable[..., Any]) -> None:
    """Where a program says how many processes it has, they are known. The time limit of 1800 s would end the test.

    It is the last resort only where the rank lives and computes, or may never have been started.
    """
    said = ask(_C_INTERFACE, NPU_EMULATOR_DEVICES="3", TORCH_HCCL_ASYNC_ERROR_HANDLING="0")
    if missing_interfaces.DIFFERENCE.older:
        return  # its errors have no text
    for make in ("by_table", "by_root"):
        assert said[f"{make} late"] == ["", ""]
        for waits, texts in (("left_out", 1), ("three", 2)):
            found = said[f"{make} {waits}"]
            assert found[texts:] == [""], found
            # Who comes after another rank has given up sees only that the group failed, or that the rank has gone.
            assert all(
                "507057" in text or (re.search("was not made|cannot reach rank 0", text) and "107000" in text)
                for text in found[:texts]
            ), found
            left = r"too few processes of this program are left: process \d+ has ended; its last call, finished, was in group_"
            assert any("507057" in text and re.search(left, text) for text in found[:texts]), found
        for fault in ("crossing", "elsewhere"):
            for text in said[f"{make} {fault}"]:
                assert "the ranks wait for each other" in text and "507048" in text, said  # noqa: PT018 - one error
                assert re.search(r"device 0, rank 0 of group: its first use at \S+ in made, .*, waits for rank 1", text)
        for rank, text in enumerate(said[f"{make} crossing"]):
            assert f"device {1 - rank}, rank 0 of group: its first use at" in text
        for text in said[f"{make} elsewhere"]:
            assert "device 1, rank 1 of group_name_0: all_reduce number 2 of 16 bytes" in text
        assert "did not come in 1 s (HCCL_CONNECT_TIMEOUT)" in said[f"{make} computes"][0]
    assert "the group of the rank table" in said["by_table without rank 0"][1]
    for name in ("by_table without rank 0", "undeclared table", "declared"):
        assert "too few processes of this program are left" in "".join(said[name]), said[name]
    assert "did not come in 1 s (HCCL_CONNECT_TIMEOUT)" in said["undeclared"][0]


_SETTINGS = (
    RANKS
    + """
def reduced(group=None):
    value = torch.ones(4, device="npu")
    dist.all_reduce(value, group=group)
    return value

def crossing(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups[:: 1 if rank == 0 else -1]:
        reduced(group)

def ended(missing):
    def work(rank):
        group = dist.new_group([0, 1])
        if rank != missing:
            reduced(group)
    return work

def said_by(fault):
    def work(rank, ranks):
        assert reduced()[0] == 2
        torch.npu.synchronize()
        try:
            fault(rank)
        except RuntimeError as error:
            return str(error)
        return ""
    return work

answer = [over_ranks(2, said_by(fault)) for fault in (crossing, ended(0), ended(1))]
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["TORCH_HCCL_ENABLE_MONITORING", "TORCH_HCCL_DUMP_ON_TIMEOUT", "TORCH_HCCL_RANKS_PER_ROOT"]
)
def test_settings_of_torch_npu_do_not_hide_a_rank_that_does_not_come(ask: Callable[..., Any], setting: str) -> None:
    """With the first two, torch_npu's threads use the store until the process ends; with the third, each rank has a root info."""
    settings = {setting: "1", "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"}
    crossing, *ended = ask(_SETTINGS, NPU_EMULATOR_DEVICES="2", **settings)
    if missing_interfaces.DIFFERENCE.older:
        return  # its errors have no text
    for text in crossing:
        assert "507048" in text, crossing
        for rank in range(2):
            assert f"device {rank}, rank {rank} of group_name_{1 + rank}: its first use at" in text, crossing
    for missing, found in enumerate(ended):
        assert found[missing] == ""
        assert re.search(rf"rank {missing} has ended \(process \d+\); its last call", found[1 - missing]), found
        assert "507057" in found[1 - missing]
