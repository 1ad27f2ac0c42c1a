"""Static kernels of several processes: one builds for all, what others hold stays, what a killed one held is cleared up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from static_kernel_runs import is_alive, processes, root, run, wait_until

from npugraph_ex._own_files import write_whole
from npugraph_ex.aclgraph.static_kernels import packages, programs
from npugraph_ex.aclgraph.static_kernels.lease import Lease
from npugraph_ex.aclgraph.static_kernels.locks import locked
from npugraph_ex.errors import StaticKernelError
from npugraph_ex_conformance.stand_in_cann import StandInCann, end_of_process


@contextmanager
def _other_process(text: str) -> Iterator[subprocess.Popen[str]]:
    """A fresh interpreter with `Lease` and the folder `root`: it has run ``text`` on entry, and ends when it reads a line."""
    setup = (
        "import npu_emulator\nnpu_emulator.activate(quiet=True)\nimport os, sys, threading\nfrom pathlib import Path\n"
    )
    setup += "from npugraph_ex.aclgraph.static_kernels import programs\n"
    setup += f"from npugraph_ex.aclgraph.static_kernels.lease import Lease\nroot = Path({str(root())!r})\n"
    command = [sys.executable, "-c", f"{setup}{text}\nprint('done', flush=True)\nsys.stdin.readline()\n"]
    # torch_npu, while it is imported, looks for more of CANN where ASCEND_HOME_PATH points.
    environment = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert next(process.stdout) == "done\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_package_that_others_have_installed_stays(cann: StandInCann) -> None:
    """Two processes with one package in CANN's folder: the first to end leaves it, the last removes it."""
    run(3)
    (name,) = cann.packages()
    with _other_process(f"Lease.current(root).note_installed({name!r})") as other:
        end_of_process()
        assert cann.packages() == [name]
        other.kill()
    Lease.current(root())  # the next process
    assert cann.packages() == []


@pytest.mark.slow
def test_what_a_killed_process_held_is_cleared_up_by_the_next(cann: StandInCann, tmp_path: Path) -> None:
    """Killed with kernels installed and the compiler running: the next process stops the one and removes the others."""
    cann.does("hang")
    folder = cann.home / "opp" / "static_kernel" / "ai_core" / "static_kernel_1"
    folder.mkdir(parents=True)
    (folder / "uninstall.sh").write_text('#!/bin/sh\nrm -r "$(dirname "$0")"\n')
    (folder / "uninstall.sh").chmod(0o755)
    text = f"""
lease = Lease.current(root)
lease.kernels.mkdir()
lease.note_installed("static_kernel_1")
compiler = Path({str(programs.find_compiler())!r})
options = {{"soc": "x", "limit": 60, "started": lease.note_compiler}}
threading.Thread(target=lambda: programs.compile_descriptions(compiler, Path({str(tmp_path)!r}), lease.work(), **options)).start()
"""
    with _other_process(text) as other:
        wait_until(lambda: any((one / "compiler").exists() for one in processes()))
        wait_until(lambda: bool(cann.calls()))
        compiler = int(cann.calls()[0][0])
        other.kill()
    assert is_alive(compiler)
    assert cann.packages() == ["static_kernel_1"]
    cann.does("behave")
    run(3)
    wait_until(lambda: not is_alive(compiler))
    assert [folder.name.partition("-")[0] for folder in processes()] == [str(os.getpid())]
    assert "static_kernel_1" not in cann.packages()


@pytest.mark.slow
def test_a_living_process_is_left_alone(cann: StandInCann) -> None:
    """A lease whose process lives is nobody's to clear up, also for a process forked from it."""
    text = """
mine = Lease.current(root)
child = os.fork()
if child == 0:
    mine.close()  # the parent's: nothing to do
    os._exit(0 if Lease.current(root).folder != mine.folder and mine.folder.exists() else 1)
assert os.waitpid(child, 0)[1] == 0
assert mine.folder.exists()
"""
    mine = Lease.current(root())
    with _other_process(text) as other:
        other.communicate("end\n")
    assert other.returncode == 0
    assert mine.folder.exists()
    del cann


def test_one_builds_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at once ask for one key: one build, and everybody gets its package. A failure is not repeated by each."""
    built: list[int] = []
    all_ask = threading.Barrier(4, timeout=900)

    def locked_together(path: Path, limit: float) -> AbstractContextManager[None]:
        all_ask.wait()
        return locked(path, limit)

    def written_by_another_clock(path: Path, content: bytes) -> None:  # a file system may have one of its own
        write_whole(path, content)
        os.utime(path, (1, 1))

    def build() -> list[Path]:
        built.append(threading.get_ident())
        folder = tmp_path / f"work-{len(built)}"
        folder.mkdir()
        (folder / "a.run").write_text("#!/bin/sh\n")
        return [folder / "a.run"]

    def fail() -> list[Path]:
        built.append(threading.get_ident())
        raise StaticKernelError("no such operator")

    monkeypatch.setattr(packages, "locked", locked_together)
    monkeypatch.setattr(packages, "write_whole", written_by_another_clock)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: packages.obtain(tmp_path, "key", build, limit=900), range(4)))
        assert len(built) == 1
        assert got == 4 * [[tmp_path / "packages" / "key" / "a.run"]]
        built.clear()
        failed = [pool.submit(packages.obtain, tmp_path, "other", fail, limit=900) for _ in range(4)]
        assert [str(one.exception()) for one in failed] == 4 * ["no such operator"]
        assert len(built) == 1
    monkeypatch.setattr(packages, "locked", locked)
    with pytest.raises(StaticKernelError):  # who comes later tries again
        packages.obtain(tmp_path, "other", fail, limit=900)
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


@pytest.mark.slow
def test_two_processes_at_once_and_one_is_killed(cann: StandInCann, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one process compiles, this one waits and takes over what was built; then the other is killed, and this ends."""
    cann.does("wait")
    environment = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS, str(cann.home)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        wait_until(lambda: len(cann.calls()) == 1, seconds=900)

        def locked_at_last(path: Path, limit: float) -> AbstractContextManager[None]:
            (cann.home / "go").touch()  # the other process goes on once this one asks for the packages
            return locked(path, limit)

        monkeypatch.setattr(packages, "locked", locked_at_last)
        run(3)
        assert other.stdout is not None
        assert next(other.stdout) == "True\n"
    finally:
        other.kill()
        other.communicate()
    assert len(cann.calls()) == 1
    assert len(cann.packages()) == 1
    end_of_process()
    Lease.current(root())  # the next process clears up after the one that was killed
    assert cann.packages() == []
    assert [folder.name.partition("-")[0] for folder in processes()] == [str(os.getpid())]
