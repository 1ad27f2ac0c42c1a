"""Static kernels, with a stand-in for CANN's compiler that behaves, fails, hangs and writes rubbish."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import device_helpers
import pytest
import torch
from stand_in_cann import StandInCann, end_of_process
from torch import fx

import npu_emulator
from npugraph_ex.aclgraph import _npu_private
from npugraph_ex.aclgraph.static_kernels import packages, programs
from npugraph_ex.aclgraph.static_kernels.calls import operator_calls
from npugraph_ex.aclgraph.static_kernels.lease import Lease
from npugraph_ex.errors import StaticKernelError
from npugraph_ex.streams.ops import ENTERS, EXITS


def root() -> Path:
    """Where static kernels are kept."""
    return Path(os.environ["NPUGRAPH_EX_CACHE"]) / "static_kernels"


def processes() -> list[Path]:
    """The folders of processes that hold static kernels."""
    return list((root() / "processes").iterdir())


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two products of one signature, an addition, and a sum."""
    return (x @ w + x) @ w


def run(*sizes: int, function: Callable[..., Any] = model, dynamic: bool | None = False, **options: Any) -> None:
    """Compile with static kernels, call with each size, compare everything with eager."""
    w = torch.randn(4, 4, device="npu")
    calls = [(torch.randn(size, 4, device="npu"), w) for size in sizes]
    device_helpers.check(function, calls, dynamic=dynamic, static_kernel_compile=True, **options)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the library warned of."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- what is compiled -------------------------------------------------------------------------------------------------


def test_each_operator_is_described_once_and_values_are_eagers(
    cann: StandInCann, caplog: pytest.LogCaptureFixture
) -> None:
    """Three calls: the compiler gets each operator of the graph on its shapes, once, and the results are eager's."""
    run(3, 3, 3)
    assert cann.compiled() == [{("aten_matmul_default", ((3, 4), (4, 4))), ("aten_add__Tensor", ((3, 4), (3, 4)))}]
    assert warnings(caplog) == []
    (call,) = cann.calls()
    assert call[call.index("-v") + 1] == torch.npu.get_device_name().split()[0]
    assert int(call[call.index("-j") + 1]) >= 1


def test_new_sizes_compile_only_what_is_new(cann: StandInCann) -> None:
    """Each captured size gets kernels of its own, of the sizes of that call; what is compiled already is not again."""
    run(3, 5, 3, 5, dynamic=True)
    of_size = [{shapes[0][0] for _, shapes in compiled} for compiled in cann.compiled()]
    assert of_size == [{3}, {5}]
    run(5, 6)
    assert [{shapes[0][0] for _, shapes in compiled} for compiled in cann.compiled()] == [{3}, {5}, {6}]


def test_the_forward_runs_once(cann: StandInCann) -> None:
    """An input that is written is written once a call, and an operator of the program's own runs no extra time."""
    seen: list[torch.device] = []

    @torch.library.custom_op("static_kernel_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device)
        return x * 2

    counted.register_fake(torch.empty_like)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return counted(x) + x

    def calls(**options: object) -> int:
        seen.clear()
        x = torch.zeros(3, device="npu")
        graph = device_helpers.compiled(step, **options)
        for number in range(1, 4):
            torch.testing.assert_close(graph(x).cpu(), torch.full((3,), 3.0 * number), rtol=0, atol=0)
            torch.testing.assert_close(x.cpu(), torch.full((3,), float(number)), rtol=0, atol=0)
        return len(seen)

    for how in ({}, {"force_eager": True}):
        without = calls(**how)
        assert calls(static_kernel_compile=True, **how) == without
    assert {shapes[0] for compiled in cann.compiled() for _, shapes in compiled} == {(3,)}


def test_random_numbers_go_on_as_without(cann: StandInCann) -> None:
    """The generator is where it would be: nothing random runs to be described."""

    def noisy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x @ w) + x

    results = []
    for options in ({}, {"static_kernel_compile": True}):
        torch.npu.manual_seed(7)
        x = torch.ones(3, 4, device="npu")
        results.append(device_helpers.compiled(noisy, **options)(x, torch.ones(4, 4, device="npu")).cpu())
    assert torch.equal(*results)
    assert {name for name, _ in cann.compiled()[0]} == {"aten_matmul_default", "aten_add__Tensor"}


