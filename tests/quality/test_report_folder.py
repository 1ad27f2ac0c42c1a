"""The report folder of the suite: results of earlier runs are kept whatever comes after them, and whoever ended it."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from interpreter import PYTHON

from npugraph_ex.versions import stream_methods
from npugraph_ex_conformance import folders, junit, page, results

ROOT = Path(__file__).parents[2]
TWO = ("conformance/npugraph_ex_conformance/tests/test_streams.py", "-k", "every_form and wait_stream")
"""Two tests of one program each; one of them is about symbolic sizes."""
FAILS = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.when == "call" and "dynamic" in item.nodeid:
        report.outcome, report.longrepr = "failed", "on purpose"
    return report
"""
"""A plugin under which a test fails; without it the same test passes."""
KILLED = """
import os
from pathlib import Path

for name, lines in (("cases.jsonl", 12), ("tests.jsonl", 2)):
    path = Path(os.environ["KILLED"], name)
    text = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(text) > lines
    path.write_text("".join(text[:lines]) + text[lines][:20], encoding="utf-8")
"""
"""A plugin that leaves what a killed process leaves in a folder, before a run begins: some lines, and the beginning of another."""
SOME = (
    "conformance/npugraph_ex_conformance/tests/test_capture.py",
    "conformance/npugraph_ex_conformance/tests/test_streams.py",
    "-k",
    "one_pool or (every_form and native)",
)
"""Of one test ten examples, of four one each; the first test takes longest, so that two processes end them in another order."""
FILES = {"tests.jsonl", "cases.jsonl", "slowest.json", "report.html", "junit.xml"}


RUNS = """
import contextlib, io, json, pathlib, shutil, sys
import pytest
answer, folder = [], pathlib.Path(sys.argv[2])
for number, options in enumerate(json.loads(sys.argv[1])):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = int(pytest.main(["-p", "no:cacheprovider", *options]))
    answer.append([status, said.getvalue()])
    shutil.copytree(folder, folder.with_name(f"after-{number}"), dirs_exist_ok=True)
print(json.dumps(answer), file=sys.__stdout__)
"""


def _run_each(folder: Path, *runs: tuple[str, ...], **variables: str) -> list[tuple[int, str]]:
    """Start pytest with each of the option lists, one after the other in one process; the status and the output of each.

    What is in ``folder`` after run 0, 1 ... lies in ``after-0``, ``after-1`` ... beside it.
    """
    command = [*PYTHON, "-c", RUNS, json.dumps(runs), str(folder)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [(status, said) for status, said in json.loads(done.stdout.splitlines()[-1])]


def _outcomes(folder: Path) -> dict[str, str]:
    """The outcome of each test, as `junit.xml` has it."""
    cases = ET.parse(folder / "junit.xml").findall(".//testcase")  # noqa: S314 - our own file
    return {str(case.get("name")): next((child.tag for child in case), "passed") for case in cases}


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
@pytest.mark.skipif(stream_methods.DIFFERENCE.older, reason=stream_methods.DIFFERENCE.what)
def test_a_second_run_keeps_the_first_and_a_resumed_one_has_every_test(tmp_path: Path) -> None:
    """As `tox -e emulated`, twice; then both ways to resume: with a failure to run again, and with nothing left to do."""
    folder, plugins = tmp_path / "report", tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "fails.py").write_text(FAILS)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    again = (*TWO, f"--report-dir={folder}")
    runs = _run_each(
        folder, again, (*again, "-p", "fails"), (*again, "--resume"), (*again, "--resume"), PYTHONPATH=str(plugins)
    )
    assert [status for status, _ in runs] == [0, 1, 0, 0], runs
    first, second, third, fourth = (tmp_path / f"after-{number}" for number in range(4))
    kept = _content(first)
    assert set(kept) == {*FILES, "notes.txt"}

    assert f"{folder}/earlier/1" in runs[1][1]
    mine = kept.pop("notes.txt")
    assert _content(second / "earlier" / "1") == kept
    assert (second / "notes.txt").read_bytes() == mine
    assert sorted(_outcomes(second).values()) == ["failure", "passed"]

    assert "1 test passed before" in runs[2][1]
    assert sorted(_outcomes(third).values()) == ["passed", "passed"]
    assert _content(third / "earlier" / "2")["tests.jsonl"] == _content(second)["tests.jsonl"]

    for name in FILES - {"report.html"}:  # the page says how long the run took
        assert _content(fourth)[name] == _content(third)[name]
    assert "2 tests passed" in (folder / "report.html").read_text(encoding="utf-8")
    assert not (folder / "earlier" / "3").exists()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of the report folder, without their times."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.mark.slow
