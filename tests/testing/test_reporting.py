"""The page and its drawings: well-formed, complete, and true to what they show; the books that a run is resumed from."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from npu_emulator.pages import Drawing, Facts, Page, PageTable, Section, Verbatim
from npugraph_ex import testing
from npugraph_ex.testing import Case, Input
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex_conformance import known_failures, page, results, session
from npugraph_ex_conformance.folders import FolderError
from npugraph_ex_conformance.reporting.charts import binned, draw_histogram
from npugraph_ex_conformance.reporting.drawing import draw_program
from npugraph_ex_conformance.reporting.modelled import modelled_spans

PROGRAM = """\
def program(x0, x1):
    v0 = torch.ops.aten.add.Tensor(x0, x1)
    torch.ops.aten.mul_.Tensor(x0, 2)
    p1_a, p1_b = torch.ops.npu.npu_rms_norm.default(v0, x1)
    v2 = torch.ops.aten.relu.default(x0)
    return (p1_a, v2)
"""


def _parsed(text: str) -> ET.Element:
    """Well-formed XML, or an error."""
    return ET.fromstring(text)  # noqa: S314 - our own drawings


def _texts(svg: str) -> list[str]:
    return [element.text or "" for element in _parsed(svg).iter("text")]


def test_a_graph_has_every_call_and_every_edge() -> None:
    """Six boxes and the results; what reads a written value hangs below the write; the planted call is marked."""
    svg = draw_program(PROGRAM)
    assert sorted(_texts(svg)) == sorted(
        ["x0", "x1", "add.Tensor", "mul_.Tensor", "npu.npu_rms_norm", "relu", "results"]
    )
    root = _parsed(svg)
    boxes = {text.text: float(text.get("y", 0)) for text in root.iter("text")}
    assert boxes["x0"] < boxes["mul_.Tensor"] < boxes["relu"] < boxes["results"]
    assert boxes["add.Tensor"] < boxes["npu.npu_rms_norm"]
    # x0, x1 -> add; x0 -> mul_; add, x1 -> norm; mul_ -> relu; norm, relu -> results
    assert len(list(root.iter("path"))) == 8
    assert [rect.get("class") for rect in root.iter("rect")].count("planted") == 1
    right = max(float(rect.get("x", 0)) + float(rect.get("width", 0)) for rect in root.iter("rect"))
    assert right <= float(root.get("width", 0))


def test_a_graph_says_what_runs_aside() -> None:
    """Boxes in a scope name its stream; scopes, records and waits are no boxes."""
    enter = "torch.ops.npugraph_ex.scope_enter.default(['_user_stream_label'], ['side'])"
    lines = (
        "def program(x0):",
        "begun = torch.ops.npugraph_ex.record.default()",
        enter,
        "torch.ops.npugraph_ex.wait.default([begun])",
        "p0_a = torch.ops.aten.relu.default(x0)",
        "torch.ops.npugraph_ex.scope_exit.default()",
        "v0 = torch.ops.aten.neg.default(p0_a)",
        "return (v0,)",
    )
    assert _texts(draw_program("\n    ".join(lines) + "\n")) == ["x0", "relu on side", "neg", "results"]


def test_a_histogram_counts_every_value_once() -> None:
    """Zero is equal, an edge belongs to the bin that it ends, nothing is lost above the last."""
    values = [0.0, 0.0, 0.25, 0.5, 0.75, 16.0, 17.0, float("inf")]
    assert dict(binned(values)) == {
        "equal": 2, "up to 0.5": 2, "up to 1": 1, "up to 2": 0, "up to 4": 0, "up to 8": 0, "up to 16": 1, "above 16": 2,
    }  # fmt: skip
    bars = [float(rect.get("width", 0)) for rect in _parsed(draw_histogram(values)).iter("rect")]
    assert bars[0] == bars[1] == bars[-1] == max(bars)
    assert bars[3] == 0


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    """What tests print is escaped; no script, no address; an empty section is left out; wrong is coloured."""
    blocks = [
        PageTable(("a", "b"), [("<x>", "right"), (1, "2 WRONG")]),
        Verbatim("a < b & c", "why <not>"),
        Facts([("n", 1)]),
    ]
    drawing = Drawing(draw_program(PROGRAM), "caption")
    sections = [Section("One", [*blocks, drawing], "said"), Section("Empty", [PageTable(("a",), [])])]
    page_ = Page(
        "Title", [*sections, *(Section(f"More {n}", blocks) for n in range(4))], "all <right>", True, ["seed 3"]
    )
    text = page_.html()
    root = _parsed(text.replace("<!doctype html>", ""))
    assert not any(word in text for word in ("<script", "http", "src=", "Empty", "<x>"))
    assert '<td class="good">right</td>' in text
    assert '<td class="bad">2 WRONG</td>' in text
    # By keyboard and by ear: the contents lead to every section; what scrolls can be reached and has a name.
    anchors = [link.get("href") for link in root.iter("a")]
    assert anchors == [f"#{part.get('id')}" for part in root.iter("section")]
    assert len(anchors) == 5
    scrolling = [part for part in root.iter("div") if part.get("class") == "wide"]
    assert all(part.get("tabindex") == "0" and part.get("aria-label") for part in scrolling)
    assert root.get("lang") == "en"
    # A notebook shows the same document in a frame; a log shows all of its text.
    (frame,) = [_parsed(page_._repr_html_().replace(' loading="lazy"', ""))]
    assert (frame.tag, str(frame.get("srcdoc")).split()) == ("iframe", text.split())
    assert all(
        words in str(page_) for words in ("Title", "all <right>", "seed 3", "<x>  right", "a < b & c", "caption")
    )


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_all_text_has_contrast(scheme: int) -> None:
    """4.5 to 1, as WCAG 2 asks: each colour of text on the page's background, on boxes, and white on the chart's work."""
    style = resources.files("npu_emulator.pages").joinpath("page.css").read_text()
    roots = [dict(re.findall(r"--(\w+): (#\w+)", root)) for root in re.findall(r":root \{(.*?)\}", style, re.DOTALL)]
    colours = {name: _luminance(value) for name, value in roots[scheme].items()}
    pairs = [(text, ground) for ground in ("paper", "box") for text in ("ink", "faint", "good", "bad")]
    pairs += [("link", "paper"), ("ink", "mark")]
    assert {pair: ratio for pair in pairs if (ratio := _contrast(colours[pair[0]], colours[pair[1]])) < 4.5} == {}
    assert min(_contrast(1.0, colours[work]) for work in ("work", "critical")) >= 4.5


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_modelled_spans_of_a_program() -> None:
    """Eager mode and a replay run the same kernels of an unfused program, each from time zero."""
    steps = ("v0 = torch.ops.aten.relu.default(x0)", "v1 = torch.ops.aten.neg.default(v0)", "return (v1,)")
    source = "\n    ".join(("def program(x0):", *steps)) + "\n"
    eager, replayed = modelled_spans(Case(source, (Input((4, 8)),)))
    assert min(span.start for span in eager) == min(span.start for span in replayed) == 0
    names = [[span.name for span in spans] for spans in (eager, replayed)]
    assert {span.stream for span in replayed} == {"stream 0", "stream 0, lane 0"}
    for kernel in ("relu", "neg"):
        assert all(sum(kernel in name for name in found) == 1 for found in names), names


def test_the_slowest_program_may_be_one_of_a_client() -> None:
    """Its operators are put away when its test ends; its timeline is drawn all the same."""
    with client_operators():
        case = Case.of(testing.sample(testing.planted_programs(pattern="qk_norm_rope", dynamic=False, prefix=0), 1))
    target = testing.start_target("auto")
    run = session.Run(target, session.PROFILES["quick"], 0, results.Books(None, {}), slowest=(1.5, case))
    slowest = run.timed_slowest()
    assert slowest.seconds == 1.5
    assert slowest.eager
    assert slowest.replayed


def _entry(test: str) -> Any:
    return results.Entry(test, "rule", "float16", False, None, "graph", 0.1, 1, 1, 0.5, ("because",), (), PROGRAM)


def test_a_run_is_resumed_where_it_was_cut_off(tmp_path: Path) -> None:
    """What passed stays with its examples; a failure stays until it is run again; a test that was cut off is forgotten."""
    run = {"seed": 3, "profile": "quick"}
    books = results.Books(tmp_path, run)
    books.start()
    for test, outcome in (("a", "passed"), ("b", "failed"), ("c", None)):
        books.add(_entry(test))
        if outcome:
            books.finish(results.Finished(test, outcome, 1.0, "", ({"name": "m", "rows": [[1, 2]]},)))
    again = results.Books(tmp_path, run)
    again.read()
    assert again.done == {"a"}
    assert again.failed == {"b"}
    assert again.entries == [_entry("a"), _entry("b")]
    assert again.finished[0].models == ({"name": "m", "rows": [[1, 2]]},)
    again.start()
    again.add(_entry("b"))
    again.finish(results.Finished("b", "passed", 1.0))
    third = results.Books(tmp_path, run)
    third.read()
    assert third.done == {"a", "b"}
    assert [entry.test for entry in third.entries] == ["a", "b"]


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    """Another seed's results say nothing about this one's; what differs is named."""
    results.Books(tmp_path, {"seed": 3, "profile": "quick"}).start()
    with pytest.raises(FolderError, match="seed 3 there, 4 now"):
        results.Books(tmp_path, {"seed": 4, "profile": "quick"}).read()


class _Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.marks: list[Any] = []

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark)


def test_only_the_guilty_pass_is_wrong() -> None:
    """Other passes that changed the failing program did nothing wrong; of a failure without a culprit any may have."""
    failed = dataclasses.replace(_entry("t"), failures=("bad",), passes=("fusion", "noop_removal"))
    failure = results.Failure("bad", "pass fusion: rule a", 2, "", "")
    books = results.Books(None, {}, [failed], [results.Finished("t", "failed", 1.0, failure=failure)])
    verdicts = {row[0]: row[-1] for row in page.pass_rows(SimpleNamespace(books=books))}
    assert (verdicts["fusion"], verdicts["noop_removal"], verdicts["dead_code"]) == (
        "1 WRONG",
        "right",
        "nothing to do",
    )
    books.finished[0] = dataclasses.replace(books.finished[0], failure=None)
    assert {row[0] for row in page.pass_rows(SimpleNamespace(books=books)) if row[-1] == "1 WRONG"} == set(
        failed.passes
    )


def test_a_run_that_was_stopped_is_not_right() -> None:
    """A page that Ctrl-C left says how far the run came; what was found wrong by then is what matters."""
    passed, failed = (results.Finished(name, name, 1.0) for name in ("passed", "failed"))

    def verdict(*finished: results.Finished, tests: int) -> tuple[str, bool | None]:
        return page.verdict_of(results.Books(None, {}, [_entry("passed")] * 9, list(finished)), tests=tests)

    right = "1 test passed, 9 random programs: everything that ran is right"
    assert verdict(passed, tests=1) == (right, True)
    said, good = verdict(passed, tests=2)
    assert said.startswith("stopped after 1 of 2 tests")
    assert good is None  # neither colour
    assert verdict(passed, failed, tests=9) == ("1 of 9 tests failed", False)


def test_known_failures_need_a_link(tmp_path: Path) -> None:
    """An entry marks the tests whose ids begin so, strictly; without a link, or without a test, it is refused."""
    path = tmp_path / "known.txt"
    path.write_text("# why\n\ntest_a.py::test_x  https://example.org/1  waits\n", encoding="utf-8")
    items = [_Item("conformance/test_a.py::test_x[1]"), _Item("conformance/test_a.py::test_y")]
    known_failures.mark(known_failures.read(path), items)
    (mark,) = items[0].marks
    assert (mark.name, mark.kwargs) == ("xfail", {"reason": "https://example.org/1 waits", "strict": True})
    assert not items[1].marks
    with pytest.raises(known_failures.KnownFailuresError, match="no test is called"):
        known_failures.mark(known_failures.read(path), items[1:])
    path.write_text("test_a.py::test_x  soon\n", encoding="utf-8")
    with pytest.raises(known_failures.KnownFailuresError, match="needs the link"):
        known_failures.read(path)
