"""The modelled time of collectives, and timelines of several ranks in one picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hccl_ranks import RANKS, on_emulated_ranks

import npu_emulator
from npu_emulator.clock.links import HCCS, ROCE, collective_us

MEGA = 1 << 20


def test_rings_trees_and_meshes() -> None:
    """A tree has fewer steps and a ring smaller ones; inside a server all links work at once; the formulas by hand."""
    assert ROCE.ring_us(4, 0) == 3 * ROCE.step_us
    assert ROCE.tree_us(4, 0) == 2 * ROCE.step_us
    assert ROCE.ring_us(4, 8 * MEGA) - ROCE.ring_us(4, 0) == pytest.approx(3 / 4 * 8 * MEGA / 22.6e3)
    assert HCCS.mesh_us(8, 8 * MEGA) == pytest.approx(10 + MEGA / 19.3e3)
    assert collective_us("all_reduce", range(8), MEGA) == 2 * collective_us("all_gather", range(8), MEGA)
    assert collective_us("send_receive", range(2), MEGA) == pytest.approx(10 + MEGA / 19.3e3)
    assert collective_us("send_receive", range(16), MEGA) == pytest.approx(20 + MEGA / 22.6e3)
    within, between = (
        collective_us("all_reduce", range(8), 64 * MEGA),
        collective_us("all_reduce", range(16), 64 * MEGA),
    )
    assert between - within == pytest.approx(2 * (ROCE.step_us + 8 * MEGA / 2 / 22.6e3))
    pair = collective_us("all_reduce", (0, 8), MEGA)  # one device in each server: no mesh
    assert pair == pytest.approx(2 * (ROCE.step_us + MEGA / 2 / 22.6e3))
    assert collective_us("all_reduce", (3, 3), MEGA) == collective_us("all_reduce", (0, 1), MEGA)
    # two and one: the mesh of the two, and a ring in which the one's port takes all
    assert collective_us("all_gather", (6, 7, 8), MEGA) == pytest.approx(
        10 + MEGA / 2 / 19.3e3 + 20 + MEGA / 2 / 22.6e3
    )
    assert collective_us("barrier", range(8), 0) == 10
    assert collective_us("all_reduce", range(1), MEGA) == 0


def _trace(path: Path, *spans: tuple[str, float, float, str]) -> Path:
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "modelled"}}]
    for name, begin, duration, meeting in spans:
        args = {"meeting": meeting} if meeting else {}
        events.append({"ph": "X", "name": name, "pid": 0, "tid": 0, "ts": begin, "dur": duration, "args": args})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_what_are_no_files_of_ranks_is_refused(tmp_path: Path) -> None:
    """None, one that is in no list, one twice, one that is not there, and files that are no timeline."""
    one, other = _trace(tmp_path / "0", ("mm", 0, 5, "")), tmp_path / "1"
    for wrong, said in (
        ([], r"a list of files, .*; got \[\]"),
        (str(one), r"a list of files, .*; got '.*0'"),
        ([one, tmp_path / "x" / ".." / "0"], "0 is there more than once"),
        ([one, other], "1 is none: No such file"),
    ):
        with pytest.raises(npu_emulator.EmulatorError, match=said):
            npu_emulator.merge_timelines(wrong, tmp_path / "all")
    for text in ("", "[]", '{"spans": []}', "3"):
        other.write_text(text)
        with pytest.raises(npu_emulator.EmulatorError, match="1 is none: it has no `traceEvents`"):
            npu_emulator.merge_timelines([one, other], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_collective_begins_with_its_last_rank(tmp_path: Path) -> None:
    """Work before it stays, work behind it moves; the second meeting moves by what is left; an arrow from who came last."""
    one = _trace(tmp_path / "0", ("mm", 0, 5, ""), ("sum", 5, 3, "a/1"), ("mm", 8, 20, ""), ("sum", 28, 3, "a/2"))
    two = _trace(tmp_path / "1", ("mm", 0, 9, ""), ("sum", 9, 3, "a/1"), ("mm", 12, 1, ""), ("sum", 13, 3, "a/2"))
    merged = json.loads(npu_emulator.merge_timelines([one, two], tmp_path / "both").read_text())["traceEvents"]
    begins = {(event["pid"], event["name"]): [] for event in merged if event["ph"] == "X"}
    for event in merged:
        if event["ph"] == "X":
            begins[event["pid"], event["name"]].append(event["ts"])
    assert begins == {(0, "mm"): [0, 12], (0, "sum"): [9, 32], (1, "mm"): [0, 12], (1, "sum"): [9, 32]}
    assert [(event["ph"], event["pid"], event["ts"]) for event in merged if event["ph"] in "sf"] == [
        ("s", 1, 9),
        ("f", 0, 9),
        ("s", 0, 32),
        ("f", 1, 32),
    ]
    assert {event["args"]["name"] for event in merged if event["name"] == "process_name"} == {
        "rank 0, modelled",
        "rank 1, modelled",
    }


_TIMELINES = (
    RANKS
    + """
