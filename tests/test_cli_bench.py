"""`npugraph-ex bench`: every topic is a file that is there, mistakes are one sentence, and two runs compare."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npugraph_ex.commands import bench

Command = Callable[..., subprocess.CompletedProcess[str]]
FILES = {"save": "now.json", "compare": "earlier.json", "page": "page.md"}


def _bench_module(name: str) -> Any:
    """A helper of the benches, which are no package."""
    sys.path.insert(0, str(bench.benches_folder()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_every_topic_is_a_file_and_in_the_help(command: Command) -> None:
    """No topic without a bench, no bench without a topic; `--help` names them all."""
    files = {path.name for path in bench.benches_folder().glob("test_*.py")}
    assert files == set(bench.TOPICS.values())
    done = command("bench", "--help")
    assert done.returncode == 0
    assert all(f"  {topic} " in done.stdout for topic in bench.TOPICS)


def test_a_wrong_topic_is_named(command: Command) -> None:
    """The message has the word that is wrong and the right ones."""
    done = command("bench", "calls")
    assert done.returncode == 2
    assert "'calls'" in done.stderr
    assert "compile" in done.stderr


def test_tables_are_compared_row_by_row(tmp_path: Path) -> None:
    """Rows are found again by what they name, wherever they stand; a figure tells how many times the earlier one it is."""
    Saved = _bench_module("measured_tables").Saved  # noqa: N806 - a class
    earlier = Saved({"torch": "1"}, {"cost": [{"layers": 8, "us": 10.0}, {"layers": 2, "us": 4.0}]})
    earlier.write(tmp_path / "earlier.json")
    now = Saved({"torch": "2"}, {"cost": [{"layers": 2, "us": 5.0}, {"layers": 64, "us": 7.0}]})
    said = now.beside(Saved.read(tmp_path / "earlier.json"))
    assert "5.00 (1.25)" in said
    assert "7.00" in said
    assert "7.00 (" not in said
    assert json.loads((tmp_path / "earlier.json").read_text(encoding="utf-8"))["about"] == {"torch": "1"}
    assert "|        2 |" in now.page()
    assert "<td>64</td><td>7.00</td>" in now.html()


def test_what_is_worse_than_a_page_fails(command: Command, tmp_path: Path) -> None:
    """A ratio or a count that is worse by more than the percentage fails; a better one, or a time, does not. Runs are kept."""
    saved, regressions = _bench_module("measured_tables").Saved, _bench_module("regressions")
    title = "a step"
    before = saved(
        {}, {title: [{"batch": 1, "kernels": 10, "below bundled": 3.0, "us": 1.0}, {"batch": 16, "kernels": 10}]}
    )
    page = tmp_path / "tables.md"
    page.write_text(before.page(), encoding="utf-8")
    rows = [{"batch": 1, "kernels": 9, "below bundled": 2.5, "us": 9.0}, {"batch": 16, "kernels": 12}]
    found = regressions.worse(saved({}, {title: rows}), saved.read(page), 10)
    assert found == ["a step, 1: below bundled 2.50, before 3.00", "a step, 16: kernels 12.00, before 10.00"]
    assert regressions.worse(saved({}, {title: rows}), saved.read(page), 25) == []
    assert command("bench", "streams", "--worse", "10").returncode == 2
    for _ in range(2):
        regressions.remember(saved({"torch": "1"}, {title: rows}), tmp_path / "history.jsonl")
    first, second = (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["tables"] == json.loads(second)["tables"] == {title: rows}


def test_one_run_saves_compares_and_writes_the_page(command: Command, tmp_path: Path) -> None:
    """The command itself: its figures in JSON, each beside the earlier one, and the same table in Markdown."""
    title = "the stream check beside making the graph, ms"
    earlier = {"about": {"torch": "1"}, "tables": {title: [{"making": 0.5, "checking": 0.25}]}}
    (tmp_path / "earlier.json").write_text(json.dumps(earlier), encoding="utf-8")
    files = {f"--{name}": str(tmp_path / file) for name, file in FILES.items()}
    done = command("bench", "streams", *(word for pair in files.items() for word in pair), "-k", "costs_little")
    assert done.returncode == 0, done.stdout
    assert "[1/1] test_costs_little_beside_making_the_graph\n" in done.stderr
    row = json.loads((tmp_path / FILES["save"]).read_text(encoding="utf-8"))["tables"][title][0]
    assert f"{row['making']:.2f} ({row['making'] / 0.5:.2f})" in done.stdout
    assert f"{row['checking']:.2f} ({row['checking'] / 0.25:.2f})" in done.stdout
    page = (tmp_path / FILES["page"]).read_text(encoding="utf-8")
    assert page.startswith("torch ")
    assert f"{row['making']:.2f} |" in page


def test_both_matchers_have_the_rules_that_can_be_used_here() -> None:
    """Torch's matcher takes them where another library's operators are missing, and both fuse the same; no time is measured."""
    matching, graphs = _bench_module("test_matching"), _bench_module("matching_graphs")
    theirs = matching.torchs_matcher().apply(matching.duplicate(graphs.layers(100)))
    assert theirs == matching.ours(matching.duplicate(graphs.layers(100))) > 0


def test_the_comparison_of_pytest_benchmark_may_stand_last(command: Command) -> None:
    """`--benchmark-compare` takes a word if one follows: not the file of the topic."""
    done = command("bench", "streams", "--collect-only", "-q", "--benchmark-compare")
    assert done.returncode == 0, done.stderr
    assert "test_stream_check.py::test_" in done.stdout


def test_a_file_that_is_no_table_ends_the_run_at_once(command: Command, tmp_path: Path) -> None:
    """What `--compare` takes is said before anything is measured."""
    (tmp_path / "other.json").write_text("[1]", encoding="utf-8")
    done = command("bench", "streams", "--compare", str(tmp_path / "other.json"), "--collect-only")
    assert done.returncode == 2
    assert "JSON file" in done.stderr


def test_a_process_that_ends_without_an_answer_tells_how(tmp_path: Path) -> None:
    """A subject that is killed, fails or prints something else: how it ended, and what it wrote last."""
    both = _bench_module("both")
    for code, expected in (
        ("import os, sys; print('at 8', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)", "SIGKILL.*at 8"),
        ("raise SystemExit('no device')", "status 1.*no device"),
        ("print('hello')", "no JSON.*hello"),
    ):
        with pytest.raises(RuntimeError, match=f"(?s)^bundled gave no answer.*{expected}"):
            both.answers_of([sys.executable, "-c", code], name="bundled")
    assert both.answers_of([sys.executable, "-c", "print('[{\"us\": 1}]')"], name="x") == [{"us": 1}]


def test_an_answer_is_there_while_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run that is stopped has rows. What nobody has asked for when the block ends is not asked.

    Processes beside each other have one thread each: the wait of several would count as time of the process.
    """
    both, held, asked, threads = _bench_module("both"), threading.Event(), [], set()

    def answered(_backend: str, question: str, _arguments: tuple[str, ...], **variables: str) -> list[dict[str, float]]:
        asked.append(question)
        threads.add(variables.get("OMP_NUM_THREADS"))
        if question != "first":
            assert held.wait(60)
        return [{question: 1.0}]

    monkeypatch.setattr(both, "_asked", answered)
    questions = ("first", "second", "third", "fourth")
    with both.asked_ahead(*((question, (), both.OURS) for question in questions)):
        assert both.ask("first", backends=(both.OURS,)) == {both.OURS: [{"first": 1.0}]}
        both._BEGUN[both.OURS, "fourth", ()].add_done_callback(
            lambda _: held.set()
        )  # the others go on once it is dropped
    assert set(asked) <= {"first", "second", "third"}
    assert threads == {"1"}
    assert both.ask("fourth", backends=(both.OURS,)) == {both.OURS: [{"fourth": 1.0}]}
