"""The pytest plugin: one suite, either device."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_emulator import pytest_plugin
from npu_emulator.settings import Settings

_SUITE = """
import pytest
import torch

def test_adds():
    assert (torch.ones(2, device="npu") + 1).sum().item() == 4

def test_races():
    x, side = torch.zeros(4, device="npu"), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.add_(1)
    x.mul_(2)

def race(x, side):
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.add_(1)
    return x * 2

def test_catches_its_races():
    import npu_emulator
    with npu_emulator.detect_races() as races:
        race(torch.zeros(4, device="npu"), torch.npu.Stream())
    assert len(races) == 1
    with pytest.raises(npu_emulator.RaceError), npu_emulator.detect_races(stop_at_first=True):
        race(torch.zeros(4, device="npu"), torch.npu.Stream())

def test_catches_half_of_its_races():
    import npu_emulator
    x, side = torch.zeros(4, device="npu"), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.add_(1)
    with npu_emulator.detect_races() as races:
        x * 2
    assert not races
"""
_MARKED = """
import pytest
import torch
from npu_emulator import kernel_log

def ran_before_anyone_waits(device):
    x = torch.ones(4, device=device)
    torch.npu.synchronize()
    with kernel_log() as log:
        x + 1
        return len(log)

def test_the_schedule_of_the_configuration(npu):
    assert (npu.type, torch.npu.device_count(), ran_before_anyone_waits(npu)) == ("npu", 2, 0)

@pytest.mark.npu_schedule("fifo")
def test_another_schedule(npu):
    assert ran_before_anyone_waits(npu) == 1

def test_the_log_of_a_compilation(npu, caplog):
    torch._logging.trace_structured("artifact", lambda: {})
    assert not caplog.records

@pytest.mark.filterwarnings("error")
def test_torch_warns_of_nothing_at_a_registration(npu):
    import npugraph_ex
    from torch._inductor.pattern_matcher import joint_fwd_bwd
    x = torch.empty(2, device=npu, requires_grad=True)
    npugraph_ex.register_replacement(lambda x: x.sigmoid() * 2, lambda x: 2 * x.sigmoid(), [x]).remove()
    npugraph_ex.register_replacement(lambda x: x.sigmoid() * 2, lambda x: 2 * x.sigmoid(), [x], joint_fwd_bwd).remove()

@pytest.mark.npu_devices(2)
def test_two_devices():
    assert torch.ones(1, device="npu:1").item() == 1

@pytest.mark.npu_devices(3)
def test_three_devices():
    raise AssertionError

@pytest.mark.npu_devices("two")
def test_a_wrong_number():
    raise AssertionError

@pytest.mark.npu_devices(0)
def test_no_device():
    raise AssertionError

@pytest.mark.npu_schedule("lazzy")
def test_a_wrong_schedule():
    raise AssertionError

def test_a_kernel_that_fails_late(npu):
    torch.ones(2, device=npu)[torch.full((1,), 9, device=npu)]

@pytest.fixture
def ends_badly(npu):
    yield
    torch.ones(2, device=npu)[torch.full((1,), 8, device=npu)]

def test_a_fixture_whose_last_kernel_fails_late(ends_badly):
    pass

def test_a_stream_that_waits_for_ever(npu):
    torch.npu.ExternalEvent().wait(torch.npu.Stream())

def test_an_innocent_one(npu):
    assert torch.ones(3, device=npu).sum().item() == 3
"""


_PYTEST = [sys.executable, "-m", "pytest", "-q"]


def _pytest(tmp_path: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_suite.py").write_text(_SUITE)
    command = [*_PYTEST, "--rootdir", str(tmp_path)]
    return subprocess.run(
        [*command, *options, str(tmp_path)], env=environment, capture_output=True, text=True, check=False, timeout=900
    )


@pytest.mark.slow
def test_a_suite_runs_on_the_emulated_device(tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]) -> None:
    """`--npu=emulated` starts the device before torch is imported and says so in the header."""
    done = _pytest(tmp_path, fresh_environment(), "--npu=emulated", "--npu-schedule=lazy", "-v")
    assert "npu: emulated Ascend910B2, 1 device, schedule lazy" in done.stdout, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_configuration_markers_and_fixture(tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]) -> None:
    """The configuration chooses device and schedule; markers change the order, skip, or say what they take; in xdist, too.

    What the device reports late fails the test that launched it, or the teardown of its fixtures, and no later one.
    """
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nnpu = emulated\nnpu_schedule = lazy\nnpu_devices = 2\naddopts = --strict-markers -rs -n 1\n"
    )
    (tmp_path / "test_marked.py").write_text(_MARKED)
    done = _pytest(tmp_path, fresh_environment(), "-k", "not races and not adds")
    assert "2 failed, 7 passed, 1 skipped, 4 errors" in done.stdout, done.stdout + done.stderr
    assert "wants 3 NPUs; there are 2" in done.stdout
    for wrong in ("'two'", "0"):
        assert f"npu_devices takes a whole number from 1 on; it has ({wrong},)" in done.stdout
    assert done.stdout.count("must be 'fifo', 'lazy'") == 1
    late = re.findall(r"^npu: after the (\w+) the device reports: ([^,:]*)", done.stdout, re.MULTILINE)
    assert sorted(late) == [
        ("teardown", "aten.index.Tensor"), ("test", "aten.index.Tensor"), ("test", "deadlock"),
    ]  # fmt: skip
    assert done.stdout.count("This state of the device stays") == 1
    assert "Error" not in done.stdout, "a traceback of the plugin's own"


_REPLAYED = """
import pytest
import torch