def followed(rank, ranks):
    value = torch.ones(1 << 18, device="npu")
    dist.all_reduce(value)
    torch.npu.synchronize()
    with npu_emulator.timeline() as found:
        for _ in range(1 + 3 * rank):
            value.add_(1)
        dist.all_reduce(value)
        value.mul_(2)
        torch.npu.synchronize()
    found.save(f"{folder}/{rank}.json")
    return [(span.name, round(span.duration, 3)) for span in found.spans if span.meeting]

def overlapping(rank, ranks):                # on devices of two servers; a product runs behind the sum, then beside it
    torch.npu.set_device(8 * rank)
    value, factor = torch.ones(1 << 20, device="npu"), torch.ones(1 << 10, 1 << 10, device="npu")
    dist.all_reduce(value)
    torch.npu.synchronize()
    figures = []
    for beside in (False, True):
        with npu_emulator.timeline() as found:
            work = dist.all_reduce(value, async_op=beside)
            factor @ factor
            if beside:
                work.wait()
            torch.npu.synchronize()
        found.save(f"{folder}/{beside}{rank}.json")
        summary = summarise(found)
        figures.append([summary.communication, summary.hidden, *(span.duration for span in found.spans if not span.meeting)])
    return figures

def merged(name):
    target = f"{folder}/{name}all.json"
    npu_emulator.merge_timelines([f"{folder}/{name}0.json", f"{folder}/{name}1.json"], target)
    return json.load(open(target))["traceEvents"]

from npu_emulator.clock.summary import summarise
folder = tempfile.mkdtemp()
spans, figures = over_ranks(2, followed), over_ranks(2, overlapping)
answer = [spans, merged(""), figures, [merged(beside) for beside in (False, True)]]
"""
)


def _hidden(events: list[dict[str, Any]], rank: int) -> float:
    """The time of the merged picture in which a rank communicates and computes."""
    spans = {
        meets: [
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["ph"] == "X" and event["pid"] == rank and ("meeting" in event["args"]) is meets
        ]
        for meets in (True, False)
    }
    return sum(max(0.0, min(one[1], two[1]) - max(one[0], two[0])) for one in spans[True] for two in spans[False])


@on_emulated_ranks
def test_the_timelines_of_two_ranks(ask: Callable[..., Any]) -> None:
    """Both ranks price the links; in the common picture their all-reduce begins when the slower rank comes.

    A product overlaps with an all-reduce for the whole of the shorter one, and not at all where the program waits first. Devices 0
    and 8 are of two servers.
    """
    spans, events, figures, pictures = ask(_TIMELINES, NPU_EMULATOR_DEVICES="9")
    for rank in range(2):
        (communication, hidden, product), (again, beside, same) = figures[rank]
        assert communication == again == pytest.approx(2 + collective_us("all_reduce", (0, 8), 4 * MEGA))
        assert product == same > 2
        assert [hidden, beside] == pytest.approx([0, min(communication, product)])
        assert [_hidden(picture, rank) for picture in pictures] == pytest.approx([hidden, beside], abs=0.01)
    assert spans == 2 * [[["hccl.all_reduce", round(2 + collective_us("all_reduce", range(2), MEGA), 3)]]]
    reduced = {
        event["pid"]: event["ts"] for event in events if event["ph"] == "X" and event["name"] == "hccl.all_reduce"
    }
    ends = [
        event["ts"] + event["dur"]
        for event in events
        if event["ph"] == "X" and event["pid"] == 1 and "add_" in event["name"]
    ]
    assert reduced[0] == reduced[1] == pytest.approx(max(ends))
    assert [(event["ph"], event["pid"]) for event in events if event.get("cat") == "meeting"] == [("s", 1), ("f", 0)]
