"""The picture and the summary of a modelled timeline: what is drawn is what ran, and the numbers are those of the spans."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch

import npu_emulator
from npu_emulator.clock.picture import picture
from npu_emulator.clock.summary import covered, summarise
from npu_emulator.clock.timeline import Span, Timeline
from npugraph_ex.versions import captured_generators


class _Page(HTMLParser):
    """Counts elements by tag and class, and notes tags that are opened and not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self.boxes: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.seen.append((tag, found.get("class") or ""))
        if tag == "i" and "title" in found:
            self.boxes.append(found["title"] or "")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def clock() -> Timeline:
    """Eager work, and two replays of a graph on two lanes."""
    x = torch.zeros(1 << 20, device="npu")
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with npu_emulator.timeline() as found:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, stream=torch.npu.Stream()):  # the next of the pool, so not `side`
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                y = x + 1
                y = y * 3
            z = x * 2
            torch.npu.current_stream().wait_stream(side)
            w = y + z
        graph.replay()
        graph.replay()
        torch.npu.synchronize()
        v = w.neg()
        torch.npu.synchronize()
    del v
    return found


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
def test_the_summary_is_the_arithmetic_of_the_spans(clock: Timeline) -> None:
    """On one stream the kernels take their sum; two lanes save what overlaps; idle is what a lane does not cover."""
    summary = summarise(clock)
    total = sum(span.duration for span in clock.spans)
    assert summary.whole.serial == pytest.approx(total)
    assert summary.whole.busy == pytest.approx(clock.end)
    (replays,) = summary.graphs
    mul = next(span for span in clock.spans if span.name == "aten.mul.Tensor")
    assert replays.kernels == 8
    assert replays.serial - replays.busy == pytest.approx(2 * mul.duration)
    assert replays.speed_up == pytest.approx(replays.serial / replays.busy)
    assert sum(span.duration for span in summary.critical) == pytest.approx(clock.end)
    lanes = {lane.name.split(", ")[-1]: lane for lane in summary.lanes}
    assert lanes.keys() == {"lane 0", "lane 1", "stream 0"}
    for lane in lanes.values():
        assert lane.idle == pytest.approx(1 - sum(span.duration for span in lane.spans) / clock.end)
    assert "speed-up" in str(summary)


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
def test_idle_is_what_the_picture_shows_as_idle(clock: Timeline) -> None:
    """The number beside a lane is the part of its track without a box, for a lane with a single kernel too."""
    text = picture(clock, title="t")
    told = [int(number) for number in re.findall(r"idle (\d+)%", text)]
    tracks = re.findall(r'(?s)<div class="track">(.*?)</div>', text)
    drawn = [sum(map(float, re.findall(r"width:([\d.]+)%", track))) for track in tracks]
    assert len(told) == len(drawn) == 3
    assert told == [pytest.approx(100 - width, abs=0.51) for width in drawn]
    assert max(told) > 80  # the lane of one kernel behind two replays


def test_covered_counts_no_time_twice() -> None:
    """Overlapping, nested, apart and touching spans."""
    spans = [Span("a", "s", start, length, "") for start, length in ((0, 4), (1, 2), (3, 3), (10, 1), (11, 1))]
    assert covered(spans) == pytest.approx(8)
    assert covered([]) == 0


def test_the_picture_draws_each_span_and_each_event(clock: Timeline) -> None:
    """One lane a stream, one box a kernel with its time and line, a curve and its end for each event; tags are closed."""
    text = picture(clock, title="a <b> & c")
    page = _Page(text)
    assert not page.open
    summary = summarise(clock)
    assert page.seen.count(("div", "lane")) == len(summary.lanes)
    assert len(page.boxes) == len(clock.spans)
    assert page.seen.count(("i", "critical")) - 1 == len(summary.critical)  # one is in the legend
    assert page.seen.count(("path", "")) == page.seen.count(("b", "")) == len(clock.arrows) > 0
    assert page.seen.count(("path", "halo")) == page.seen.count(("path", ""))  # seen over boxes of any colour
    assert "a &lt;b&gt; &amp; c" in text
    assert any("test_picture.py" in box for box in page.boxes)
    places = [float(place) for place in re.findall(r"left:([\d.]+)%", text)]
    assert 0 <= min(places) <= max(places) <= 100


def test_the_page_needs_nothing_else(clock: Timeline) -> None:
    """No script, and no address of anything outside."""
    text = picture(clock, title="t")
    assert "<script" not in text
    assert "http" not in text
    assert "width=device-width" in text


def test_an_empty_timeline_has_a_page_too() -> None:
    """Nothing ran: the page says so."""
    with npu_emulator.timeline() as found:
        pass
    assert "Nothing ran" in picture(found, title="t")
