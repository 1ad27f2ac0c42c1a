"""Random projects for the pytest plugin: which phases of which tests fail, are skipped, and what their reports say.

A project is one file of tests, with fixtures and markers, run by pytest in this process. A phase of a test may race, lose the
error of a race, launch a kernel that fails late, or fail by itself. The model knows which of that the plugin has to tell, with
the options and the configuration that are given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

import npu_emulator
from npugraph_ex.testing.generator.choices import Choices, Sampled

_HEAD = """\
import threading

import pytest
import torch

import npu_emulator

KEPT = []  # memory that a race leaves in use


def race():
    x, side = torch.zeros(8, device="npu"), torch.npu.Stream()
    KEPT.append(x)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.add_(1)
    y = x * 2
    torch.npu.current_stream().wait_stream(side)
    torch.npu.synchronize()
    return y


def forgives():
    try:
        race()
    except RuntimeError:
        pass


def loses():
    thread = threading.Thread(target=race)
    thread.start()
    thread.join()


def notes():
    with npu_emulator.detect_races() as races:
        race()
    assert len(races) == 1


def adds():
    assert (torch.ones(2, device="npu") + 1).sum().item() == 4


def raises():
    raise LookupError("of its own")


def late():
    torch.ones(2, device="npu")[torch.full((1,), 9, device="npu")]


def runs_at_once():
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    with npu_emulator.kernel_log() as log:
        x + 1
        return len(log) == 1
"""
_BODIES = ("adds", "race", "forgives", "loses", "notes", "late", "raises")
_FIXTURE = """

@pytest.fixture{scope}
def {name}({asked}):
    {setup}()
    yield
    {teardown}()
"""
_OPTIONS = (
    "-p", "npu_emulator.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=no",
    "--import-mode=importlib", "--strict-markers", "-W", "ignore::pytest.PytestAssertRewriteWarning",
    "-W", "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)  # fmt: skip
_FORGIVEN = "the test went on after a race"
_RACE, _OWN, _LATE = "missing edge", "LookupError: of its own", "index 9 is out of bounds"
_USAGE, _MARKED, _FIXED, _EXPECTED, _RACES = 20, 45, 45, 30, 70
"""Chances in percent: that pytest is used wrongly; that a test has a marker; that it asks for a fixture; that a race is expected;
that races are looked for."""


@dataclass(frozen=True)
class _Fixture:
    """What a fixture does; one of a wider scope is set up for the first test that asks for it."""

    name: str
    is_shared: bool
    setup: str
    teardown: str

    @property
    def source(self) -> str:
        scope, asked = ('(scope="module")', "") if self.is_shared else ("", "npu")
        return _FIXTURE.format(scope=scope, name=self.name, asked=asked, setup=self.setup, teardown=self.teardown)


@dataclass(frozen=True)
class _Test:
    """One test: its markers, as they are written, and what they mean."""

    name: str
    body: str
    fixture: _Fixture | None
    schedule: object
    devices: object
    is_expected: bool

    @property
    def source(self) -> str:
        marks = [f"@pytest.mark.npu_schedule({_written(self.schedule)})\n"] if self.schedule is not None else []
        marks += [f"@pytest.mark.npu_devices({_written(self.devices)})\n"] if self.devices is not None else []
        if self.is_expected:
            marks.append("@pytest.mark.xfail(raises=npu_emulator.RaceError, strict=True)\n")
        order = f"    assert runs_at_once() is {self.schedule == 'fifo'}\n" if self.schedule in {"fifo", "lazy"} else ""
        asked = self.fixture.name if self.fixture else ""
        return f"\n\n{''.join(marks)}def {self.name}({asked}):\n{order}    {self.body}()\n"


def _written(values: object) -> str:
    return ", ".join(map(repr, values)) if isinstance(values, tuple) else repr(values)


@dataclass(frozen=True)
class _Invocation:
    """How pytest is started: its options, the configuration, and what a refusal says; empty where it runs."""

    options: tuple[str, ...]
    lines: tuple[str, ...]
    has_device: bool
    has_races: bool
    refusal: str


@dataclass(frozen=True)
class _ExpectedPhase:
    """What is expected of a phase of a test.

    Attributes:
        outcome: passed, failed or skipped.
        says: a text of its report.
        forgives: whether its report says that the test went on after a race; None where it may say so or not.
    """

    outcome: str = "passed"
    says: str = ""
    forgives: bool | None = False


class _Reports(dict[tuple[str, str], pytest.TestReport]):
    """A plugin of the inner pytest that keeps its reports, by test and phase."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep one."""
        self[report.nodeid.rpartition("::")[2], report.when or ""] = report