def test_a_call_knows_its_limits_and_its_level() -> None:
    """CANN may choose another kernel in a scope; an inner one keeps what the outer one says, streams do not matter."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    graph.call_function(ENTERS[0], (["_op_aicore_num", "_op_vectorcore_num"], ["4", "8"]))
    value = graph.call_function(torch.ops.aten.add.Tensor, (value, 1))
    graph.call_function(ENTERS[0], (["_deterministic_level", "_user_stream_label"], ["1", "side"]))
    value = graph.call_function(torch.ops.aten.mul.Tensor, (value, 2))
    for _ in range(2):
        graph.call_function(EXITS[0])
    graph.output((graph.call_function(torch.ops.aten.sub.Tensor, (value, 1)),))
    calls = operator_calls(fx.GraphModule({}, graph), [torch.ones(2, device="npu")])
    limits = {"_op_aicore_num": "4", "_op_vectorcore_num": "8"}
    assert [dict(call.scope) for call in calls] == [limits, {**limits, "_deterministic_level": "1"}, {}]


def test_collectives_are_not_described() -> None:
    """One process alone would wait for its peers for ever."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.ops.npu.npu_mm_all_reduce_base.default, (x, x, "group"))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (both, 1)),))
    calls = operator_calls(fx.GraphModule({}, graph), [torch.ones(2, 2, device="npu")])
    assert [call.target for call in calls] == [torch.ops.aten.add.Tensor]


def test_vllms_sizes_are_compiled_and_no_others(cann: StandInCann) -> None:
    """Op by op, as vLLM runs it: the first size decides, and only those of its list get kernels."""
    run(3, 5, 6, 5, dynamic=True, force_eager=True, _vllm_aclnn_static_kernel_sym_range=[5, 8])
    assert [{shapes[0][0] for _, shapes in compiled} for compiled in cann.compiled()] == [{5}]


def test_nothing_is_compiled_under_the_engines_own_capture(cann: StandInCann) -> None:
    """A graph that runs op by op inside somebody's capture only runs: describing would end that capture."""
    x, w = torch.randn(3, 4, device="npu"), torch.randn(4, 4, device="npu")
    fast = device_helpers.compiled(model, force_eager=True)
    fast(x, w)  # compiled, without static kernels
    slow = device_helpers.compiled(model, force_eager=True, static_kernel_compile=True)
    captured = torch.npu.NPUGraph()
    with torch.npu.graph(captured):
        result = slow(x, w)
    captured.replay()
    torch.testing.assert_close(result.cpu(), model(x, w).cpu(), rtol=0, atol=0)
    assert cann.calls() == []
    slow(x, w)
    assert len(cann.calls()) == 1


# -- where it does not work -------------------------------------------------------------------------------------------


