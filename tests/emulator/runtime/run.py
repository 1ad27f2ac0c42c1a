"""Compiles the emulated runtime and its C++ tests as one program, without Python and torch, and runs it: `run.py sanitizers`.

`native` and `pages` use the system's compiler (`CXX`), the second as if memory had pages of 64 KiB; `sanitizers` looks for wrong
addresses, undefined behaviour and races; `aarch64` compiles for that machine and runs the program on an emulated processor.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME = HERE.parents[2] / "npu_emulator" / "runtime"

_HOST = os.environ.get("CXX") or "g++"
_CHECKED = "-g1 -O1 -fno-sanitize-recover=all"
WAYS = {
    "native": [(f"{_HOST} -O1", "")],
    "pages": [(f"{_HOST} -DPAGE=65536", "")],
    "sanitizers": [(f"{_HOST} {_CHECKED} -fsanitize={which}", "") for which in ("address,undefined", "thread")],
    "aarch64": [(f"aarch64-linux-gnu-g++ -static {optimised}", "qemu-aarch64") for optimised in ("-O1", "-O3")],
}


def main(way: str) -> str | None:
    """Compile and run in one way; return what is wrong, in one sentence."""
    for compiler, runner in WAYS[way]:
        missing = [command for command in (shlex.split(compiler)[0], runner) if command and not shutil.which(command)]
        if missing:
            install = "g++-aarch64-linux-gnu qemu-user" if way == "aarch64" else "g++"
            return (
                f"{missing[0]} is not installed, so nothing was tested (Debian and Ubuntu: `apt-get install {install}`)"
            )
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "runtime_test"
            flags = [
                "-std=c++17",
                "-Wall",
                "-Wextra",
                "-Werror",
                f"-I{RUNTIME}",
                "-pthread",
                "-o",
                str(program),
                str(HERE / "runtime_test.cpp"),
            ]
            print(f"== {compiler}", flush=True)
            if subprocess.run([*shlex.split(compiler), *flags], check=False).returncode != 0:
                return f"the runtime does not compile with {compiler}"
            if subprocess.run([*shlex.split(runner), str(program)], check=False).returncode != 0:
                return f"a test of the runtime fails, compiled with {compiler}"
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in WAYS:
        sys.exit(f"usage: run.py {'|'.join(WAYS)}")
    sys.exit(main(sys.argv[1]))
