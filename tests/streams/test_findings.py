"""Findings of the stream check as text, table, JSON and SARIF."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from torch import fx

from npugraph_ex import errors
from npugraph_ex.graph.source import source_line
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.findings import MEANING, Code, Finding, Findings, Location

RACE = Finding(
    Code.READ_AFTER_WRITE,
    "add may read abs before it is computed",
    Location("abs_1", "s", "aten.abs.default writes 36 bytes", "/home/me/model.py:12"),
    Location("add", None, "aten.add.Tensor reads 36 bytes", "model.py:13"),
    missing_edge="the main stream does not wait for stream 's'",
    repair="before model.py:13 add `event.wait()`",
)
LOST = Finding(Code.WAIT_WITHOUT_RECORD, "event 'e' is never recorded", Location("wait", "s"))
NOTE = Finding(Code.WAIT_ORDERS_NOTHING, "wait_1 orders nothing", Location("wait_1", None))


def test_every_code_says_how_bad_it_is_and_what_it_means() -> None:
    """No code is left without a level, a meaning and a remedy."""
    assert set(MEANING) == set(Code)
    assert all(meaning.endswith(".") and remedy.endswith(".") for _, meaning, remedy in MEANING.values())


def test_text_and_table_name_both_nodes_streams_lines_edge_and_repair() -> None:
    """What a person reads has all of it."""
    text = str(RACE)
    for part in (
        "error [read-after-write]", "abs_1", "stream 's'", "the main stream", "/home/me/model.py:12", "model.py:13",
        "missing:", "repair:",
    ):  # fmt: skip
        assert part in text
    table = Findings((RACE, NOTE)).table()
    assert "abs_1, stream 's'" in table
    assert "add, the main stream" in table
    assert Findings().table() == ""
    assert str(Findings()) == "Streams: nothing was found."


def test_errors_are_what_nobody_repaired() -> None:
    """A repaired finding, and a note, are no reason to stop."""
    assert Findings((RACE, NOTE)).errors == (RACE,)
    assert Findings((RACE, NOTE)).as_repaired().errors == ()
    assert "(repaired)" in str(Findings((RACE,)).as_repaired())
    assert Findings((RACE, LOST)).of(Code.WAIT_WITHOUT_RECORD) == (LOST,)


def test_json_has_every_field() -> None:
    """Reading it back gives every field of every finding, and its level."""
    (row,) = json.loads(Findings((RACE,)).to_json())
    assert row["level"] == "error"
    assert row["code"] == "read-after-write"
    assert row["second"] == {
        "node": "add", "stream": None, "does": "aten.add.Tensor reads 36 bytes", "source": "model.py:13"
    }  # fmt: skip


def test_a_finding_is_known_again_where_lines_move(tmp_path: Path) -> None:
    """By its code and the text of its lines: code hosts then keep what was dismissed; another text or code is another finding."""

    def fingerprint(text: str, line: int, code: Code = Code.READ_AFTER_WRITE) -> str:
        source = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
        source.write_text(text)
        found = dataclasses.replace(RACE, code=code, second=Location("add", None, source=f"{source}:{line}"))
        (result,) = json.loads(Findings((found,)).to_sarif())["runs"][0]["results"]
        return str(result["partialFingerprints"]["primaryLocationLineHash"])

    first = fingerprint("y = x + 1\n", 1)
    assert first == fingerprint("import torch\n\nif x:\n    y = x + 1\n", 4)
    assert first != fingerprint("y = x + 2\n", 1)
    assert first != fingerprint("y = x + 1\n", 1, Code.WRITE_AFTER_READ)


def test_equal_lines_of_a_file_are_findings_of_their_own(tmp_path: Path) -> None:
    """Else one that is dismissed takes the others with it."""
    sources = [tmp_path / "a.py", tmp_path / "b.py"]
    for source in sources:
        source.write_text("y = x + 1\n" * 2)
    places = [f"{sources[0]}:1", f"{sources[0]}:2", f"{sources[1]}:2"]
    found = [dataclasses.replace(RACE, second=Location("add", None, source=place)) for place in places]
    results = json.loads(Findings(tuple(found)).to_sarif())["runs"][0]["results"]
    first, second, elsewhere = (result["partialFingerprints"]["primaryLocationLineHash"] for result in results)
    assert first.endswith(":1")
    assert second == first[:-1] + "2"
    assert elsewhere == first


@pytest.mark.parametrize("repository", [True, False])
def test_sarif_names_a_file_below_the_root_relative_to_it(
    repository: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root of the repository, or the working directory where there is none: an imported module's path is absolute."""
    tmp_path = tmp_path.resolve()
    here = tmp_path / "work" / "model"
    here.mkdir(parents=True)
    if repository:
        (tmp_path / "work" / ".git").mkdir()
    monkeypatch.chdir(here)
    root = tmp_path / "work" if repository else here
    sides = [Location("add", None, source=f"{here}/parts/my norm.py:3"), Location("mul", None, source="../other.py:4")]
    found = dataclasses.replace(RACE, second=sides[0], first=sides[1], repair=f"before {root}/main.py:5 add it")
    (run,) = json.loads(Findings((found,)).to_sarif())["runs"]
    assert run["originalUriBaseIds"] == {"%SRCROOT%": {"uri": f"{root.as_uri()}/"}}
    (result,) = run["results"]
    assert result["message"]["text"].endswith("Repair: before main.py:5 add it")
    inside, other = (
        place["physicalLocation"]["artifactLocation"] for place in (*result["locations"], *result["relatedLocations"])
    )
    within = "model/" if repository else ""
    assert inside == {"uri": f"{within}parts/my%20norm.py", "uriBaseId": "%SRCROOT%"}
    outside = {"uri": (tmp_path / "work" / "other.py").as_uri()}
    assert other == ({"uri": "other.py", "uriBaseId": "%SRCROOT%"} if repository else outside)


