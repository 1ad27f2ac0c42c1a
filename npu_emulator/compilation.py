"""Compiles the emulated CANN runtime: into a wheel during its build, or into a user's cache.

The libraries have the names that torch_npu links against. One contains the code; the others are empty and depend on it, so
that torch_npu finds a function in any of them.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from npu_emulator.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = [
    "LIBRARIES",
    "MARK",
    "OF_EXTENSIONS",
    "SOURCES",
    "build",
    "compiler",
    "digest_of_sources",
    "is_complete",
    "symbols",
    "wanted",
]

LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libhcomm.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libascend_dump.so",
    "libopapi.so",
    "libatb.so",
)
"""The names of CANN's libraries that torch_npu links; the first one contains all code."""
OF_EXTENSIONS = (
    "libregister.so",
    "libplatform.so",
    "libascendalog.so",
    "libruntime.so",
    "liberror_manager.so",
    "libprofapi.so",
    "libge_common_base.so",
    "libunified_dlog.so",
    "libmmpa.so",
    "libc_sec.so",
)
"""Those that compiled extensions of other packages link besides, loaded only for them."""

MARK = "npu_emulator"
"""A file of this name marks a folder with a complete build of ours, and names its sources."""
SOURCES = Path(__file__).parent / "runtime"
_PREFIXES = ("acl", "rt", "Msprof", "Hccl", "_ZN3atb")
"""The prefixes of CANN's C functions, and of those of namespace atb in C++."""
_SYMBOL = struct.Struct("<IBBHQQ")
"""A symbol of ELF's 64-bit form: place of its name, info, other, section, value, size."""


def compiler() -> list[str]:
    """Return the command of the C++ compiler: the one in CXX, which must exist, or the first that is installed."""
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
        "no C++ compiler found: the emulated device is compiled once, on first use, where no wheel brought it. "
        "Install one (Debian and Ubuntu: `apt-get install g++`) or name it in the variable CXX"
    )


def digest_of_sources() -> str:
    """Name the sources by their contents."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def is_complete(folder: Path) -> bool:
    """Tell whether a folder contains a complete build of the present sources."""
    mark = folder / MARK
    return mark.exists() and mark.read_text() == digest_of_sources()


def build(folder: Path, *, extra: Collection[str] = (), standalone: bool = False) -> None:
    """Compile the runtime into an empty folder. The same sources and compiler give the same bytes.

    Args:
        folder: gets the libraries, and the mark at the end.
        extra: functions that must exist. Those that the runtime lacks become stubs that fail with their own name.
        standalone: link the C++ library statically, for machines with an older one.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    compile_cpp = compiler()
    runtime, objects = folder / LIBRARIES[0], [folder / "runtime.o"]
    shared = ["-shared", "-fPIC", "-Wl,--build-id=none"]
    link = [*shared, "-s", "-pthread", f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script={SOURCES / 'exports.map'}"]
    if standalone:
        link += ["-static-libstdc++", "-static-libgcc"]
    flags = ["-c", "-fPIC", "-O1", "-std=c++17", "-fvisibility=hidden"]
    _run([*compile_cpp, *flags, str(SOURCES / "runtime.cpp"), "-o", str(objects[0])])
    _run([*compile_cpp, *link, *map(str, objects), "-o", str(runtime)])
    missing = set(extra) - symbols(runtime, defined=True)
    if missing:
        stubs = folder / "stubs.cpp"
        stubs.write_text(_stubs(missing))
        objects.append(stubs)
        _run([*compile_cpp, *link, *map(str, objects), "-o", str(runtime)])
    empty = folder / "empty.cpp"
    empty.write_text("")
    for library in (*LIBRARIES[1:], *OF_EXTENSIONS):
        target = ["-o", str(folder / library), f"-Wl,-soname,{library}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        _run([*compile_cpp, *shared, "-s", str(empty), *target, str(runtime)])
    for leftover in (*objects, empty):
        leftover.unlink()
    (folder / MARK).write_text(digest_of_sources())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command line
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        first = errors[0] if errors else f"exit status {done.returncode}"
        remedy = "correct or unset the variable CXX" if os.environ.get("CXX") else "name another in the variable CXX"
        raise BuildError(
            f"compiling the emulated device failed: {first}\nIf {command[0]} is not a C++ compiler that works, {remedy}. "
            f"The command was: {' '.join(command)}"
        )


def wanted(consumers: Iterable[Path]) -> set[str]:
    """Return the CANN functions that these shared objects need to load."""
    names = set().union(*(symbols(path, defined=False) for path in consumers))
    return {name for name in names if name.startswith(_PREFIXES)}


def symbols(path: Path, *, defined: bool) -> set[str]:
    """Return the dynamic symbols that a shared object provides (`defined`) or needs from elsewhere."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        elf = ELFFile(file)
        table, names = (elf.get_section_by_name(name).data() for name in (".dynsym", ".dynstr"))
    # Each start reads tens of thousands of symbols, for which pyelftools' own objects would take half a second.
    starts = [
        place
        for place, info, _, section, _, _ in _SYMBOL.iter_unpack(table)
        if info >> 4 == 1 and (section != 0) == defined
    ]
    return {names[start : names.index(b"\0", start)].decode() for start in starts}


def _stubs(missing: Iterable[str]) -> str:
    """Write functions that fail with their own name."""
    lines = ['extern "C" int emu_missing(const char* name);']
    lines.extend(f'extern "C" int {name}(...) {{ return emu_missing("{name}"); }}' for name in sorted(missing))
    return "\n".join(lines) + "\n"
