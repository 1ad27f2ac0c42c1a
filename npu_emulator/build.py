"""Compiles the emulated CANN runtime on first use, into a per-user cache.

The libraries carry the names that torch_npu links against. One holds the code; the others are empty and depend on it, so
that a function is found whichever library torch_npu asks for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from npu_emulator.errors import BuildError
from npugraph_ex_ownership import distrust

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LIBRARIES", "compiler", "libraries", "torch_npu_folder"]

LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libascend_dump.so",
    "libopapi.so",
    "libatb.so",
)
"""The names under which CANN's code is looked for, the one that holds it all first."""

_MARK = "npu_emulator"
"""An empty file of this name says that a folder holds a complete build, and that it is ours and not CANN's."""
_SOURCES = Path(__file__).parent / "runtime"
_PREFIXES = ("acl", "rt", "Msprof", "Hccl", "_ZN3atb")
"""How CANN's C functions begin, and those of namespace atb in C++."""


def torch_npu_folder() -> Path:
    """Return where torch_npu is installed, without importing it."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise BuildError("torch_npu is not installed; `pip install torch_npu` (its version must match torch's)")
    return Path(spec.origin).parent


def libraries() -> list[Path]:
    """Return the paths of the built libraries in loading order, building them first if need be (a few seconds, once)."""
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        raise BuildError(
            f"the emulator runs where torch_npu has wheels: Linux on x86_64 or aarch64, not {platform.platform()}"
        )
    torch_npu = torch_npu_folder()
    folder = _cache_folder() / _key(torch_npu)
    _refuse_foreign([folder.parent])  # before a compiler writes into it
    if not (folder / _MARK).exists():
        # The lock file stays: removing it would let a third process lock a file that nobody else sees.
        with _lock_file(folder).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / _MARK).exists():
                _build(folder, torch_npu)
    built = [folder / name for name in LIBRARIES]
    _refuse_foreign([folder, *built])
    return built


def _refuse_foreign(paths: Iterable[Path]) -> None:
    """Raise BuildError if anyone but this user can have written one of the paths: their code would run in this process."""
    for path in paths:
        if not path.exists():
            continue
        reason = distrust(path, path.stat())
        if reason is not None:
            raise BuildError(
                f"the emulated device is not loaded: {reason}, or name another folder in NPU_EMULATOR_CACHE"
            )


def _lock_file(folder: Path) -> Path:
    """Return a file beside `folder` that can be written, or say that the cache cannot."""
    lock = folder.parent / f"{folder.name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock.touch()
    except OSError as error:
        raise BuildError(
            f"the emulated device is compiled once into {folder.parent}, which cannot be written ({error.strerror}); "
            "name another folder in NPU_EMULATOR_CACHE"
        ) from error
    return lock


def _cache_folder() -> Path:
    chosen = os.environ.get("NPU_EMULATOR_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "npu_emulator"


def _key(torch_npu: Path) -> str:
    """Name a build by what it is made of: our sources, the wheel's headers and libraries, the compiler."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    for wanted in _consumers(torch_npu):
        status = wanted.stat()
        digest.update(f"{wanted.name} {status.st_size} {status.st_mtime_ns}".encode())
    digest.update(f"{platform.machine()} {os.environ.get('CXX', '')}".encode())
    return digest.hexdigest()[:16]


def _consumers(torch_npu: Path) -> list[Path]:
    """List the shared objects of the wheel whose undefined symbols the runtime has to provide."""
    found = [torch_npu / "lib" / "libtorch_npu.so", torch_npu / "lib" / "libtensorpipe.so", *torch_npu.glob("_C*.so")]
    missing = [path for path in found if not path.exists()]
    if missing:
        raise BuildError(f"{missing[0]} does not exist; this torch_npu is not laid out as its wheels are: reinstall it")
    atb = torch_npu / "lib" / "libop_plugin_atb.so"
    return [*found, atb] if atb.exists() else found


def compiler() -> list[str]:
    """Return the command of the C++ compiler: what CXX says, which must exist, or the first that is installed."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildError(
                f"CXX names the compiler {chosen[0]!r}, which does not exist; correct or unset the variable CXX"
            )
        return chosen
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError(
        "no C++ compiler found: the emulated device is compiled once, on first use. "
        "Install one (Debian and Ubuntu: `apt-get install g++`) or name it in the variable CXX"
    )


def _build(folder: Path, torch_npu: Path) -> None:
    """Build beside the final folder and rename, so that an interrupted build leaves nothing half done."""
    compile_cpp = compiler()
    sys.stderr.write("npu_emulator: compiling the emulated device (once, a few seconds) ...\n")
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        include = torch_npu / "include" / "third_party" / "acl" / "inc"
        if not include.is_dir():
            raise BuildError(
                f"{include} does not exist: the emulator compiles against the headers of torch_npu's wheel; reinstall it"
            )
        runtime = work / LIBRARIES[0]
        flags = ["-shared", "-fPIC", "-O1", "-std=c++17", "-fvisibility=hidden", f"-I{include}", f"-I{include / 'acl'}"]
        # First without the stubs, to learn from the result what is still missing.
        objects = work / "runtime.o"
        _run([*compile_cpp, "-c", *flags[1:], str(_SOURCES / "runtime.cpp"), "-o", str(objects)])
        _run([*compile_cpp, *flags, str(objects), "-o", str(runtime), "-pthread"])
        stubs = work / "stubs.cpp"
        stubs.write_text(_stubs(_wanted(_consumers(torch_npu)) - _symbols(runtime, defined=True)))
        _run(
            [
                *compile_cpp,
                *flags,
                str(objects),
                str(stubs),
                "-o",
                str(runtime),
                "-pthread",
                f"-Wl,-soname,{runtime.name}",
            ]
        )
        empty = work / "empty.cpp"
        empty.write_text("")
        for library in LIBRARIES[1:]:
            target = ["-o", str(work / library), f"-Wl,-soname,{library}", "-Wl,--no-as-needed", str(runtime)]
            _run([*compile_cpp, "-shared", "-fPIC", str(empty), *target])
        for leftover in (objects, stubs, empty):
            leftover.unlink()
        (work / _MARK).write_text("")
        for made in work.iterdir():
            made.chmod(0o700)  # whatever the umask; `libraries` loads nothing that others can write
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work, folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command line
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        first = errors[0] if errors else f"exit status {done.returncode}"
        raise BuildError(f"compiling the emulated device failed: {first}\nThe command was: {' '.join(command)}")


def _wanted(consumers: Iterable[Path]) -> set[str]:
    """Return the CANN functions without which the wheel's libraries do not load."""
    names = set().union(*(_symbols(path, defined=False) for path in consumers))
    return {name for name in names if name.startswith(_PREFIXES)}


def _symbols(path: Path, *, defined: bool) -> set[str]:
    """Return the dynamic symbols that a shared object provides (`defined`) or wants from elsewhere."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        return {
            symbol.name
            for symbol in table.iter_symbols()
            if (symbol["st_shndx"] != "SHN_UNDEF") == defined and symbol["st_info"]["bind"] == "STB_GLOBAL"
        }


def _stubs(missing: set[str]) -> str:
    """Write functions that fail with their own name, for what the wheel links against and the runtime lacks."""
    lines = ['extern "C" int emu_missing(const char* name);']
    lines.extend(
        f'extern "C" __attribute__((visibility("default"))) int {name}(...) {{ return emu_missing("{name}"); }}'
        for name in sorted(missing)
    )
    return "\n".join(lines) + "\n"
