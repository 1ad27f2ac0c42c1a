"""Builds what is published from a clean checkout, twice, and uses it as a stranger does: `tox -e wheel`.

- The source distribution and the wheel of each machine have the same bytes in both builds; twine, check-wheel-contents and
  auditwheel find nothing wrong. The wheels are compiled as for a release: by Zig, for the C library of old systems.
- The wheel, in a new environment on whose search path there is no compiler, runs the README's script and the conformance suite.
- The source distribution, in another one, compiles the emulated device and runs the script.

torch, torch_npu and the rest are installed from the index, or linked from the site-packages of another environment (`--borrow`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILERS = ("g++", "gcc", "c++", "cc", "clang++", "clang", "zig")
MACHINES = ("x86_64", "aarch64")
GLIBC = 28
"""The minor version of the GNU C library that a published wheel may ask for at most: that of openEuler 20.03 and RHEL 8."""
OURS = re.compile(r"npugraph|npu_emulator|__pycache__")
SCRIPT = re.compile(r"^```python\n(import torch, torch_npu, npugraph_ex\n.*?)^```$", re.MULTILINE | re.DOTALL)


def run(*command: str | Path, **variables: str) -> None:
    """Run a command in an empty folder; what it prints is shown, and its failure ends everything."""
    print("$", *command, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(list(map(str, command)), check=True, cwd=folder, env={**os.environ, **variables})


def build(folder: Path) -> list[Path]:
    """Build all distributions from a new clone of what is committed, with one compiler and without the time of day."""
    run("git", "clone", "--quiet", ROOT, folder / "checkout")
    builder = (sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "checkout")
    run(*builder, "--sdist")
    for machine in MACHINES:
        compiler = f"{sys.executable} -m ziglang c++ -target {machine}-linux-gnu.2.{GLIBC}"
        # A cache for each build: what the first one compiled would not be compiled twice.
        run(*builder, "--wheel", CXX=compiler, ZIG_GLOBAL_CACHE_DIR=str(folder), ZIG_LOCAL_CACHE_DIR=str(folder))
    return sorted((folder / "dist").iterdir())


def same_bytes(first: list[Path], second: list[Path]) -> None:
    """Refuse two builds that differ."""
    sums = [{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in built} for built in (first, second)]
    if sums[0] != sums[1] or not first:
        sys.exit(f"two builds of one commit differ: {sums}")
    print(*(f"{digest}  {name}" for name, digest in sums[0].items()), sep="\n")


def platform_is_honest(wheel: Path) -> None:
    """Compare the platform in the wheel's name with the one that auditwheel finds in its libraries."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    said = " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    found = re.search(r'consistent with the following platform tag: "(\w+)"', said)
    if found is None or not wheel.stem.endswith(f"-py3-none-{found[1]}"):
        sys.exit(f"{wheel.name} is not what auditwheel says: {said}")
    asked = re.search(r"manylinux_2_(\d+)_", wheel.name)
    if asked is None or int(asked[1]) > GLIBC:
        sys.exit(f"{wheel.name} asks for a newer GNU C library than 2.{GLIBC}")


def environment(folder: Path, distribution: Path, borrowed: Path | None, *pins: str) -> Path:
    """Make a virtual environment with one distribution; return the folder of its programs."""
    venv.create(folder, with_pip=True, symlinks=True)
    programs = folder / "bin"
    pip = (programs / "python", "-m", "pip", "install", "--quiet")
    if borrowed is None:
        run(*pip, f"{distribution}[conformance]", *pins)
        return programs
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    for entry in borrowed.iterdir():
        if not OURS.search(entry.name) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    run(*pip, "--no-deps", distribution)
    return programs


def without_compiler(programs: Path, cache: Path) -> dict[str, str]:
    """Return variables under which no program finds a compiler, and a compiled emulated device has nowhere to come from."""
    path = str(programs)
    found = [name for name in COMPILERS if shutil.which(name, path=path)]
    if found:
        sys.exit(f"{path} has compilers: {', '.join(found)}")
    return {
        "PATH": path,
        "CXX": "/nonexistent/no-compiler",
        "CC": "/nonexistent/no-compiler",
        "NPU_EMULATOR_CACHE": str(cache),
    }


def main() -> None:
    """Build, compare, install, use."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one test of the suite")
    parser.add_argument("--borrow", type=Path, metavar="SITE", help="site-packages with torch, torch_npu and the rest")
    parser.add_argument("pins", nargs="*", help="for pip: torch==2.13.0 torch_npu==2.13.0")
    options = parser.parse_args()
    borrowed = options.borrow and options.borrow.resolve()
    (code,) = SCRIPT.findall((ROOT / "README.md").read_text())
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "script.py").write_text(code)
        first, second = build(work / "one"), build(work / "two")
        same_bytes(first, second)
        run(sys.executable, "-m", "twine", "check", "--strict", *first)
        (source,) = (path for path in first if path.suffix != ".whl")
        wheels = {machine: path for path in first for machine in MACHINES if path.stem.endswith(machine)}
        for made in wheels.values():
            # W009: three packages and two hooks are one project.
            run(sys.executable, "-m", "check_wheel_contents", "--ignore", "W009", made)
            platform_is_honest(made)
        wheel = wheels[platform.machine()]

        programs = environment(work / "of_wheel", wheel, borrowed, *options.pins)
        hidden = without_compiler(programs, work / "cache")
        run(programs / "npugraph-ex", "run", "--emulate", work / "script.py", **hidden)
        chosen = ("-k", "custom_operator and test_compiled") if options.quick else ()
        run(
            programs / "npugraph-ex",
            "conformance",
            "--target=emulated",
            "--jobs=2",
            f"--report-dir={work}",
            *chosen,
            **hidden,
        )
        if (work / "cache").exists():
            sys.exit("the emulated device was compiled, though the wheel brings it")

        programs = environment(work / "of_source", source, borrowed, *options.pins)
        run(programs / "npugraph-ex", "run", "--emulate", work / "script.py")
    print("both distributions work; the wheel without a compiler")


if __name__ == "__main__":
    main()
