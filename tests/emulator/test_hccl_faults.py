"""What hardware hides, found at once: ranks that wait for each other; faults on purpose, and recovery from them."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hccl_ranks import RANKS, on_emulated_ranks, with_all_interfaces

import npu_emulator
from npu_emulator.errors import EmulatorError
from npu_emulator.faults import Fault, parse_faults
from npu_emulator.settings import Settings

pytestmark = on_emulated_ranks

_SAID = (
    RANKS
    + """
import pathlib, threading, time

def reduced(group=None):
    value = torch.ones(4, device="npu")
    dist.all_reduce(value, group=group)
    return value

def finish():
    torch.npu.synchronize()

def crossing(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups:
        reduced(group)
    finish()
    for group in groups[:: 1 if rank == 0 else -1]:
        reduced(group)
    finish()

def circle(rank):                            # three communicators of two ranks; no two ranks wait for each other directly
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    for group in groups:
        if dist.get_rank(group) >= 0:
            reduced(group)
    finish()
    for number in {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]:
        reduced(groups[number])
    finish()

def elsewhere(rank):                         # rank 1 leaves out one collective of the world
    group = dist.new_group([0, 1])
    reduced(group)
    if rank == 0:
        reduced()
    reduced(group)
    finish()

def both_send(rank):
    value = torch.ones(4, device="npu")
    dist.send(value, 1 - rank)
    dist.recv(value, 1 - rank)
    finish()

def no_receive(rank):
    value = torch.ones(4, device="npu")
    dist.send(value, 1) if rank == 0 else dist.recv(value, 0)
    finish()
    if rank == 0:
        dist.send(value, 1)
    else:
        dist.destroy_process_group()
    finish()

def shared():                                # how many shared files this process has open, and how many it has in its memory
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:            # that of the list itself
            continue
    with open("/proc/self/maps") as maps:
        return [sum("memfd:npu_emulator " in text for text in texts) for texts in (names, maps)]

def killed(rank):
    npu_emulator.inject_faults("kill:1:2")
    assert shared() == [1, 2]                # the board of the process; in memory also the communicator
    reduced()
    try:
        reduced()
        finish()
    finally:
        dist.destroy_process_group()
        assert shared() == [1, 1], shared()

def dropped(rank):                           # then the group is made anew
    npu_emulator.inject_faults("drop:0:2")
    reduced()
    try:
        reduced()
        finish()
    except RuntimeError as error:
        npu_emulator.inject_faults("")
        dist.destroy_process_group()
        dist.init_process_group("hccl", init_method=f"file://{again}", rank=rank, world_size=2)
        raise RuntimeError(f"{error}; made anew: {reduced()[0].item()}") from error

def delayed(rank):
    npu_emulator.inject_faults("delay:1:1:2")
    if rank == 1:                            # a clock that all processes have in common
        pathlib.Path(begun).write_text(str(time.monotonic()))
    assert reduced()[0] == 2
    raise RuntimeError(f"late: {time.monotonic() - float(pathlib.Path(begun).read_text()) >= 1.9}")

def aborted(rank):                           # rank 1 never comes; another thread of rank 0 ends the wait
    reduced()
    finish()
    if rank == 1:
        while not os.path.exists(mark):
            time.sleep(0.05)
        return
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
    def end():
        while not os.path.exists(started):
            time.sleep(0.05)
        backend.abort_hccl_comm("tired")
    thread = threading.Thread(target=end)
    thread.start()
    try:
        reduced()
        open(started, "w").close()
        finish()
    finally:
        thread.join()
        open(mark, "w").close()

def destroyed(rank):                         # a captured graph still has the communicator
    value, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        total = value * 2
        dist.all_reduce(total)
    graph.replay()
    assert total[0] == 4
    dist.destroy_process_group()
    graph.replay()
    finish()

def left_out(rank):                          # rank 1 leaves out the last collective and ends
    if rank == 0:
        reduced()
        finish()

def first_crossing(rank):                    # the groups have no communicators yet
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups[:: 1 if rank == 0 else -1]:
        reduced(group)

def first_elsewhere(rank):                   # rank 1 goes on with the world
    group = dist.new_group([0, 1])
    if rank == 0:
        reduced(group)
    reduced()
    finish()

def first_message(rank):                     # a message is the first use of a communicator for two ranks
    group, value = dist.new_group([0, 1]), torch.ones(4, device="npu")
    reduced(group) if rank == 0 else dist.recv(value, 0)

def first_late(rank):                        # rank 1 is late and no more
    group = dist.new_group([0, 1])
    time.sleep(0.2 * rank)
    assert reduced(group)[0] == 2

def first_left_out(rank):                    # rank 1 has ended, and knows the root info
    group = dist.new_group([0, 1])
    if rank == 0:
        reduced(group)

def first_without_root(rank):
    group = dist.new_group([0, 1])
    if rank == 1:
        reduced(group)

def said_by(fault):
    def work(rank, ranks):
        reduced()
        finish()
        try:
            fault(rank)
        except RuntimeError as error:
            return str(error)
        return ""
    return work

again, begun, mark, started = (tempfile.mktemp() for _ in range(4))
faults = (crossing, elsewhere, both_send, no_receive, killed, dropped, delayed, aborted, destroyed, left_out,
          first_crossing, first_elsewhere, first_message, first_late, first_left_out, first_without_root)
answer = {fault.__name__: over_ranks(2, said_by(fault)) for fault in faults} | {"circle": over_ranks(3, said_by(circle))}
"""
)


def _processes(mark: str) -> list[str]:
    """Return the processes whose environment has the mark. Shared memory has no name, so it ends with the last of them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


@with_all_interfaces
def test_ranks_that_wait_for_each_other_are_told_at_once_and_faults_can_be_recovered_from(
    ask: Callable[..., Any],
) -> None:
    """Each rank learns what all of them wait for, with stacks and streams. The time limit of 1836 s would end the test."""
    mark = str(uuid.uuid4())
    said = ask(_SAID, NPU_EMULATOR_DEVICES="3", TORCH_HCCL_ASYNC_ERROR_HANDLING="0", MARK=mark)
    assert _processes(mark) == []
    deadlocks = {"crossing": 2, "elsewhere": 2, "both_send": 2, "circle": 3}
    first_uses = ("first_crossing", "first_elsewhere", "first_message")
    for fault, ranks in (deadlocks | dict.fromkeys(first_uses, 2)).items():
        waits = {
            tuple(re.findall(r"^  device (\d), rank \d of .*, waits for rank \d", text, re.MULTILINE))
            for text in said[fault]
        }
        assert waits == {tuple(map(str, range(ranks)))}, said[fault]
        assert all("507048" in text and "the ranks wait for each other" in text for text in said[fault])
    first = said["crossing"][0]
    assert re.search(
        r"all_reduce number 2 of 16 bytes of float32 \(sum\) at \S+:\d+ in reduced, from \S+:\d+ in crossing, ", first
    )
    assert re.search(r"on stream \d+, waits for rank 1$", first, re.MULTILINE)
    common = r"these ranks of group_name_0 have all finished all_reduce number 1 \(sum\) at \S+:\d+ in reduced, "
    assert all(re.search(common, text) for fault in ("elsewhere", *first_uses) for text in said[fault]), said
    for rank, group in enumerate(("group_name_1", "group_name_2")):
        first_use = rf"device {rank}, rank {rank} of {group}: its first use at \S+:\d+ in reduced, from \S+:\d+ in first_crossing, "
        assert re.search(first_use, said["first_crossing"][1 - rank])
    message = "device 1, rank 1 of group_name_0 (messages between ranks 0 and 1 of group_name_0): its first use at "
    assert all(message in text for text in said["first_message"])
    assert said["first_late"] == 2 * [""]
    for rank, fault in enumerate(("first_left_out", "first_without_root")):
        ended = rf"rank {1 - rank} has ended \(process \d+\); its last call, finished, was in group_name_0: all_reduce number 1 "
        assert re.search(ended, said[fault][rank]), said[fault]
        assert "507057" in said[fault][rank]
        assert said[fault][1 - rank] == ""
    assert "send of 16 bytes of float32 to rank 1 at " in said["both_send"][0]
    assert "rank 0 waits for rank 1 of group, which has left the communicator" in said["no_receive"][0]
    assert "send of 16 bytes of float32 to rank 1 at " in said["no_receive"][0]
    assert "which has ended" in said["killed"][0]
    last = r"its last call, begun and not finished, was in group_name_0: all_reduce number 3 .* in reduced, from \S+ in killed, "
    assert re.search(last, said["killed"][0]), said["killed"]
    assert said["killed"][1] is None
    assert "the connection of device 0 was dropped on purpose" in said["dropped"][0]
    assert all(text.endswith("; made anew: 2.0") for text in said["dropped"]), said["dropped"]
    assert "rank 1 waits for rank 0 of group_name_0, which has failed: the connection of device 0" in said["dropped"][1]
    assert "507057" in said["killed"][0] and "507057" in said["dropped"][1]  # noqa: PT018 - one code
    assert said["delayed"] == 2 * ["late: True"]
    assert "was destroyed before its collectives had ended" in said["aborted"][0]
    assert said["aborted"][1] == ""
    for text in said["destroyed"]:
        assert "507057" in text and "needs the communicator group_name_0, which was destroyed" in text  # noqa: PT018 - one error
    assert "which has ended" in said["left_out"][0]


def test_faults_are_read() -> None:
    """The grammar, and its errors."""
    assert parse_faults("kill:1:5, delay:0:2:0.25,drop:3:1", 4) == (Fault(0, 1, 5), Fault(1, 0, 2, 250), Fault(2, 3, 1))
    assert parse_faults("", 1) == ()
    for wrong in ("kill", "kill:1", "kill:1:0", "delay:0:2", "drop:0:1:2", "kill:-1:2"):
        with pytest.raises(EmulatorError, match="a fault"):
            parse_faults(wrong, 4)
    with pytest.raises(EmulatorError, match=r"names device 9, .*devices is 2 \(0..1\)"):
        Settings(devices=2, faults="kill:0:1,kill:9:1")
    devices = npu_emulator.current().settings.devices
    with pytest.raises(EmulatorError, match=f"names device {devices}"):
        npu_emulator.inject_faults(f"drop:{devices}:1")