def pytest_project_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    choices = Choices(Sampled(f"pytest projects {seed}"))
    use = _use(choices)
    tests = [_drawn_test(choices, number, use) for number in range(choices.number(2, 4))]
    source = "".join(
        (_HEAD, *(test.fixture.source for test in tests if test.fixture), *(test.source for test in tests))
    )
    kept = _Reports()
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    said = StringIO()
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, {**clean, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, clear=True),
        redirect_stdout(said), redirect_stderr(said),
    ):  # fmt: skip
        root = Path(folder)
        (root / "pytest.ini").write_text("\n".join(("[pytest]", *use.lines)), encoding="utf-8")
        file = root / f"test_project_{seed}.py"
        file.write_text(source, encoding="utf-8")
        words = (*_OPTIONS, *use.options, f"--rootdir={root}", "-c", str(root / "pytest.ini"), str(file))
        status = pytest.main([*words], plugins=[kept])
        wrong = _wrong(use, tests, status, said.getvalue(), kept, file)
    return f"{wrong}\npytest {' '.join(use.options)}, {use.lines}\n{source.removeprefix(_HEAD)}" if wrong else ""


def _use(choices: Choices) -> _Invocation:
    settings = npu_emulator.current().settings
    options, lines, refusal = [], [], ""
    how = choices.pick(("option", "line", "neither"))
    if how == "option":
        options.append("--npu=emulated")
    if how == "line":
        lines.append("npu = emulated")
    has_races = choices.chance(_RACES)
    options += ["--npu-races"] if has_races else []
    if how != "neither" and choices.chance(40):
        options.append(f"--npu-schedule={settings.schedule}")
    if how != "neither" and choices.chance(40):
        lines.append(f"npu_devices = {settings.devices}")
    if choices.chance(_USAGE):
        late, other = settings.devices + 1, "lazy" if settings.schedule != "lazy" else "fifo"
        wrong: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
            (("--npu=hardware",), (), "but this process runs under npu_emulator"),
            (("--npu=hardware", "--npu-races"), (), "--npu-races is for the emulated device"),
            ((), ("npu = hardware",), "but this process runs under npu_emulator"),
            ((), ("npu = emulatd",), "npu = emulatd: the configuration takes emulated or hardware"),
            (("--npu=emulated",), ("npu_devices = two",), "npu_devices = two: the configuration takes a whole number"),
            (("--npu=emulated", f"--npu-devices={late}"), (), f"with devices {settings.devices}"),
            (("--npu=emulated",), (f"npu_devices = {late}",), f"--npu-devices={late} comes too late"),
            (("--npu=emulated", f"--npu-schedule={other}"), (), f"--npu-schedule={other} comes too late"),
            (("--npu=emulated",), (f"npu_schedule = {other}",), f"with schedule {settings.schedule}"),
        )  # fmt: skip
        given, configured, refusal = choices.pick(wrong)
        options, lines = [*given], [*configured]
    return _Invocation(tuple(options), tuple(lines), how != "neither", has_races, refusal)


def _drawn_test(choices: Choices, number: int, use: _Invocation) -> _Test:
    # Without the option nobody asks the device at a test's end, so what fails late would be the next test's fault.
    bodies = tuple(body for body in _BODIES if use.has_device or body != "late")
    early = tuple(body for body in bodies if body != "late")
    fixture = None
    if choices.chance(_FIXED):
        is_shared = choices.chance(40)
        fixture = _Fixture(f"fixture_{number}", is_shared, choices.pick(early), choices.pick(bodies))
    schedule = devices = None
    if choices.chance(_MARKED):
        schedule = choices.pick(("lazy", "lazy", "fifo", "random:1", "lazzy", 5, (), ("lazy", "fifo")))
    if choices.chance(_MARKED):
        there = npu_emulator.current().settings.devices
        devices = choices.pick((1, there, there, there + 1, 0, "two", (), (1, 2)))
    body = choices.pick(bodies)
    is_expected = body == "race" and fixture is None and choices.chance(_EXPECTED)
    return _Test(f"test_{number}", body, fixture, schedule, devices, is_expected)


def _raised(body: str, use: _Invocation) -> str:
    """What the report says of the error that a body raises; empty where it raises none."""
    if body == "race":
        return _RACE if use.has_races else ""
    return {"raises": _OWN, "late": _LATE}.get(body, "")


def _phase(bodies: Sequence[str], use: _Invocation, marked: _ExpectedPhase = _ExpectedPhase()) -> _ExpectedPhase:
    """What a phase is in which these bodies run, and then markers say something. Of several errors any may be shown."""
    errors = [error for body in bodies if (error := _raised(body, use))]
    forgives: bool | None = use.has_races and any(body in {"forgives", "loses"} for body in bodies)
    if errors:
        shown = errors[0] if len(errors) == 1 else ""
        return _ExpectedPhase("failed", shown, None if forgives and _RACE in errors else forgives)
    if forgives:
        return _ExpectedPhase("failed", marked.says if marked.outcome == "failed" else _FORGIVEN, forgives)
    return marked


