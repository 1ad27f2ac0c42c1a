"""The first use where no wheel brought the runtime: compiling it, alone and in company, and what is said when that cannot be."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_emulator import build, compilation
from npu_emulator.compilation import LIBRARIES, MARK
from npu_emulator.errors import BuildError

_START = """
import pathlib, npu_emulator
npu_emulator.build._SHIPPED = pathlib.Path("/nonexistent")
npu_emulator.activate(quiet=True)
import torch
print(torch.ones(2).npu().sum().item())
"""


@pytest.fixture(scope="module")
def built() -> Path:
    """The folder of this machine's libraries, shipped or compiled."""
    return build.libraries()[0].parent


@pytest.fixture(autouse=True)
def _nothing_shipped(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a checkout, also where these tests run on an installed wheel."""
    monkeypatch.setattr(build, "_SHIPPED", tmp_path / "nothing")


@pytest.fixture
def copying(built: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that takes what it should make from this machine's build: compiling takes seconds, and is done already."""
    path = tmp_path_factory.mktemp("compiler") / "copying-cxx"
    path.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f'made={built}/$(basename "$2")\nif [ -e "$made" ]; then sleep 0.2; cat "$made" > "$2"; else : > "$2"; fi\n'
    )
    path.chmod(0o755)
    return str(path)


def test_two_first_uses_at_once_share_one_build(
    tmp_path: Path, copying: str, fresh_environment: Callable[..., dict[str, str]]
) -> None:
    """Two processes that start with an empty cache both work, and only one compiles."""
    environment = fresh_environment(NPU_EMULATOR_CACHE=str(tmp_path), CXX=copying)
    command = [sys.executable, "-c", _START]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [process.communicate(timeout=900) for process in processes]
    assert [output.splitlines()[-1] for output, _ in ended] == ["2.0", "2.0"]  # torch_npu 2.10 prints a warning before
    assert sum("compiling" in errors for _, errors in ended) == 1


