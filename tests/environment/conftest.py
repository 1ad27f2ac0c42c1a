"""Virtual environments of other people: the built wheel, and of everything else only what a test names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Guest:
    """A virtual environment, with a folder in which its programs run."""

    folder: Path
    work: Path

    @property
    def site(self) -> Path:
        """The environment's site-packages."""
        return next((self.folder / "lib").glob("python3*")) / "site-packages"

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run its interpreter in the work folder, without anything of this process's environment that could matter."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        environment = {**kept, "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", **variables}
        command = [str(self.folder / "bin" / "python"), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.work, env=environment, timeout=600
        )

    def write(self, files: dict[str, str]) -> None:
        """Write files of the work folder, each text by its path."""
        for name, text in files.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


Build = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def build_wheel() -> Build:
    """Build this checkout into a folder as it is published: an editable installation does not list its files."""

    def build(folder: Path, kind: str = "wheel", **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
        environment = {**os.environ, **variables}
        return subprocess.run(
            command, cwd=_ROOT, check=False, capture_output=True, text=True, timeout=300, env=environment
        )

    return build


@pytest.fixture(scope="session")
def wheel(build_wheel: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for any machine: compiling the emulated device takes longer than all else here, and one test needs it."""
    folder = tmp_path_factory.mktemp("wheel")
    build_wheel(folder, NPU_EMULATOR_COMPILED="0").check_returncode()
    (built,) = folder.glob("*-py3-none-any.whl")
    return built


@pytest.fixture(scope="session")
def make_guest(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Guest]:
    """Make an environment with the named packages, which are links to those of the running environment, and with ours, or not."""

    def make(*packages: str, unpacked: Path | None = wheel) -> Guest:
        guest = Guest(tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("work"))
        venv.create(guest.folder, with_pip=False, symlinks=True)
        if unpacked:  # much faster than pip
            zipfile.ZipFile(unpacked).extractall(guest.site)
        for top in sorted(set(_top_level(packages))):
            if not (guest.site / top.name).exists():
                (guest.site / top.name).symlink_to(top)
        return guest

    return make


@pytest.fixture(scope="session")
def bare(make_guest: Callable[..., Guest]) -> Guest:
    """Only this package, pytest and coverage."""
    return make_guest("pytest", "coverage")


@pytest.fixture(scope="session")
def with_torch(make_guest: Callable[..., Guest]) -> Guest:
    """Torch too, with NumPy, whose absence torch itself warns of, and no torch_npu."""
    return make_guest("pytest", "torch", "numpy", "tabulate", "jinja2", "markupsafe")


def _top_level(packages: Iterable[str]) -> Iterable[Path]:
    """What the packages and all that they need have put into site-packages: folders and modules of the first level."""
    waiting, seen = list(packages), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # needed on another platform only
        if name in seen:
            continue
        seen.add(name)
        waiting += [re.split(r"[^\w.-]", need)[0] for need in installed.requires or [] if "extra ==" not in need]
        for file in installed.files or []:
            if file.parts[0] not in {"..", "__pycache__"}:
                yield Path(str(installed.locate_file(file.parts[0])))
