"""pytest plugin: `pytest --npu=emulated` gives a test suite that uses `device="npu"` an emulated one.

`--npu=hardware` runs the same suite on a real NPU and stops with one sentence if there is none. Without `--npu` the plugin
only adds a hint if tests cannot be imported because CANN is not installed. docs/how-to/ci-owner.md shows everything that it has.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from npu_emulator import EmulatorError, activate, is_active
from npu_emulator.errors import note_what_is_missing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Iterator

    import torch

    from npu_emulator.races.detector import Detector

__all__: list[str] = []

_Kind = TypeVar("_Kind")

_NOT_LOADED = re.compile(r"(lib\w+\.so[.\d]*): cannot open shared object file")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, and the lines of a project's configuration that stand for them."""
    group = parser.getgroup("npu", "the Ascend NPU that tests run on")
    group.addoption(
        "--npu", choices=("emulated", "hardware"), help="emulated: npu_emulator's device; hardware: a real one"
    )
    group.addoption(
        "--npu-schedule",
        metavar="SCHEDULE",
        help="order of queued work on the emulated device: fifo, lazy, random:SEED, pct:SEED:DEPTH",
    )
    group.addoption(
        "--npu-races", action="store_true", help="fail a test in which two streams race (emulated device only)"
    )
    group.addoption("--npu-devices", type=int, metavar="N", help="how many NPUs to emulate (default 1)")
    parser.addini("npu", "what --npu is where it is not given")
    parser.addini("npu_schedule", "what --npu-schedule is where it is not given")
    parser.addini("npu_devices", "what --npu-devices is where it is not given")


def _with_ini(config: pytest.Config) -> argparse.Namespace:
    """The options, each filled in from the project's configuration where the command line does not have it.

    Raises:
        pytest.UsageError: the configuration has a value that the option does not take.
    """
    options = config.known_args_namespace
    if options.npu is None and (npu := config.getini("npu")):
        if npu not in {"emulated", "hardware"}:
            raise pytest.UsageError(f"npu = {npu}: the configuration takes emulated or hardware")
        options.npu = npu
    if options.npu == "emulated":  # the other two are of the emulated device
        options.npu_schedule = options.npu_schedule or config.getini("npu_schedule") or None
        devices = config.getini("npu_devices")
        if options.npu_devices is None and devices:
            if not devices.isdecimal():
                raise pytest.UsageError(f"npu_devices = {devices}: the configuration takes a whole number")
            options.npu_devices = int(devices)
    return options


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.addinivalue_line(
        "markers",
        "npu_schedule(name): run the test under another schedule of the emulated device; nothing on a real one",
    )
    config.addinivalue_line("markers", "npu_devices(n): skip the test where there are fewer than n NPUs")