def _of_markers(test: _Test) -> _ExpectedPhase:
    """What the markers of a test say before it runs: number of devices first, then schedule."""
    if test.devices is not None:
        if not isinstance(test.devices, int) or test.devices < 1:
            return _ExpectedPhase("failed", "the marker npu_devices takes a whole number from 1 on")
        if test.devices > npu_emulator.current().settings.devices:
            return _ExpectedPhase("skipped", f"wants {test.devices} NPUs")
    if test.schedule == "lazzy":
        return _ExpectedPhase("failed", "must be 'fifo', 'lazy'")
    if test.schedule is None or isinstance(test.schedule, str):
        return _ExpectedPhase()
    return _ExpectedPhase("failed", "the marker npu_schedule takes a schedule")


def _of_setup(test: _Test, use: _Invocation) -> tuple[_ExpectedPhase, list[_Fixture]]:
    """The setup of a test, and the fixtures that it leaves open: shared ones come first, then markers, then its own."""
    fixture, done, entered = test.fixture, list[str](), list[_Fixture]()

    def enter(one: _Fixture) -> bool:
        done.append(one.setup)
        if _raised(one.setup, use):
            return False
        entered.append(one)
        return True

    if fixture and fixture.is_shared and not enter(fixture):
        return _phase(done, use), entered
    marked = _of_markers(test)
    if marked.outcome == "passed" and fixture and not fixture.is_shared:
        enter(fixture)
    return _phase(done, use, marked), entered


def _expected(tests: Sequence[_Test], use: _Invocation) -> dict[tuple[str, str], _ExpectedPhase]:
    """What is expected of each phase of each test that runs."""
    expected: dict[tuple[str, str], _ExpectedPhase] = {}
    shared: list[str] = []
    for test in tests:
        expected[test.name, "setup"], entered = _of_setup(test, use)
        shared += [one.teardown for one in entered if one.is_shared]
        if expected[test.name, "setup"].outcome == "passed":
            called = _phase((test.body,), use)
            if test.is_expected:
                called = (
                    _ExpectedPhase("skipped", _RACE) if use.has_races else _ExpectedPhase("failed", "XPASS(strict)")
                )
            expected[test.name, "call"] = called
        own = [one.teardown for one in entered if not one.is_shared]
        expected[test.name, "teardown"] = _phase([*own, *(shared if test is tests[-1] else ())], use)
    return expected


def _racing_lines(file: Path) -> Iterator[str]:
    """The two lines that race, as a report names them."""
    for number, line in enumerate(_HEAD.splitlines(), 1):
        if line.strip() in {"x.add_(1)", "y = x * 2"}:
            yield f"{file}:{number} in race"


def _wrong(use: _Invocation, tests: Sequence[_Test], status: int, said: str, reports: _Reports, file: Path) -> str:
    if use.refusal:
        right = status == pytest.ExitCode.USAGE_ERROR and use.refusal in said
        return "" if right else f"the status is {status}, and no word of {use.refusal!r}: {said[-2000:]}"
    settings = npu_emulator.current().settings
    devices = f"{settings.devices} device{'' if settings.devices == 1 else 's'}"
    header = f"npu: emulated {settings.soc}, {devices}, schedule {settings.schedule}"
    if header not in said:
        return f"the header lacks {header!r}: {said[-2000:]}"
    expected = _expected(tests, use)
    if set(reports) != set(expected):
        return f"the phases {sorted(set(reports) ^ set(expected))} run, or not: {said[-2000:]}"
    for key, phase in expected.items():
        outcome, text = reports[key].outcome, str(reports[key].longrepr)
        if outcome != phase.outcome or phase.says not in text:
            return f"{' '.join(key)} {outcome} instead of {phase}: {text}"
        beside = [text for title, text in reports[key].sections if title == f"Captured npu {key[1]}"]
        if phase.forgives is not None and phase.forgives != any(_FORGIVEN in one for one in (text, *beside)):
            return f"{' '.join(key)} says that it went on after a race, or not, instead of {phase}: {text} {beside}"
        if phase.says == _RACE and (missing := [line for line in _racing_lines(file) if line not in text]):
            return f"the report of {' '.join(key)} does not name {missing}: {text}"
        crash = getattr(reports[key].longrepr, "reprcrash", None)
        if phase.says == _RACE and crash and crash.path != str(file):
            return f"the race of {' '.join(key)} ends in {crash.path}"
    failed = any(phase.outcome == "failed" for phase in expected.values())
    return "" if status == failed else f"the status is {status}"