def test_sarif_has_what_the_standard_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version, driver, rules by index, a text for each result, locations with line numbers, URIs."""
    monkeypatch.chdir(tmp_path)
    log = json.loads(Findings((RACE, LOST, RACE)).to_sarif())
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["read-after-write", "wait-without-record"]
    for rule in rules:  # without a helpUri: no public site has the pages
        _, meaning, remedy = MEANING[Code(rule["id"])]
        assert meaning in rule["help"]["text"]
        assert remedy in rule["help"]["text"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in {"error", "warning", "note"}
        assert result["message"]["text"]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "model.py", "uriBaseId": "%SRCROOT%"}, "region": {"startLine": 13}}
    related = run["results"][0]["relatedLocations"][0]["physicalLocation"]
    assert related["artifactLocation"] == {"uri": "file:///home/me/model.py"}
    assert "physicalLocation" not in run["results"][1]["locations"][0]
    spaced = dataclasses.replace(LOST, first=dataclasses.replace(LOST.first, source="my model.py:13"))
    (result,) = json.loads(Findings((spaced,)).to_sarif())["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "my%20model.py"


def test_sarif_has_one_result_for_what_several_compilations_find() -> None:
    """It is an error while one of them runs unrepaired; a repaired one says so, and what stays to be done in the program."""
    repaired = dataclasses.replace(RACE, repaired=True)

    def results(*found: Finding) -> list[tuple[str, str]]:
        log = json.loads(Findings(found).to_sarif())
        return [(result["level"], result["message"]["text"]) for result in log["runs"][0]["results"]]

    does = f"{RACE.message}. Repair: {RACE.repair}"
    done = f"{RACE.message}. Repaired in the graph that runs. In the program: {RACE.repair}"
    assert results(repaired, LOST, RACE) == [("error", does), ("error", LOST.message)]
    assert results(RACE, repaired) == [("error", does)]
    assert results(repaired, repaired) == [("note", done)]


def test_the_pass_report_carries_findings() -> None:
    """A pass adds a finding to the report that the compilation publishes; its table and JSON show it."""
    builder = ReportBuilder()
    builder.add_finding(RACE)
    built = builder.build()
    assert built.streams == Findings((RACE,))
    assert "read-after-write" in built.table()
    assert json.loads(built.to_json())["streams"]["found"][0]["code"] == "read-after-write"


def test_the_line_of_a_user_is_not_a_line_of_this_library() -> None:
    """A node that was traced inside a function of the library has the line from which the user called it."""
    node = fx.Graph().placeholder("x")
    inside = errors.__file__
    node.meta["stack_trace"] = f'  File "/home/me/model.py", line 7, in forward\n  File "{inside}", line 3, in record\n'
    assert source_line(node) == "/home/me/model.py:7"
    node.meta["stack_trace"] = f'  File "{inside}", line 3, in called\n'
    assert source_line(node) == ""


def test_compilations_that_number_their_nodes_apart_have_one_result() -> None:
    """Another size has other nodes before it, so `add` is `add_2` there; it is one result, and an error where one is unrepaired."""
    assert RACE.second is not None
    again = dataclasses.replace(
        RACE, first=dataclasses.replace(RACE.first, node="abs_3"), second=dataclasses.replace(RACE.second, node="add_2")
    )
    other = dataclasses.replace(RACE, second=dataclasses.replace(RACE.second, node="mul"))
    found = Findings((dataclasses.replace(again, repaired=True), RACE, other))
    results = json.loads(found.to_sarif())["runs"][0]["results"]
    assert [(one["level"], one["properties"]["second"]["node"]) for one in results] == [
        ("error", "add"),
        ("error", "mul"),
    ]
