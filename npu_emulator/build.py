"""Finds the compiled CANN runtime: the libraries in the installed wheel, or those compiled here on first use.

A wheel's libraries are as trustworthy as the package. A build in the per-user cache is loaded only if no other user can have
written it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from npu_emulator.compilation import (
    LIBRARIES,
    MARK,
    OF_EXTENSIONS,
    build,
    compiler,
    digest_of_sources,
    is_complete,
    symbols,
    wanted,
)
from npu_emulator.errors import BuildError
from npugraph_ex_ownership import distrust

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["libraries", "shipped", "torch_npu_folder"]

_SHIPPED = Path(__file__).parent / "compiled"
"""The folder of the libraries in a wheel. A checkout, and so an editable installation, has no such folder."""


def torch_npu_folder() -> Path:
    """Return the folder of the installed torch_npu, without importing it."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise BuildError("torch_npu is not installed; `pip install torch_npu` (its version must match torch's)")
    return Path(spec.origin).parent


def libraries() -> list[Path]:
    """Return the paths of the libraries in loading order; compile them first if necessary (a few seconds, once)."""
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        raise BuildError(
            f"the emulator runs where torch_npu has wheels: Linux on x86_64 or aarch64, not {platform.platform()}"
        )
    functions = wanted(_consumers(torch_npu_folder()))
    folder = _SHIPPED if shipped(functions) else _compiled(functions)
    return [folder / name for name in LIBRARIES]


def shipped(functions: Iterable[str] = ()) -> bool:
    """Tell whether the package contains libraries with these functions, built from the present sources."""
    return is_complete(_SHIPPED) and symbols(_SHIPPED / LIBRARIES[0], defined=True).issuperset(functions)


def _compiled(functions: set[str]) -> Path:
    """Return the folder of the user's build; compile it first if necessary."""
    folder = _cache_folder() / _key(functions)
    _refuse_foreign([folder.parent])  # before a compiler writes into it
    if not (folder / MARK).exists():
        # The lock file stays: without it a third process would lock a new file that no other process sees.
        with _lock_file(folder).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / MARK).exists():
                _compile(folder, functions)
    _refuse_foreign([folder, *(folder / name for name in (*LIBRARIES, *OF_EXTENSIONS))])
    return folder


def _compile(folder: Path, functions: set[str]) -> None:
    """Compile beside the final folder and rename, so that an interrupted build leaves no incomplete folder."""
    compiler()  # before the message on stderr
    sys.stderr.write("npu_emulator: compiling the emulated device (once, a few seconds) ...\n")
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name) / folder.name
        work.mkdir()
        build(work, extra=functions)
        for made in (work, *work.iterdir()):
            made.chmod(0o700)  # for any umask; `libraries` loads nothing that others can write
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)


def _refuse_foreign(paths: Iterable[Path]) -> None:
    """Raise BuildError if another user can have written one of the paths, because its code would run in this process."""
    for path in paths:
        if not path.exists():
            continue
        reason = distrust(path, path.stat())
        if reason is not None:
            raise BuildError(
                f"the emulated device is not loaded: {reason}, or name another folder in NPU_EMULATOR_CACHE"
            )


def _lock_file(folder: Path) -> Path:
    """Return a writable file beside `folder`, or raise an error that names the cache."""
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


def _key(functions: Iterable[str]) -> str:
    """Name a build by its inputs: our sources, the functions that torch_npu needs, the compiler."""
    made_of = [digest_of_sources(), *sorted(functions), platform.machine(), os.environ.get("CXX", "")]
    return hashlib.sha256(" ".join(made_of).encode()).hexdigest()[:16]


def _consumers(torch_npu: Path) -> list[Path]:
    """List the shared objects of the wheel whose undefined symbols the runtime has to provide."""
    found = [torch_npu / "lib" / "libtorch_npu.so", torch_npu / "lib" / "libtensorpipe.so", *torch_npu.glob("_C*.so")]
    missing = [path for path in found if not path.exists()]
    if missing:
        raise BuildError(f"{missing[0]} does not exist; this torch_npu is not laid out as its wheels are: reinstall it")
    atb = torch_npu / "lib" / "libop_plugin_atb.so"
    return [*found, atb] if atb.exists() else found
