"""Every long command ends at Ctrl-C: it prints and keeps what it found, says 130, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from interpreter import PYTHON

import npugraph_ex_autoload
from npugraph_ex import cli
from npugraph_ex.commands import script as script_commands
from npugraph_ex.console.interrupts import Interrupt, end_children, interruptible

Running = Callable[..., "Command"]
_ENTRY = "import sys; from npugraph_ex_autoload import command_line; sys.exit(command_line())"


class Command:
    """A command that runs in a session of its own, so that what it leaves behind is found."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(
            # A test run that was started in the background ignores Ctrl-C, and its children would, too.
            ["/usr/bin/env", "--default-signal=INT", *PYTHON, "-u", "-c", _ENTRY, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.said = ""

    def wait_for(self, words: str) -> None:
        """Read lines until one has the words."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said += line
            if words in line:
                return
        raise AssertionError(self.said)

    def wait_for_child(self, words: str) -> None:
        """Wait until it has started a process with the words on its command line."""
        while not any(words in line for line in self.others().values()):
            assert self._process.poll() is None
            time.sleep(0.1)

    def stop(self, number: int, *, everyone: bool) -> int:
        """Send a signal, to the whole group as a terminal does or to the command alone; return the exit status."""
        (os.killpg if everyone else os.kill)(self._process.pid, number)
        return self.end()

    def end(self) -> int:
        """Wait for its end; return the exit status."""
        assert self._process.stdout is not None
        self.said += self._process.stdout.read()
        return self._process.wait()

    def others(self) -> dict[int, str]:
        """The other processes of its session that still run, with their command lines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                line = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if int(session) == self._process.pid != int(folder.name) and state not in "ZX":
                found[int(folder.name)] = line
        return found


@pytest.fixture
def running() -> Iterator[Running]:
    """Start commands; what still runs of them at the end is ended."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(arguments))
        return started[-1]

    yield start
    for command in started:
        for pid in (*command.others(), command._process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        command._process.wait()


SERVER = """
import sys, threading
import torch, torch_npu, npugraph_ex

@torch.compile(backend="npugraph_ex")
def step(x):
    return x.relu() * 2

step(torch.ones(8, device="npu"))
forever = threading.Event()
threading.Thread(target=forever.wait).start()
print("serving", flush=True); forever.wait()
"""


@pytest.mark.slow
def test_a_server_is_explained_when_it_is_stopped(running: Running, tmp_path: Path) -> None:
    """Its graph and capture, one line instead of a traceback, and an end although a thread of it goes on."""
    script = tmp_path / "serve.py"
    script.write_text(SERVER)
    command = running("explain", "--emulate", str(script))
    command.wait_for("serving")
    assert command.stop(signal.SIGTERM, everyone=True) == 128 + signal.SIGTERM
    assert "captured graphs, replayed" in command.said
    line = len(SERVER.splitlines())
    assert re.search(rf"{script} was .*\bSIGTERM at line {line}\b", command.said)
    assert "Traceback" not in command.said


def test_a_script_that_goes_on_is_explained_after_a_while(running: Running, tmp_path: Path) -> None:
    """`--after` ends it, threads included; that is no failure."""
    script = tmp_path / "forever.py"
    script.write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\nwhile True: pass\n")
    command = running("explain", "--after", "0.2", str(script))
    assert command.end() == 0, command.said
    assert "Nothing was compiled" in command.said
    assert "--after gives at line 3" in command.said


def test_the_clock_begins_with_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `--after` gives is the script's own: the emulated device and torch may take long to load before."""
    running: list[bool] = []

    def left() -> float:
        return signal.getitimer(signal.ITIMER_REAL)[0]

    monkeypatch.setattr(script_commands, "_prepare", lambda *_: running.append(left() > 0))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "asks.py"
    script.write_text("import signal\nprint('left:', signal.getitimer(signal.ITIMER_REAL)[0] > 0)\n")
    assert cli.main(["explain", "--after", "100000", str(script)]) == 0
    assert "left: True\n" in capsys.readouterr().out
    assert (running, left()) == ([False], 0)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("run",), ("advise", "--emulate", "--quiet")], ids=" ".join)
