"""A crash of the process that computes: another one begins again without what crashed; a user's signal ends both."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap

import pytest
from interpreter import PYTHON

from npugraph_ex.commands.supervisor import supervise
from npugraph_ex.errors import UsageError
from npugraph_ex.testing import crashes
from npugraph_ex.testing.crashes import Crash, CrashedError, FlightRecorder

_PARENT = """
import os, signal, sys, time
from npugraph_ex.console.interrupts import interruptible
from npugraph_ex.commands.supervisor import supervise
from npugraph_ex.testing.crashes import CrashedError, FlightRecorder

assert "torch" not in sys.modules
recorder = FlightRecorder.shared()
status = supervise(recorder, quiet="quiet" in sys.argv)
if status is not None:
    sys.exit(status)
"""
_CRASHES_TWICE = """
print(f"process {len(recorder.crashes)}", *recorder.results().values())
for rule in ("right", "crashes"):
    if rule in recorder.results():
        continue
    with recorder.validates(rule):
        for number in range(3):
            try:
                with recorder.computes(f"size {number}", " and more"):
                    if number != 1 and rule == "crashes":
                        sys.stdout.flush()
                        os.kill(os.getpid(), signal.SIGFPE if number else signal.SIGSEGV)
            except CrashedError as error:
                print(number, error)
    recorder.keep(rule, f"found of {rule}")
sys.exit(3)
"""
_PRINTS_WHAT_IT_FOUND = """
with interruptible(on_signal=recorder.count_signal) as stop:
    try:
        print(os.getpid(), flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(0.5)  # a second signal would end this
print("found", stop)
sys.exit(stop.status)
"""


def _program(child: str, *words: str) -> subprocess.Popen[str]:
    """A process that waits for one that runs this."""
    return subprocess.Popen(
        ["/usr/bin/env", "--default-signal=INT", *PYTHON, "-c", _PARENT + textwrap.dedent(child), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("words", [(), ("quiet",)])
def test_what_crashed_is_left_out(words: tuple[str, ...]) -> None:
    """Each crash once, and what was found before it is kept; stderr says that it begins again, unless it is to be quiet."""
    out, said = _program(_CRASHES_TWICE, *words).communicate()
    left_out = ["0 the process was stopped there by SIGSEGV", "2 the process was stopped there by SIGFPE"]
    assert out.splitlines() == [
        "process 0", "process 1 found of right", left_out[0], "process 2 found of right", *left_out,
    ]  # fmt: skip
    again = "stopped the validation of crashes for size {} and more; it begins again without that\n"
    told = f"npugraph-ex: SIGSEGV {again.format(0)}npugraph-ex: SIGFPE {again.format(2)}"
    assert said == ("" if words else told)


def test_the_exit_status_is_that_of_the_process_that_computes() -> None:
    """Also after crashes; of another signal both end, and nothing begins again."""
    process = _program(_CRASHES_TWICE)
    process.communicate()
    assert process.returncode == 3
    process = _program("print('once', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    assert process.communicate() == ("once\n", "")
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("everyone", [False, True])
def test_a_signal_is_handled_once(number: signal.Signals, everyone: bool) -> None:
    """Whether a terminal sends it to both processes or somebody to the one that waits: what was found is printed."""
    process = _program(_PRINTS_WHAT_IT_FOUND)
    assert process.stdout is not None
    process.stdout.readline()
    (os.killpg if everyone else os.kill)(process.pid, number)
    out, said = process.communicate()
    assert (out, said) == (f"found {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}\n", "")
    assert process.returncode == 128 + number


def test_no_process_outlives_the_one_that_waits() -> None:
    """SIGKILL, which nobody can pass on, ends the other one, too."""
    process = _program(_PRINTS_WHAT_IT_FOUND)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    assert process.communicate() == ("", "")  # as long as one of them lives, so does its end of the pipe


def test_a_crash_outside_a_rule_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come again: the error names the signal, and how to find the place."""
    monkeypatch.setattr(os, "fork", lambda: 1)
    monkeypatch.setattr(os, "waitpid", lambda child, _: (child, signal.SIGSEGV))
    with pytest.raises(UsageError, match=r"^SIGSEGV stopped .* such as in the import .*PYTHONFAULTHANDLER=1\n"):
        supervise(FlightRecorder.shared(), quiet=False)


def test_a_rule_that_crashes_often_is_given_up() -> None:
    """More than five times; at once where nobody knows what crashed. Other rules are not."""
    recorder = FlightRecorder(crashes=[Crash("r", f"size {number}", "SIGSEGV") for number in range(5)])
    assert recorder.given_up("r") == ""
    recorder.crashes += [Crash("r", "size 5", "SIGFPE"), Crash("other", "", "SIGABRT")]
    assert recorder.given_up("r") == "its validation was stopped 6 times, for size 5 by SIGFPE"
    assert recorder.given_up("other") == "its validation was stopped by SIGABRT"
    assert recorder.given_up("third") == ""


def test_a_crash_leaves_out_what_it_happened_in() -> None:
    """A setting with all that is computed in it, or one kind of that; and the note is again that of the outer block."""
    recorder = FlightRecorder.shared()
    with crashes.recording(recorder), recorder.validates("r"), crashes.watched("size 0"):
        with crashes.watched("size 1", " and more"):
            assert recorder.crashed("SIGFPE") == ("r", "size 1 and more", "SIGFPE")
        with crashes.watched("size 1"):
            assert recorder.crashed("SIGILL").where == "size 1"
        for more in (" and more", " and less", ""):
            with pytest.raises(CrashedError, match="stopped there by SIG"), crashes.watched("size 1", more):
                raise AssertionError
    with crashes.recording(recorder), recorder.validates("other"), crashes.watched("size 1"):
        assert recorder.where == "size 1"
    assert recorder.where == crashes.current().where == ""
