"""Timelines of several ranks in one file: each rank is a process of the picture, and arrows lead from the rank that came last.

Each rank's own clock knows nothing of the others. A collective begins when its last rank has come; on the other ranks it, and all
that follows, is moved to that time. So the gaps in the common picture are the time that ranks wait for each other.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_emulator.errors import EmulatorError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["merge_timelines"]

_Event = dict[str, Any]


class _Rank:
    """One rank's events, and by how much they move from which time on."""

    def __init__(self, number: int, events: list[_Event]) -> None:
        self.number = number
        self.events = events
        found = [event for event in events if event["ph"] == "X" and "meeting" in event["args"]]
        self.meetings = sorted(found, key=lambda event: float(event["ts"]))
        self._from = [float("-inf")]
        self._by = [0.0]

    def begin(self, event: _Event) -> float:
        """When an event begins in the common picture, as far as is known."""
        return float(event["ts"]) + self._by[bisect_right(self._from, event["ts"]) - 1]

    def delay(self, event: _Event, until: float) -> None:
        """Move an event, and all from its beginning on, to a later time."""
        later = until - self.begin(event)
        place = bisect_right(self._from, event["ts"])
        if self._from[place - 1] != event["ts"]:
            self._from.insert(place, event["ts"])
            self._by.insert(place, self._by[place - 1])
            place += 1
        self._by[place - 1 :] = [by + later for by in self._by[place - 1 :]]

    def moved(self) -> list[_Event]:
        """The events at their times in the common picture, as those of process `number`."""
        found = []
        for event in self.events:
            changed = {**event, "pid": self.number}
            if "ts" in event:
                changed["ts"] = round(self.begin(event), 3)
            if "id" in event:
                changed["id"] = f"{self.number}.{event['id']}"
            if event["name"] == "process_name":
                changed["args"] = {"name": f"rank {self.number}, {event['args']['name']}"}
            found.append(changed)
        return found


def merge_timelines(files: Sequence[str | Path], target: str | Path) -> Path:
    """Write the timelines of several ranks, each from `Timeline.save`, into one file for https://ui.perfetto.dev.

    Args:
        files: one of each rank, rank 0 first.
        target: the file to write.

    Returns:
        `target`.

    Raises:
        EmulatorError: there is no file, a file is there twice or is no timeline.
    """
    ranks = [_Rank(number, _events(file)) for number, file in enumerate(_of_each_rank(files))]
    arrows: list[_Event] = []
    for number, (meeting, parts) in enumerate(_in_order(ranks).items()):
        begins = {rank.number: rank.begin(event) for rank, event in parts}
        last = max(begins, key=lambda rank: (begins[rank], -rank))
        for rank, event in parts:
            rank.delay(event, begins[last])
        source = next(event for rank, event in parts if rank.number == last)
        for rank, event in parts:
            if rank.number != last:
                common = {"name": source["name"], "cat": "meeting", "id": f"{meeting}.{number}.{rank.number}"}
                arrows.append({"ph": "s", **common, "pid": last, "tid": source["tid"], "ts": round(begins[last], 3)})
                arrows.append(
                    {
                        "ph": "f",
                        "bp": "e",
                        **common,
                        "pid": rank.number,
                        "tid": event["tid"],
                        "ts": round(begins[last], 3),
                    }
                )
    events = [event for rank in ranks for event in rank.moved()]
    written = Path(target)
    written.write_text(json.dumps({"traceEvents": [*events, *arrows], "otherData": {"time": "modelled, not measured"}}))
    return written


def _of_each_rank(files: Sequence[str | Path]) -> list[Path]:
    """The files, of which each is another one."""
    if isinstance(files, (str, Path)) or not files:
        raise EmulatorError(f"merge_timelines takes a list of files, one of each rank; got {files!r}")
    paths = [Path(file) for file in files]
    twice = [path for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if twice:
        raise EmulatorError(
            f"merge_timelines takes one file of each rank; {', '.join(map(str, twice))} is there more than once"
        )
    return paths


def _events(file: Path) -> list[_Event]:
    try:
        return list(json.loads(file.read_text())["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it has no `traceEvents`"
        raise EmulatorError(f"merge_timelines takes files that Timeline.save wrote; {file} is none: {why}") from error


def _in_order(ranks: list[_Rank]) -> dict[str, list[tuple[_Rank, _Event]]]:
    """The meetings of two ranks or more: one after all those that come before it on each of its ranks."""
    parts: dict[str, list[tuple[_Rank, _Event]]] = {}
    for rank in ranks:
        for event in rank.meetings:
            parts.setdefault(event["args"]["meeting"], []).append((rank, event))
    place = {rank.number: {event["args"]["meeting"]: at for at, event in enumerate(rank.meetings)} for rank in ranks}
    common = {meeting: found for meeting, found in parts.items() if len(found) > 1}
    return dict(sorted(common.items(), key=lambda item: max(place[rank.number][item[0]] for rank, _ in item[1])))