def test_a_script_that_is_stopped_is_one_line(words: tuple[str, ...], running: Running, tmp_path: Path) -> None:
    """Where it was, also below functions of libraries, in place of a traceback, and the status that a shell gives."""
    script = tmp_path / "forever.py"
    # In one line, so that it does not depend on the machine's speed which line the signal meets.
    stay = "next((print('ready', flush=True), time.sleep(9)) for _ in 'x')"
    script.write_text(f"import time\n\nfor _ in range(1000):\n    {stay}\n")
    command = running(*words, str(script))
    command.wait_for("ready")
    assert command.stop(signal.SIGINT, everyone=True) == 130
    assert "Traceback" not in command.said
    assert f"npugraph-ex: {script} was stopped by Ctrl-C at line 4\n" in command.said


@pytest.mark.slow
def test_timeline_draws_what_ran(running: Running, tmp_path: Path) -> None:
    """The picture and the trace of the work before the interrupt are written."""
    script = tmp_path / "work.py"
    script.write_text(
        "import torch\ntorch.ones(4, device='npu').add_(1)\nprint('ready', flush=True)\nwhile True: pass\n"
    )
    command = running("timeline", "--output", str(tmp_path), str(script))
    command.wait_for("ready")
    assert command.stop(signal.SIGINT, everyone=True) == 130
    assert "Traceback" not in command.said
    assert "<svg" in (tmp_path / "work.timeline.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "work.trace.json").read_text(encoding="utf-8"))


RULES = """
import os, signal
import torch, torch_npu
from npugraph_ex import register_replacement

def twice(x, y):
    if len(x) == 0:
        os.kill(os.getpid(), signal.SIGFPE)
    return torch.relu(x * 2) + y

def thrice(x, y):
    return torch.relu(x * 3) + y

for search in (twice, thrice):
    register_replacement(search, search, [torch.empty(4, 8, device="npu"), torch.empty(4, 8, device="npu")])
"""


@pytest.mark.slow
def test_validate_prints_what_it_validated(running: Running, tmp_path: Path) -> None:
    """JSON has the first replacement, and says that it is not complete; no frame of torch is shown.

    The first one's pattern ends the process for a size of zero, so it begins again, and leaves that out.
    """
    rules = tmp_path / "rules.py"
    rules.write_text(RULES)
    command = running(
        "validate", str(rules), "--json", "--max-examples", "1", "--dtype", "float16", "--report-dir", str(tmp_path)
    )
    command.wait_for("rules.twice: proven on 1")
    assert command.stop(signal.SIGINT, everyone=True) == 130
    assert "Ctrl-C; 1 replacement" in command.said
    assert "Traceback" not in command.said
    found = json.loads(command.said[command.said.index("{\n") : command.said.rindex("}\n") + 1])
    assert (found["ok"], found["complete"]) == (False, False)
    (twice,) = found["replacements"]
    assert twice["rule"] == "rules.twice"
    (crash,) = re.findall("SIGFPE stopped the validation of rules.twice for (.*); it begins again", command.said)
    told = f", in every class of arguments. Not tried is {crash}: the process was stopped there by SIGFPE"
    assert twice["findings"][0]["text"].endswith(told)


@pytest.mark.slow
def test_bench_starts_nothing_more(running: Running, tmp_path: Path) -> None:
    """While a process answers its question: it ends, no other begins, and no old figures are overwritten."""
    saved = tmp_path / "bench.json"
    saved.write_text("old")
    command = running("bench", "call", "--save", str(saved))
    command.wait_for_child("subject.py")
    assert command.stop(signal.SIGINT, everyone=False) == 130
    assert "stopped by Ctrl-C" in command.said
    assert command.others() == {}
    assert saved.read_text() == "old"


@pytest.mark.slow
def test_conformance_keeps_what_it_found(running: Running, tmp_path: Path) -> None:
    """With two worker processes: results in every file, a table, a page, and nobody left. `--resume` goes on."""
    report = tmp_path / "report"
    options = ("--jobs", "2", "--report-dir", str(report), "-k", "check_and_device_agree")
    command = running("conformance", *options)
    command.wait_for(" programs  test_")
    assert command.stop(signal.SIGINT, everyone=False) == 130
    assert "stopped by Ctrl-C; the same command with --resume runs the rest" in command.said
    assert "(streams) corpus: check and device" in command.said
    assert command.others() == {}
    tests = [json.loads(line) for line in (report / "tests.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    assert tests
    assert {test["outcome"] for test in tests} == {"passed"}
    assert "right so far" in (report / "report.html").read_text(encoding="utf-8")


def test_the_tables_of_mutants_and_alarms_are_printed_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was killed, or checked, before the interrupt is in the table."""
    from npugraph_ex_conformance import false_positives as alarms
    from npugraph_ex_conformance.mutants import search as kills

    def kill_one(names: list[str], *, budget: int, on_kill: Callable[[kills.Kill], None]) -> None:
        on_kill(kills.Kill(names[0], "a promise", "streams", 7, 0.1, "a message"))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(kills, "kill_all", kill_one)
    assert cli.main(["conformance", "mutants", "matcher-ignores-constants"]) == 130
    said = capsys.readouterr()
    assert "a message" in said.out
    assert "stopped by Ctrl-C after 1 of 1 mutant" in said.err

    def check_one(_examples: int, *, first: int, on_example: Callable[[alarms.Alarms], None]) -> None:
        found = alarms.Alarms()
        found.examples["cats"] += 1
        on_example(found)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(alarms, "count_alarms", check_one)
    assert cli.main(["conformance", "alarms"]) == 143
    said = capsys.readouterr()
    assert "0 false alarms in 1 program\n" in said.out
    assert "stopped by SIGTERM" in said.err


def test_the_answers_of_a_device_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those before the interrupt are compared, printed as JSON, and written to the file."""
    from npugraph_ex_conformance.campaign import fidelity
    from npugraph_ex_conformance.fidelity.table import all_rules

    def ask_two(rules: dict[int, Any], _target: str) -> Iterator[tuple[str, object]]:
        first, second, *_ = rules.values()
        yield first.name, first.answer
        yield second.name, "another answer"
        os.kill(os.getpid(), signal.SIGINT)
        yield "never", None

    monkeypatch.setattr(fidelity, "ask", ask_two)
    assert cli.main(["fidelity", "-k", "capture.", "--json", "--output", str(tmp_path / "answers.json")]) == 130
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert list(found["answers"]) == [rule.name for rule in all_rules() if "capture." in rule.name][:2]
    assert found["differing"] == list(found["answers"])[1:]
    assert json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))["answers"] == found["answers"]
    assert re.search(r"\[2/\d+\] capture\..*stopped by Ctrl-C after 2 of \d+ rules", said.err, re.DOTALL)


def test_the_signals_are_given_back() -> None:
    """After the block Ctrl-C and SIGTERM do what they did; an interrupt that was lost is raised at the next check."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interruptible() as stop:
        stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
    assert (stop.status, str(stop)) == (143, "SIGTERM")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert Interrupt().status == 130


class _InterruptedAtItsEnd:
    """Ctrl-C comes while Python frees it."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    """Python ignores what a finalizer raises, so it is raised again; what else Python ignores is told as before."""
    told = sys.unraisablehook
    stop = Interrupt()

    def block() -> None:
        nonlocal stop
        with interruptible() as stop:
            _InterruptedAtItsEnd()
            select.select([], [], [], 20)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert stop.number == signal.SIGINT
    assert stop.status == 130
    assert sys.unraisablehook is told
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_children_of_children_end_too() -> None:
    """A process that a child started is found, whatever its name looks like."""
    shell = "sleep 1000 & echo $!; exec sleep 1000"  # a shell that waits would see the end of its child first
    with subprocess.Popen(["/bin/sh", "-c", shell], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        end_children()
        assert child.wait() == -signal.SIGKILL
    stat = Path(f"/proc/{grandchild}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)


@pytest.mark.slow
def test_children_that_start_at_that_moment_end_too() -> None:
    """A process whose parent is killed first would be found by nobody."""
    starts = "import os, signal\nfor _ in range(300):\n    if os.fork(): signal.pause()\n    os.write(1, b'.')"
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        child.stdout.read(20)
        end_children()
        assert child.wait() == -signal.SIGKILL
        child.stdout.read()  # as long as one of them lives, so does its end of the pipe


def test_a_signal_that_the_command_itself_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at the end of `advise --discover`: the line and the status are those of the signal."""

    def ended(*_: object, **_more: object) -> int:
        with interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(cli, "_env", ended)
    assert cli.main(["env"]) == 143
    assert capsys.readouterr().err == "npugraph-ex: stopped by SIGTERM\n"


def test_an_interrupt_while_the_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 130 and no traceback, as later."""

    class Interrupted(ModuleType):
        @property
        def main(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "npugraph_ex.cli", Interrupted("npugraph_ex.cli"))
    assert npugraph_ex_autoload.command_line() == 130
    assert capsys.readouterr().err == "npugraph-ex: stopped by Ctrl-C\n"