# hookwrapper, not wrapper: any installed pytest loads this plugin, older ones too.
@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, Any, None]:
    """Start the device before any conftest can import torch; add a hint if a conftest cannot import it."""
    _start(_with_ini(early_config))
    outcome = yield
    if outcome.excinfo is not None:
        hint = _hint("".join(traceback.format_exception(outcome.excinfo[1])))
        sys.stderr.write(f"{hint}\n" if hint else "")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep the events that torch traces out of captured logs: each step of a compilation is an empty line of DEBUG there."""
    if not _with_ini(session.config).npu:
        return
    captured = session.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (getattr(captured, name, None) for name in ("caplog_handler", "report_handler")):
        if isinstance(handler, logging.Handler):
            handler.addFilter(lambda record: record.name != "torch.__trace")


def _start(options: argparse.Namespace) -> None:
    """Start the device of the options.

    Raises:
        pytest.UsageError: there is no such device, or an option would have no effect.
    """
    _refuse_what_would_do_nothing(options)
    if options.npu == "emulated" and not is_active():
        try:
            activate(quiet=True, schedule=options.npu_schedule, devices=options.npu_devices)
        except EmulatorError as error:
            given = {"": options.npu, "-schedule": options.npu_schedule, "-devices": options.npu_devices}
            words = " ".join(f"--npu{name}={value}" for name, value in given.items() if value is not None)
            raise pytest.UsageError(f"{words}: {error}") from error
    elif options.npu == "hardware":
        if _is_emulated():
            raise pytest.UsageError("--npu=hardware, but this process runs under npu_emulator; start pytest without it")
        if not any(Path("/dev").glob("davinci[0-9]*")):
            raise pytest.UsageError("--npu=hardware, but there is no NPU here (no /dev/davinci*); use --npu=emulated")


def _is_emulated() -> bool:
    """Whether this process, or the one that started it, runs under the emulator."""
    return is_active() or os.environ.get("NPU_EMULATOR") == "1"


def _refuse_what_would_do_nothing(options: argparse.Namespace) -> None:
    given = {
        "--npu-races": options.npu_races,
        "--npu-schedule": options.npu_schedule is not None,
        "--npu-devices": options.npu_devices is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        if options.npu == "hardware" or not (options.npu == "emulated" or _is_emulated()):
            raise pytest.UsageError(f"{name} is for the emulated device; add --npu=emulated")
    if not is_active():
        return
    from npu_emulator import current

    for name in ("schedule", "devices"):
        wanted, running = getattr(options, f"npu_{name}"), getattr(current().settings, name)
        if wanted is not None and str(wanted) != str(running):
            raise pytest.UsageError(
                f"--npu-{name}={wanted} comes too late: the emulated device runs already, with {name} {running}. "
                f"Start pytest without python -m npu_emulator and without --emulate, or set NPU_EMULATOR_{name.upper()}={wanted}"
            )


def _hint(text: str) -> str:
    """A hint for an error; empty unless torch_npu lacks CANN's libraries."""
    lacking = _NOT_LOADED.search(text)
    if lacking is None or "torch_npu" not in text or _is_emulated():
        return ""
    return (
        f"npu: torch_npu needs CANN's {lacking[1]}, which is not here. "
        "`pytest --npu=emulated` runs these tests on an emulated NPU"
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the hint once, below errors from missing CANN."""
    reports = [*terminalreporter.stats.get("error", ()), *terminalreporter.stats.get("failed", ())]
    hint = next(filter(None, (_hint(report.longreprtext) for report in reports)), "")
    if hint:
        terminalreporter.write_line(hint, yellow=True)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the device."""
    if is_active():
        from npu_emulator import current
        from npu_emulator.plurals import counted

        settings = current().settings
        return f"npu: emulated {settings.soc}, {counted(settings.devices, 'device')}, schedule {settings.schedule}"
    return "npu: hardware" if (config.getoption("--npu") or config.getini("npu")) == "hardware" else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, Any, None]:
    """Under `--npu-races`, note what is captured in fixtures and in earlier tests, so that its replays are known."""
    if not (session.config.getoption("--npu-races") and is_active()):
        yield
        return
    from npu_emulator import _captures_noted

    with _captures_noted():
        yield


_RACES = pytest.StashKey[tuple[ExitStack, "Detector"]]()


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, None]:
    """Under `--npu-races`, stop a test, and its fixtures of any scope, at the launch that completes a race."""
    if item.config.getoption("--npu-races") and is_active():
        from npu_emulator import _races_looked_for

        looking = ExitStack()
        item.stash[_RACES] = looking, looking.enter_context(_races_looked_for(stop_at_first=True, leaves=True))
    outcome = yield
    _tell_races(item, outcome, "setup")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """End the traceback of a race in the test's own code; fail a test whose work the device has not finished without error."""
    outcome = yield
    if outcome.excinfo is not None and is_active():
        note_what_is_missing(outcome.excinfo[1])
    _finish(item, outcome, "call", "test")
    _tell_races(item, outcome, "call")


def _tell_races(item: pytest.Item, outcome: Any, phase: str) -> None:
    """Let each race that stopped the program in this phase of a test fail the phase, or stand beside its own error."""
    if _RACES not in item.stash:
        return
    raised = item.stash[_RACES][1].raised
    races, raised[:] = raised[:], []
    if not races or _end_in_the_users_code(outcome):
        return
    _fail(item, outcome, phase, _LOST_RACE.format(races[0]))


_LOST_RACE = (
    "the test went on after a race: the program caught its RaceError, or lost it with a thread. (A test that means to race puts "
    "the race in a block `with npu_emulator.detect_races() as races:`.)\n{}"
)


def _end_in_the_users_code(outcome: Any) -> bool:
    """End the traceback of a race at the last line that is not the emulator's; it also takes the place of what it led to.

    False if the phase failed by no race. Several fixtures that fail at their ends are one group of errors.
    """
    if outcome.excinfo is None:
        return False
    error = outcome.excinfo[1]
    races = [race for one in getattr(error, "exceptions", [error]) if (race := _race_behind(one)) is not None]
    for race in races:
        last, step = None, race.__traceback__
        while step is not None:
            last = last if "/npu_emulator/" in step.tb_frame.f_code.co_filename else step
            step = step.tb_next
        if last is not None:
            last.tb_next = None
    if races and not hasattr(error, "exceptions") and races[0] is not error:
        outcome.force_exception(races[0])
    return bool(races)