@pytest.fixture(scope="module")
def captured():
    x, graph, side = torch.zeros(8, device="npu"), torch.npu.NPUGraph(), torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        y = x + 1
    return x, y, graph, side


def test_alone(captured):
    x, y, graph, _ = captured
    graph.replay()
    assert y.sum() == 8


def test_beside(captured):
    x, _, graph, side = captured
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.zero_()
    graph.replay()
    torch.npu.synchronize()
"""


_RACING_FIXTURES = """
import pytest
import torch

KEPT = []


def race():
    side, x = torch.npu.Stream(), torch.zeros(4, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.add_(1)
    y = x * 2
    torch.npu.current_stream().wait_stream(side)
    return y


def captured():
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        KEPT.append(race())
    return graph


@pytest.fixture(scope="session")
def eager():
    return race()


@pytest.fixture(scope="module")
def replayed():
    return captured()


def test_of_an_eager_race(eager):
    torch.npu.synchronize()


def test_of_a_racing_graph(replayed):
    replayed.replay()


def test_that_forgives_a_race():
    with pytest.raises(RuntimeError):
        KEPT.append(captured())


def test_that_captures_none():
    pass
"""


_LOST = """
import threading
from concurrent.futures import ThreadPoolExecutor
import npu_emulator
import pytest
import torch
from test_suite import race

def racy():
    race(torch.zeros(64, device="npu"), torch.npu.Stream())

def test_lost_in_a_pool(npu):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(racy)

@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_lost_in_a_thread(npu):
    thread = threading.Thread(target=racy)
    thread.start()
    thread.join()

def test_swallowed(npu):
    try:
        racy()
    except RuntimeError:
        pass

def test_swallowed_before_another_error(npu):
    try:
        racy()
    except RuntimeError:
        pass
    raise LookupError("of its own")

@pytest.fixture
def swallows_at_its_end(npu):
    yield
    try:
        racy()
    except RuntimeError:
        pass

def test_swallowed_in_a_fixture(swallows_at_its_end):
    pass

def test_a_thread_that_means_to_race(npu):
    with npu_emulator.detect_races() as races, ThreadPoolExecutor(1) as pool:
        pool.submit(racy).result()
    assert len(races) == 1

def test_that_does_not_race(npu):
    assert (torch.ones(2, device=npu) + 1).sum().item() == 4
"""


def test_a_race_whose_error_is_lost_fails_its_test(
    tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]
) -> None:
    """In a thread, or where the program catches RuntimeError, the error does not reach pytest. The race fails its test alone."""
    (tmp_path / "test_lost.py").write_text(_LOST)
    done = _pytest(tmp_path, fresh_environment(), "--npu=emulated", "--npu-races", "-k", "test_lost")
    assert set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)) == {
        "test_lost_in_a_pool",
        "test_lost_in_a_thread",
        "test_swallowed",
        "test_swallowed_before_another_error",
    }, done.stdout
    assert re.findall(r"^ERROR \S*::(\w+)", done.stdout, re.MULTILINE) == ["test_swallowed_in_a_fixture"]
    assert re.search(r"4 failed, 3 passed, .*1 error", done.stdout), done.stdout
    assert done.stdout.count("missing edge") == 5
    assert "LookupError: of its own" in done.stdout


@pytest.mark.slow
def test_races_fail_a_test(tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]) -> None:
    """With `--npu-races` a racing test fails with the report; one that catches its race in a block of its own passes.

    The first test that asks for a racing fixture, of any scope, ends in its race, with the line of the fixture. Whichever test
    comes first, what is captured for a module is known to all of its tests.
    """
    (tmp_path / "test_racing.py").write_text(_RACING_FIXTURES)
    (tmp_path / "test_replayed.py").write_text(_REPLAYED)
    done = _pytest(tmp_path, fresh_environment(), "--npu=emulated", "--npu-races")
    assert re.search(r"4 failed, 4 passed, .*2 errors", done.stdout), done.stdout + done.stderr
    assert set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)) == {
        "test_races",
        "test_catches_half_of_its_races",
        "test_that_forgives_a_race",
        "test_beside",  # at the line of its replay, the last work of the test
    }
    assert re.findall(r"^ERROR \S*::(\w+)", done.stdout, re.MULTILINE) == [
        "test_of_an_eager_race",
        "test_of_a_racing_graph",
    ]
    assert "missing edge" in done.stdout
    assert "in a replay of graph" in done.stdout
    frames = re.findall(r"^E +(/\S+):\d+ in", done.stdout, re.MULTILINE)
    assert {*frames} == {str(path) for path in tmp_path.glob("test_*.py")}, "lines of pytest, or of the emulator"
    assert "detector.py" not in done.stdout


def test_hardware_is_refused_where_there_is_none(
    tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]
) -> None:
    """`--npu=hardware` without an NPU stops with one sentence."""
    done = _pytest(tmp_path, fresh_environment(), "--npu=hardware")
    assert done.returncode == 4
    assert "there is no NPU here" in done.stderr


# torch_npu as it is where CANN is not installed, without its wheel's minute of failing.
_NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"


@pytest.mark.parametrize("file", ["test_suite.py", "conftest.py"])
def test_a_project_without_cann_is_told_of_the_emulated_device(
    file: str, tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]
) -> None:
    """Where tests, or a conftest, die of torch_npu's missing library, the last words say which option helps."""
    package = tmp_path / "site" / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_NO_CANN)
    (tmp_path / "test_suite.py").write_text("def test(): pass\n")
    (tmp_path / file).write_text("import torch_npu\n\ndef test(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path / "test_suite.py")]
    environment = {**fresh_environment(), "PYTHONPATH": str(package.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert said.count("`pytest --npu=emulated`") == 1, said
    assert "libhccl.so" in said


@pytest.mark.slow
def test_markers_and_the_fixture_skip_where_torch_cannot_be_imported(
    tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]
) -> None:
    """Torch does not survive a second import after one that failed, so the plugin tries it once."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(_NO_CANN)
    (tmp_path / "test_marked.py").write_text(
        _MARKED.replace("import torch\n", "").replace("from npu_em", "# from npu_em")
    )
    chosen = "(devices or configuration) and not (wrong or no_device)"
    done = subprocess.run(
        [*_PYTEST, "-rs", "-k", chosen, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**fresh_environment(), "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "3 skipped" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("start pytest with --npu=emulated, or on a machine with one (torch_npu cannot") > 0
    assert done.returncode == 0


def test_another_missing_library_is_left_alone(
    tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]
) -> None:
    """What has nothing to do with torch_npu gets no advice about it."""
    (tmp_path / "test_suite.py").write_text(_NO_CANN.replace("libhccl", "libGL"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)],
        env=fresh_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--npu" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--npu-races", "--npu-schedule=lazy"])
@pytest.mark.parametrize("device", [(), ("--npu=hardware",)])
def test_options_of_the_emulated_device_need_it(
    option: str, device: tuple[str, ...], tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]
) -> None:
    """Alone they would do nothing, and a suite full of races would pass."""
    done = _pytest(tmp_path, fresh_environment(), option, *device)
    assert done.returncode == 4
    assert re.search(f"{option.partition('=')[0]} .*add --npu=emulated", done.stderr)


def test_a_wrong_value_is_shown_as_the_option_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings' own message names variables, which the reader did not set."""
    monkeypatch.setattr(pytest_plugin, "is_active", lambda: False)
    monkeypatch.setattr(
        pytest_plugin, "activate", lambda **given: Settings.from_environment(schedule=given["schedule"])
    )
    options = argparse.Namespace(npu="emulated", npu_races=False, npu_schedule="pct:x", npu_devices=2)
    with pytest.raises(pytest.UsageError, match=r"^--npu=emulated --npu-schedule=pct:x --npu-devices=2: .*fifo"):
        pytest_plugin._start(options)


@pytest.mark.parametrize("option", ["devices", "schedule"])
def test_an_option_for_a_device_that_runs_already_is_refused(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """Under `python -m npu_emulator` it would do nothing, and tests for more devices would be skipped in silence."""
    running = types.SimpleNamespace(settings=Settings(devices=2, schedule="lazy"))
    monkeypatch.setattr(pytest_plugin, "is_active", lambda: True)
    monkeypatch.setattr("npu_emulator.current", lambda: running)
    same = argparse.Namespace(npu="emulated", npu_races=False, npu_schedule="lazy", npu_devices=2)
    pytest_plugin._start(same)
    setattr(same, f"npu_{option}", {"devices": 3, "schedule": "fifo"}[option])
    with pytest.raises(pytest.UsageError, match=rf"--npu-{option}=\w+ comes too late.* with {option} (2|lazy)\."):
        pytest_plugin._start(same)