@pytest.mark.slow
def test_an_interrupted_build_is_not_taken_for_complete(
    tmp_path: Path, copying: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the mark that is made last, the libraries are built again."""
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", copying)
    first = build.libraries()
    (first[0].parent / MARK).unlink()
    first[0].write_bytes(b"half a library")
    assert build.libraries() == first
    assert first[0].read_bytes().startswith(b"\x7fELF")


def test_no_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler the message says what to install."""
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found.*apt-get install g\+\+"):
        build.libraries()


def test_a_compiler_that_does_not_exist_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CXX is obeyed or refused by name; a launcher in front of the compiler is part of the command."""
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent/c++ -O1")
    with pytest.raises(BuildError, match=r"CXX .* '/nonexistent/c\+\+'"):
        build.libraries()
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    monkeypatch.setenv("CXX", "env g++")
    assert compilation.compiler() == ["env", "g++"]


def test_a_cache_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which nothing can be made is named, with the variable that names another."""
    monkeypatch.setenv("NPU_EMULATOR_CACHE", "/proc/nowhere")
    with pytest.raises(BuildError, match=r"/proc/nowhere, which cannot be written.*NPU_EMULATOR_CACHE"):
        build.libraries()


@pytest.mark.parametrize("spoil", ["cache", "build", "library"])
@pytest.mark.parametrize("mode", [0o770, 0o702], ids=["group", "all"])
def test_a_build_that_others_can_write_is_refused(
    spoil: str, mode: int, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code would run here: the cache folder, the build's folder and each library must be this user's alone."""
    cache = tmp_path / "cache"
    copied = _copied_build(built, cache, monkeypatch)
    assert build.libraries() == copied
    path = {"cache": cache, "build": copied[0].parent, "library": copied[-1]}[spoil]
    path.chmod(mode)
    with pytest.raises(BuildError, match=rf"{path} can be written by others.*NPU_EMULATOR_CACHE"):
        build.libraries()


@pytest.mark.parametrize("owned", ["cache", "build", "library"])
def test_a_build_of_another_user_is_refused(
    owned: str, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns a folder or a library decides what it holds."""
    cache = tmp_path / "cache"
    copied = _copied_build(built, cache, monkeypatch)
    path = {"cache": cache, "build": copied[0].parent, "library": copied[-1]}[owned]
    true_status = Path.stat

    def status_of_another(self: Path, **options: bool) -> os.stat_result:
        status = true_status(self, **options)
        if self != path:
            return status
        return os.stat_result([*status[:4], status.st_uid + 1, *status[5:10]])

    monkeypatch.setattr(Path, "stat", status_of_another)
    with pytest.raises(BuildError, match=rf"{path} belongs to user {os.geteuid() + 1}.*NPU_EMULATOR_CACHE"):
        build.libraries()


@pytest.mark.slow
def test_a_build_is_for_its_owner_whatever_the_umask(
    tmp_path: Path, copying: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where new files are open to a group, a build and its cache folder are not, and the next start loads it."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(cache))
    monkeypatch.setenv("CXX", copying)
    before = os.umask(0)
    try:
        made = build.libraries()
    finally:
        os.umask(before)
    assert build.libraries() == made
    assert {path.stat().st_mode & 0o777 for path in (cache, made[0].parent, *made)} == {0o700}


def _copied_build(built: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """This machine's build, copied into a cache of the test's own."""
    folder = cache / build._key(_wanted())
    cache.mkdir(mode=0o700)
    shutil.copytree(built, folder)
    folder.chmod(0o700)
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(cache))
    return [folder / name for name in LIBRARIES]


def _wanted() -> set[str]:
    """What the installed torch_npu links against."""
    return compilation.wanted(build._consumers(build.torch_npu_folder()))


def test_a_broken_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails is reported with its first error and the command line."""
    fake = tmp_path / "fake-cxx"
    fake.write_text("#!/bin/sh\necho 'error: no headers today' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(BuildError, match=r"no headers today\n.*correct or unset the variable CXX\. .*fake-cxx -c"):
        build.libraries()


def test_another_platform_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch_npu has no wheels the emulator says which platforms it runs on."""
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(BuildError, match="Linux on x86_64 or aarch64"):
        build.libraries()


def test_a_function_without_a_body_fails_with_its_name(built: Path) -> None:
    """All that torch_npu links against is there; what the runtime does not do fails when it is called, naming the function."""
    library = ctypes.CDLL(str(built / LIBRARIES[0]))
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    absent = re.findall(r"EMU_ABSENT\((\w+)\)\n", (compilation.SOURCES / "absent.cpp").read_text())
    assert _wanted() <= compilation.symbols(built / LIBRARIES[0], defined=True)
    assert len(absent) > 40
    for name in absent:
        assert getattr(library, name)() == 207000
        assert name in library.aclGetRecentErrMsg().decode()


@pytest.mark.slow
def test_a_torch_npu_that_wants_more_has_the_runtime_compiled(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A wheel of tomorrow links against a function that nobody knows: what is shipped does not serve, and a build gets a stub."""
    monkeypatch.setattr(build, "_SHIPPED", built)
    assert build.libraries()[0].parent == built
    monkeypatch.setattr(build, "wanted", lambda _: {*_wanted(), "aclOfTomorrow"})
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(tmp_path))
    assert ctypes.CDLL(str(build.libraries()[0])).aclOfTomorrow() == 207000
    assert "a library called aclOfTomorrow" in capfd.readouterr().err


@pytest.mark.slow
def test_changed_sources_are_compiled(
    built: Path, copying: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who changes a source of the installed package runs the change, not what was shipped with it; each change is a build."""
    sources = tmp_path / "runtime"
    shutil.copytree(compilation.SOURCES, sources)
    monkeypatch.setattr(compilation, "SOURCES", sources)
    monkeypatch.setattr(build, "_SHIPPED", built)
    monkeypatch.setenv("NPU_EMULATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", copying)
    folders = {build.libraries()[0].parent}
    assert folders == {built}
    for change in ("first", "second"):
        (sources / "runtime.cpp").write_text(f"// {change}\n")
        folders.add(build.libraries()[0].parent)
    assert len(folders) == 3


def test_only_a_marked_folder_is_ours(built: Path, tmp_path: Path) -> None:
    """A folder with CANN's libraries is not taken for the emulator."""
    from npu_emulator.children import is_ours

    (tmp_path / "libascendcl.so").write_text("")
    assert not is_ours(tmp_path)
    assert is_ours(built)


def test_cann_on_the_machine_keeps_the_emulator_off(
    tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]
) -> None:
    """With CANN's library on the search path the emulator refuses, in one sentence that says how to insist."""
    (tmp_path / "libascendcl.so").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", _START],
        env=fresh_environment(LD_LIBRARY_PATH=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode != 0
    assert "CANN is installed" in done.stderr
    assert "NPU_EMULATOR_FORCE=1" in done.stderr