def _race_behind(error: BaseException | None) -> BaseException | None:
    """The race that is this error or led to it: a capture that a race has ended says only that it cannot be ended."""
    from npu_emulator import RaceError

    while error is not None and not isinstance(error, RaceError):
        error = error.__context__
    return error


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, None]:
    """The same for the work that fixtures give the device at their end."""
    outcome = yield
    _finish(item, outcome, "teardown", "teardown")
    if _RACES not in item.stash:
        return
    try:
        item.stash[_RACES][0].close()  # reads the rest of the log
    except Exception as race:  # noqa: BLE001 - a race, or whatever else reading the log raises, is the test's
        if outcome.excinfo is None:
            outcome.force_exception(race)
        else:
            item.add_report_section("teardown", "npu", str(race))
    _tell_races(item, outcome, "teardown")
    del item.stash[_RACES]


def _finish(item: pytest.Item, outcome: Any, phase: str, what: str) -> None:
    """Let the device finish what a phase of a test gave it; what it says then fails the phase, or stands beside its own error."""
    if not is_active() or _with_ini(item.config).npu != "emulated":
        return
    late = _late_error(item.config)
    if not late:
        return
    _fail(item, outcome, phase, f"after the {what} the device reports: {late}")


def _fail(item: pytest.Item, outcome: Any, phase: str, why: str) -> None:
    """Fail a phase of a test; where it has failed already, put the reason beside its own error."""
    if outcome.excinfo is None or issubclass(outcome.excinfo[0], pytest.skip.Exception):
        outcome.force_exception(pytest.fail.Exception(f"npu: {why}", pytrace=False))
    else:
        item.add_report_section(phase, "npu", why)


_STUCK = pytest.StashKey[bool]()


def _late_error(config: pytest.Config) -> str:
    """What the device says when it has finished the work in its queues; empty without an error. It does not start a device.

    An error that no synchronisation of the test has reported would be the next test's.
    """
    torch = sys.modules.get("torch")
    if "torch_npu" not in sys.modules or torch is None or not torch.npu.is_initialized() or _STUCK in config.stash:
        return ""
    found = _error_of_waiting(torch)
    # An error is reported once. What is reported again, such as a stream that waits for ever, is not the next tests' fault.
    if found and _error_of_waiting(torch):
        config.stash[_STUCK] = True
        found += "\nThis state of the device stays, and tests that follow may fail by it; their ends are not checked any more"
    return found


def _error_of_waiting(torch: Any) -> str:
    from npu_emulator import current

    current().runtime.finish()  # of all devices; torch_npu's synchronize(1) would start the second one
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        said = str(error).partition("[emulated NPU] ")[2] or str(error)
        return said.replace(". Python line: an unknown line", "")
    return ""


@pytest.fixture(autouse=True)
def _npu_marks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Do what the markers `npu_schedule` and `npu_devices` say."""
    devices, order = (request.node.get_closest_marker(name) for name in ("npu_devices", "npu_schedule"))
    if devices is not None:
        _skip_without(_only_argument(devices, int, "a whole number from 1 on"))
    if order is None:
        yield
        return
    wanted = _only_argument(order, str, "a schedule, such as 'lazy'")
    if not is_active():
        yield
        return
    from npu_emulator import schedule
    from npu_emulator.schedules import parse

    wrong = None
    try:
        parse(wanted)
    except EmulatorError as error:
        wrong = error
    if wrong is not None:  # not below `except`: pytest would print both exceptions
        pytest.fail(f"npu_schedule: {wrong}", pytrace=False)
    with schedule(wanted):
        yield


def _only_argument(marker: pytest.Mark, kind: type[_Kind], expected: str) -> _Kind:
    """The argument of a marker. A test whose marker has another one fails with one sentence."""
    given = (*marker.args, *marker.kwargs.values())
    is_of_kind = len(given) == 1 and isinstance(given[0], kind)
    if not is_of_kind or (kind is int and given[0] < 1):
        pytest.fail(f"the marker {marker.name} takes {expected}; it has {given}", pytrace=False)
    return given[0]  # type: ignore[no-any-return]


def _skip_without(wanted: int) -> None:
    missing = _why_no_npu()
    if missing:
        pytest.skip(missing)
    import torch

    there = torch.npu.device_count()
    if there < wanted:
        pytest.skip(f"wants {wanted} NPUs; there {'is' if there == 1 else 'are'} {there}")


_NO_NPU = "there is no NPU: start pytest with --npu=emulated, or on a machine with one"


@cache
def _why_no_npu() -> str:
    """Why tests have no NPU; empty where they have one. Asked once: torch ends the process if an import that failed is repeated."""
    try:
        import torch
        import torch_npu  # noqa: F401 - gives torch its `npu`
    except (ImportError, OSError, RuntimeError) as error:
        said = str(error.__cause__ or error).partition("\n")[0]
        return f"{_NO_NPU} (torch_npu cannot be imported: {said})"
    return "" if torch.npu.is_available() else _NO_NPU


@pytest.fixture
def npu() -> torch.device:
    """The NPU of the tests as a `torch.device`. Skips the test where there is none."""
    _skip_without(1)
    import torch

    return torch.device("npu", torch.npu.current_device())