@pytest.mark.skipif(stream_methods.DIFFERENCE.older, reason=stream_methods.DIFFERENCE.what)
def test_a_killed_run_of_two_processes_ends_in_one_as_it_would_have(tmp_path: Path) -> None:
    """The files agree to the byte apart from times; what passed before the kill did not run again."""
    folder, plugins = tmp_path / "report", tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "killed.py").write_text(KILLED)
    report = f"--report-dir={folder}"
    first, second = _run_each(
        folder,
        (*SOME, "-n2", report),
        (*SOME, "-p", "killed", "--resume", report),
        PYTHONPATH=str(plugins),
        KILLED=str(folder),
    )
    assert (first[0], second[0]) == (0, 0), f"{first[1][-2000:]}\n{second[1][-2000:]}"
    whole, resumed = (
        {name: _lines(of / name) for name in ("cases.jsonl", "tests.jsonl")} for of in (tmp_path / "after-0", folder)
    )
    assert len(whole["cases.jsonl"]) == 14
    assert [line["test"] for line in whole["cases.jsonl"]] == sorted(line["test"] for line in whole["cases.jsonl"])
    assert "1 test passed before, not run again" in second[1]
    assert resumed == whole
    assert len(ET.parse(folder / "junit.xml").findall(".//testcase")) == 5  # noqa: S314 - our own file


@pytest.mark.slow
def test_what_cannot_run_changes_nothing(tmp_path: Path) -> None:
    """A folder that is none, a run that is not there, wrong settings: one sentence, status 4, and every file as it was."""
    run = tmp_path / "report"
    run.mkdir()
    (run / "tests.jsonl").write_text('{"target": "target  emulated", "seed": 7}\n')
    (run / "report.html").write_text("of seed 7")
    (run / "junit.xml").write_text("of seed 7")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "repor").mkdir()
    before = _content(run)
    refusals = (
        (("--resume", f"--report-dir={tmp_path / 'reprot'}"), f"did you mean {run}?"),
        (("--resume", f"--report-dir={tmp_path / 'other'}"), "there is no folder"),
        (("--resume", f"--report-dir={tmp_path / 'repor'}"), "stopped before its first test"),
        ((f"--report-dir={tmp_path / 'file'}",), "is a file"),
        ((f"--report-dir={tmp_path / 'file' / 'below'}",), f"{tmp_path / 'file'} is a file"),
        (("--resume", f"--report-dir={run}"), "seed 7 there, 0 now"),
        (("--mutant=nonesuch", f"--report-dir={run}"), "nonesuch"),
    )
    empty = ((*TWO, "--collect-only", f"--report-dir={run}"), (TWO[0], "-k", "nonesuch", f"--report-dir={run}"))
    *refused, collected, none = _run_each(run, *((*TWO, *options) for options, _ in refusals), *empty)
    assert len(refused) == len(refusals)
    for (status, told), (_, said) in zip(refused, refusals, strict=True):
        assert status == 4, told
        assert said in told
        assert "INTERNALERROR" not in told
        assert "Traceback" not in told
    assert (collected[0], none[0]) == (0, 5), collected[1] + none[1]
    assert _content(run) == before
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("after-")} == {
        "report",
        "repor",
        "file",
    }


def _books(folder: Path) -> Any:
    return results.Books(folder, {"seed": 0})


def _entry(test: str, source: str, *failures: str) -> Any:
    fields = {"what": "x", "dtype": "int32", "dynamic": False, "near_miss": None, "route": "graph", "seconds": 1.0}
    found = {"fusions": 0, "expected": 0, "worst_ulp": 0.0, "reasons": (), "failures": failures, "source": source}
    return results.Entry(test, **fields, **found)


def test_a_failure_stays_until_its_test_ran_again(tmp_path: Path) -> None:
    """A resumed run that is killed before, or within, the test that failed still knows that it failed, and why."""
    finished = results.Finished
    books = _books(tmp_path)
    books.start()
    books.add(_entry("a", "old", "wrong"))
    books.finish(finished("a", "failed", 1.0, "because"))
    books.finish(finished("b", "passed", 1.0))

    again = _books(tmp_path)
    again.read()
    assert (again.done, again.failed) == ({"b"}, {"a"})
    again.start()
    again.add(_entry("a", "new"))  # and the process is killed

    last = _books(tmp_path)
    last.read()
    assert [(test.test, test.outcome, test.text) for test in last.finished] == [
        ("a", "failed", "because"),
        ("b", "passed", ""),
    ]
    assert page.verdict_of(last, tests=2) == ("1 of 2 tests failed", False)
    last.start()
    last.add(_entry("a", "newest"))
    last.finish(finished("a", "passed", 1.0))
    last.close()
    assert [entry.source for entry in last.entries] == ["newest"]
    assert [json.loads(line).get("outcome") for line in (tmp_path / "tests.jsonl").read_text().splitlines()] == [
        None, "passed", "passed"
    ]  # fmt: skip
    assert [json.loads(line)["source"] for line in (tmp_path / "cases.jsonl").read_text().splitlines()] == ["newest"]
    assert sorted(path.name for path in (tmp_path / "earlier").iterdir()) == ["1", "2"]