def test_without_cann_one_sentence(
    cann: StandInCann, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No op_compiler: said once, however many graphs there are, and everything runs."""
    monkeypatch.delenv("ASCEND_HOME_PATH")
    run(3, 5, dynamic=True)
    run(7)
    (said,) = warnings(caplog)
    assert "op_compiler is neither on PATH nor in ASCEND_HOME_PATH/bin; source CANN's set_env.sh" in said
    assert cann.calls() == []


def test_the_compiler_is_found_on_the_path_first(
    cann: StandInCann, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PATH is what set_env.sh sets."""
    other = StandInCann.at(tmp_path / "other")
    monkeypatch.setenv("PATH", f"{other.home / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert programs.find_compiler() == other.home / "bin" / "op_compiler"
    del cann


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("fail", "op_compiler failed with exit status 3; it said: E10001: no such operator"),
        ("hang", "op_compiler was stopped after 1 seconds"),
        ("nothing", "op_compiler ended without an error and without a package"),
        ("rubbish", r"static_kernel_\d+.run (cannot be started|failed with exit status)"),
        ("broken", r"static_kernel_\d+.run failed with exit status 1; it said: archive damaged"),
        ("empty", r"static_kernel_\d+.run ended without an error and installed nothing"),
    ],
)
def test_a_compiler_that_does_not_work(
    cann: StandInCann, does: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning that says what happened, values as in eager, and neither processes nor files are left."""
    cann.does(does)
    run(3, 3, 3, static_kernel_time_limit=1 if does == "hang" else 60)
    (warning,) = warnings(caplog)
    assert re.search(said, warning), warning
    assert len(cann.calls()) == 1
    assert not is_alive(int(cann.calls()[0][0]))
    end_of_process()
    assert processes() == []
    assert cann.installed() == []


def is_alive(group: int) -> bool:
    """Whether a process of a group still runs; one that ended and that nobody has asked about does not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = status.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


# -- installing, reuse, clearing up -----------------------------------------------------------------------------------


def test_kernels_go_into_canns_folder_and_out_of_it(cann: StandInCann) -> None:
    """An older CANN has one folder: packages are installed there, CANN chooses anew, and the end uninstalls them."""
    before = npu_emulator.current().runtime.static_kernel_choice()[0]
    run(3)
    assert len(cann.installed()) == 1
    assert npu_emulator.current().runtime.static_kernel_choice() == (before + 1, "")
    end_of_process()
    assert cann.installed() == []
    assert processes() == []


def test_a_newer_cann_takes_a_folder_of_the_processs_own(cann: StandInCann, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is told the folder, CANN is told the folder, and the end removes it."""
    monkeypatch.setattr(_npu_private, "kernels_in_a_folder", lambda: True)
    run(3)
    (process,) = processes()
    assert npu_emulator.current().runtime.static_kernel_choice()[1] == str(process / "kernels")
    assert [path.name.rpartition("_")[0] for path in (process / "kernels").iterdir()] == ["static_kernel"]
    assert [line.split()[1:] for line in cann.installs()] == [[f"--install-path={process / 'kernels'}", "-q"]]
    assert cann.installed() == []
    end_of_process()
    assert processes() == []


def test_the_next_process_reuses_what_was_built(cann: StandInCann) -> None:
    """Equal descriptions, equal key: the package is installed again and not compiled again."""
    run(3)
    end_of_process()
    run(3)
    assert len(cann.calls()) == 1
    assert len(cann.installs()) == 2
    run(4)
    assert len(cann.calls()) == 2


def test_the_level_is_part_of_the_key(cann: StandInCann) -> None:
    """Another deterministic level may want other kernels."""
    run(3)
    end_of_process()
    restore = _npu_private.set_deterministic_level(1)
    try:
        run(3)
    finally:
        restore()
    assert len(cann.calls()) == 2


def test_the_cache_can_be_switched_off(cann: StandInCann) -> None:
    """`disable_static_kernel_compile_cache`: compiled in every process, and nothing is kept."""
    for _ in range(2):
        run(3, disable_static_kernel_compile_cache=True)
        assert len(cann.installed()) == 1
        end_of_process()
    assert len(cann.calls()) == 2
    assert not (root() / "packages").exists()


@pytest.mark.parametrize("damage", ["changed", "writable", "gone"])
def test_a_package_that_is_not_as_it_was_built_is_not_run(
    cann: StandInCann, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be executed: what was changed, or what others can write, is compiled anew, and a warning says so."""
    run(3)
    end_of_process()
    (package,) = (root() / "packages").glob("*/*.run")
    assert stat.S_IMODE(package.stat().st_mode) == 0o700
    if damage == "changed":
        package.write_text(package.read_text() + "\necho foreign\n")
    elif damage == "writable":
        package.chmod(0o777)
    else:
        package.unlink()
    run(3)
    assert len(cann.calls()) == 2
    (said,) = warnings(caplog)
    assert "Static kernels are compiled anew" in said


def test_a_package_that_others_have_installed_stays(cann: StandInCann) -> None:
    """Two processes with one package in CANN's folder: the first to end leaves it, the last removes it."""
    run(3)
    (name,) = cann.installed()
    other, release = os.pipe()
    child = os.fork()
    if child == 0:
        Lease.of(root()).note_installed(name)
        os.close(release)
        os.read(other, 1)
        os._exit(0)
    os.close(other)
    wait_until(lambda: any((folder / "installed").exists() and str(child) in folder.name for folder in processes()))
    end_of_process()
    assert cann.installed() == [name]
    os.close(release)
    os.waitpid(child, 0)
    Lease.of(root())  # the next process
    assert cann.installed() == []


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for another process, not for ever."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)


def test_what_a_killed_process_held_is_cleared_up_by_the_next(cann: StandInCann, tmp_path: Path) -> None:
    """Killed with kernels installed and the compiler running: the next process stops the one and removes the others."""
    cann.does("hang")
    child = os.fork()
    if child == 0:
        lease = Lease.of(root())
        lease.kernels.mkdir()
        lease.note_installed("static_kernel_1")
        folder = cann.home / "opp" / "static_kernel" / "ai_core" / "static_kernel_1"
        folder.mkdir(parents=True)
        (folder / "uninstall.sh").write_text('#!/bin/sh\nrm -r "$(dirname "$0")"\n')
        (folder / "uninstall.sh").chmod(0o755)
        programs.compile_descriptions(
            programs.find_compiler(), tmp_path, lease.work(), soc="x", limit=60, started=lease.note_compiler
        )
        os._exit(1)
    wait_until(lambda: any((folder / "compiler").exists() for folder in (root() / "processes").glob("*")))
    wait_until(lambda: bool(cann.calls()))
    compiler = int(cann.calls()[0][0])
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert is_alive(compiler)
    assert cann.installed() == ["static_kernel_1"]
    cann.does("behave")
    run(3)
    wait_until(lambda: not is_alive(compiler))
    assert [folder.name.partition("-")[0] for folder in processes()] == [str(os.getpid())]
    assert "static_kernel_1" not in cann.installed()


def test_a_living_process_is_left_alone(cann: StandInCann) -> None:
    """A lease whose process lives is nobody's to clear up, also for a process forked from it."""
    mine = Lease.of(root())
    child = os.fork()
    if child == 0:
        mine.close()  # the parent's: nothing to do
        os._exit(0 if Lease.of(root()).folder != mine.folder and mine.folder.exists() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mine.folder.exists()
    del cann


# -- several processes ------------------------------------------------------------------------------------------------


def test_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    """Several at once ask for one key: one build, and everybody gets its package. A failure is not repeated by each."""
    started, built = threading.Event(), []

    def build() -> list[Path]:
        built.append(threading.get_ident())
        started.set()
        time.sleep(0.3)
        folder = tmp_path / f"work-{len(built)}"
        folder.mkdir()
        (folder / "a.run").write_text("#!/bin/sh\n")
        return [folder / "a.run"]

    def fail() -> list[Path]:
        built.append(threading.get_ident())
        time.sleep(0.3)
        raise StaticKernelError("no such operator")

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: packages.obtain(tmp_path, "key", build, limit=10), range(4)))
        assert len(built) == 1
        assert got == 4 * [[tmp_path / "packages" / "key" / "a.run"]]
        built.clear()
        failed = [pool.submit(packages.obtain, tmp_path, "other", fail, limit=10) for _ in range(4)]
        assert [str(one.exception()) for one in failed] == 4 * ["no such operator"]
        assert len(built) == 1
    with pytest.raises(StaticKernelError):  # who comes later tries again
        packages.obtain(tmp_path, "other", fail, limit=10)
    assert len(built) == 2


_OTHER_PROCESS = """
import os, sys, time
import npu_emulator
npu_emulator.activate(quiet=True)
import torch
os.environ["ASCEND_HOME_PATH"] = sys.argv[1]  # torch_npu, while it is imported, looks for more of CANN there
def model(x, w):
    return (x @ w + x) @ w
x, w = torch.randn(3, 4).npu(), torch.randn(4, 4).npu()
fast = torch.compile(model, backend="npugraph_ex", dynamic=False, options={"static_kernel_compile": True})
print(all(torch.equal(fast(x, w).cpu(), model(x, w).cpu()) for _ in range(3)), flush=True)
time.sleep(600)
"""


def test_two_processes_at_once_and_one_is_killed(cann: StandInCann) -> None:
    """While one process compiles, this one waits and takes over what was built; then the other is killed, and this ends."""
    cann.does("wait")
    environment = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS, str(cann.home)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        wait_until(lambda: len(cann.calls()) == 1, seconds=120)
        threading.Timer(0.5, (cann.home / "go").touch).start()
        run(3)
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
    finally:
        other.kill()
        other.communicate()
    assert len(cann.calls()) == 1
    assert len(cann.installed()) == 1
    end_of_process()
    Lease.of(root())  # the next process clears up after the one that was killed
    assert cann.installed() == []
    assert [folder.name.partition("-")[0] for folder in processes()] == [str(os.getpid())]