def test_the_oldest_runs_are_deleted(tmp_path: Path) -> None:
    """The last twenty are kept, whatever else lies beside them, and numbers are never used again."""
    (tmp_path / "earlier" / "notes").mkdir(parents=True)
    for number in range(23):
        (tmp_path / "junit.xml").write_text(str(number))
        folders.put_aside(tmp_path)
    kept = {path.name: path for path in (tmp_path / "earlier").iterdir()}
    assert kept.keys() == {"notes", *map(str, range(4, 24))}
    assert (kept["23"] / "junit.xml").read_text() == "22"


def test_a_failing_example_is_no_good_news_before_its_test_ends(tmp_path: Path) -> None:
    """Ctrl-C while a failure is made small: the run is not "right so far"."""
    books = _books(tmp_path)
    books.start()
    books.add(_entry("a", "text", "wrong"))
    assert page.verdict_of(books, tests=3) == ("1 of 3 tests failed", False)


def test_the_verdict_counts_what_did_not_run(tmp_path: Path) -> None:
    """Skipped tests and known failures are no passed ones, and their reasons are on the page."""
    finished = results.Finished
    books = _books(tmp_path)
    for test in (("a", "passed"), ("b", "skipped"), ("c", "xfailed")):
        books.finish(finished(*test, 1.0, f"reason of {test[0]}"))
    said, good = page.verdict_of(books, tests=3)
    assert said.partition(":")[0].split(", ") == [
        "1 test passed",
        "1 skipped",
        "1 failed as known",
        "0 random programs",
    ]
    assert good
    assert "reason of b" in str(page._skipped(books.finished))
    books.finished = books.finished[1:]
    assert page.verdict_of(books, tests=2)[1] is False


def test_what_fails_after_a_test_adds_to_it(tmp_path: Path) -> None:
    """A test that passes and cannot be put away is a failure; both of its texts are kept."""
    finished = results.Finished
    books = _books(tmp_path)
    books.start()
    books.finish(finished("a", "failed", 1.0, "in the test"))
    books.finish(finished("a", "failed", 2.0, "after it"))
    (test,) = books.finished
    assert (test.outcome, test.seconds, test.text) == ("failed", 3.0, "in the test\n\nafter it")
    again = _books(tmp_path)
    again.read()
    assert again.finished == [test]


def test_damaged_results_are_not_resumed(tmp_path: Path) -> None:
    """The line that is no JSON is named; nothing is written."""
    (tmp_path / "tests.jsonl").write_text('{"seed": 0}\nnonsense\n')
    with pytest.raises(folders.FolderError, match=r"tests\.jsonl, line 2, is damaged"):
        _books(tmp_path).read()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """While one writes, a second is refused; when the first is over, or was killed, it may."""
    lock = folders.prepare(tmp_path, resume=False)
    with pytest.raises(folders.FolderError, match="another run writes"):
        folders.prepare(tmp_path, resume=False)
    os.close(lock)
    os.close(folders.prepare(tmp_path, resume=False))


def test_a_failing_replacement_of_a_file_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or an interrupt, in the middle of it: the file is as it was, and there is no other."""
    path = tmp_path / "tests.jsonl"
    path.write_text("old")
    monkeypatch.setattr(folders.os, "fdopen", lambda *_args, **_options: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folders.write_whole(path, "new")
    assert _content(tmp_path) == {"tests.jsonl": b"old"}


def test_junit_takes_any_text() -> None:
    """Characters that XML has no way to write, as terminals' colours, are replaced; everything else comes back."""
    text = "a <b> & 'c' \x1b[31m \x00 ü"
    read = ET.fromstring(junit.junit([results.Finished("f.py::t", "failed", 1.0, text)]).encode())  # noqa: S314 - ours
    (failure,) = read.findall(".//failure")
    assert failure.text == "a <b> & 'c' \ufffd[31m \ufffd ü"
    assert read.find("testsuite").get("failures") == "1"
