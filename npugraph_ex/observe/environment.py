"""What is installed, which device there is, what the name `npugraph_ex` means here, what is wrong and how to mend it.

Nothing here imports torch: on a machine without CANN that alone can fail. A second interpreter is asked instead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from npugraph_ex.observe.installing import install_command
from npugraph_ex.versions import pairs

_PACKAGES = ("npugraph-ex", "torch", "torch_npu", "packaging", "pyelftools", "rich", "tabulate", "jinja2")
_TOOLKITS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "~/Ascend/ascend-toolkit/latest")
_PROBE_SECONDS = 300
_CHOICES = ("", "library", "bundled")
_PLAIN, _EMULATED = "python script.py", "npugraph-ex run --emulate script.py"
_CPU_BUILD = (
    "install the CPU build of the same torch, from the CPU index that the torch project names on its page for installing: "
    "`pip install --index-url <that index> torch`"
)
# What the dynamic loader says when torch_npu is there and CANN is not.
_CANN_LIBRARIES = ("libascendcl.so", "libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so")


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, or only worth knowing (`fatal` False), with the way to mend it."""

    what: str
    remedy: str
    fatal: bool = True


@dataclass(frozen=True)
class Environment:
    """Everything `npugraph-ex env` tells.

    Attributes:
        python: Version and path of the interpreter.
        packages: Installed version by package, None where it is missing.
        tested: The release of torch_npu by the release of torch, for each pair that the tests run on.
        cann: Where CANN's toolkit was found, None if nowhere.
        npus: Device files of real NPUs.
        compiler: The C++ compiler that the emulated device would be built with.
        shipped: Whether the installed wheel brought the emulated device, so that no compiler is needed.
        device: What a program sees: "npu", "emulated" or "none".
        device_name: The chip's name, None without a device.
        choice: The environment variable NPUGRAPH_EX.
        import_name: The file that `import npugraph_ex` gives, None if unknown.
        backend_string: The callable behind `torch.compile(backend="npugraph_ex")`, None if unknown.
        problems: What is wrong.
        commands: The ways to run a program here, and whether each works; only those that were tried.
    """

    python: str
    packages: Mapping[str, str | None]
    tested: Mapping[str, str]
    cann: str | None
    npus: tuple[str, ...]
    compiler: str | None
    shipped: bool
    device: str
    device_name: str | None
    choice: str
    import_name: str | None
    backend_string: str | None
    problems: tuple[Problem, ...]
    commands: Mapping[str, bool]

    @property
    def works(self) -> bool:
        """Whether a program can compile with this library here, by at least one of the commands."""
        return any(self.commands.values())

    def as_json(self) -> str:
        """Render as one JSON object."""
        return json.dumps({**asdict(self), "works": self.works}, indent=2)


def inspect(
    *, emulate: bool = False, choice: str = "", on_probe: Callable[[int, str], None] = lambda *_: None
) -> Environment:
    """Look at this machine; takes some seconds, because torch is imported in another process.

    Args:
        emulate: Ask about the emulated device even where a real one is present.
        choice: What NPUGRAPH_EX was when the program started (the command line takes it out of the environment).
        on_probe: Is called before each of the one or two interpreters that are asked, with how many were, and which comes.
    """
    packages = {name: _version(name) for name in _PACKAGES}
    compiler, shipped = _compiler(), _shipped()
    # A value that means nothing is reported by itself; the rest is asked as if it were not set.
    asked = choice if choice in _CHOICES else ""
    broken = pairs.aborts(packages["torch"] or "", pairs.cuda_build()) if packages["torch_npu"] else ""
    on_probe(0, _EMULATED if emulate else _PLAIN)
    here = _unanswered(broken) if broken else _ask(emulate=emulate, choice=asked)
    emulated = emulate and here["error"] is None
    tried = {_EMULATED if emulate else _PLAIN: here}
    problems = [*_package_problems(packages), *_name_problems(choice)]
    if broken:
        problems.append(Problem(broken, _CPU_BUILD))
    elif here["device"] is None and not emulate:
        why = str(here["error"] or "torch_npu found no device")
        on_probe(1, _EMULATED)
        fallback = tried[_EMULATED] = _ask(emulate=True, choice=asked)
        problems.append(_no_device(why, emulator_error=fallback["error"], lacks_compiler=not (compiler or shipped)))
        if fallback["error"] is None:
            here, emulated = fallback, True
    elif here["error"] is not None:
        problems.append(_import_failed(str(here["error"])))
    problems += _wrong_meaning(here, asked)
    sound = not any(problem.fatal for problem in problems)
    return Environment(
        python=f"{sys.version.split()[0]} ({sys.executable})",
        packages=packages,
        tested=pairs.TESTED,
        cann=cann_home(),
        npus=tuple(str(path) for path in sorted(Path("/dev").glob("davinci[0-9]*"))),
        compiler=compiler,
        shipped=shipped,
        device="emulated" if emulated else "npu" if here["device"] else "none",
        device_name=here["device"],
        choice=choice,
        import_name=here["import_name"],
        backend_string=here["backend_string"],
        problems=tuple(problems),
        commands={way: sound and found["error"] is None and bool(found["device"]) for way, found in tried.items()},
    )


def hint(error: BaseException) -> str:
    """What to do about an error of a program that ran without `--emulate`; empty where the device is not the cause."""
    messages, cause = [], error
    while cause is not None:
        messages.append(str(cause))
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    lacking = next((library for library in _CANN_LIBRARIES if any(library in text for text in messages)), None)
    if lacking is None:
        return ""
    return (
        f"torch_npu needs CANN's {lacking}, which is not here. Add --emulate to run on an emulated NPU, or see "
        "`npugraph-ex env` for what is missing"
    )


def _ask(*, emulate: bool, choice: str) -> dict[str, str | None]:
    """Run the probe in a fresh interpreter and return its answer."""
    command = [sys.executable, str(Path(__file__).with_name("_probe.py")), *(["--emulate"] if emulate else [])]
    environment = {**os.environ, "NPUGRAPH_EX": choice}
    try:
        done = subprocess.run(  # noqa: S603 - our own file, no shell
            command, capture_output=True, text=True, check=False, env=environment, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return _unanswered(f"importing torch took more than {_PROBE_SECONDS} s")
    lines = done.stdout.strip().splitlines()
    try:
        answer: dict[str, str | None] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return _unanswered(f"importing torch ended the interpreter with status {done.returncode}: {last}")
    return answer


def _unanswered(why: str) -> dict[str, str | None]:
    """The probe's answer where there is none."""
    return {"device": None, "import_name": None, "backend_string": None, "error": why}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """The compiler's path, by the emulator's own rule."""
    from npu_emulator.compilation import compiler
    from npu_emulator.errors import BuildError

    try:
        return shutil.which(compiler()[0])
    except BuildError:
        return None


def _shipped() -> bool:
    """Whether the emulated device is installed, as the emulator sees it."""
    from npu_emulator.build import shipped

    return shipped()


def cann_home() -> str | None:
    """The folder in which CANN is installed; None where there is none."""
    candidates = (os.environ.get("ASCEND_HOME_PATH"), *_TOOLKITS)
    return next((str(path) for name in candidates if name and (path := Path(name).expanduser()).is_dir()), None)


def _package_problems(packages: Mapping[str, str | None]) -> list[Problem]:
    problems = [
        Problem(f"{name} is not installed", install_command() if name == "npugraph-ex" else f"pip install {name}")
        for name, version in packages.items()
        if not version
    ]
    torch, torch_npu = packages["torch"], packages["torch_npu"]
    untested = pairs.untested(torch, torch_npu) if torch and torch_npu else ""
    if untested:
        problems.append(
            Problem(untested, "install one of these pairs; `npugraph-ex env --canary` checks this one", fatal=False)
        )
    return problems


def _name_problems(choice: str) -> list[Problem]:
    if choice not in _CHOICES:
        return [Problem(f"NPUGRAPH_EX is {choice!r}", "set it to 'bundled' or 'library', or unset it")]
    if any((Path(folder) / "npugraph_ex_autoload.pth").is_file() for folder in sys.path):
        return []
    what = (
        "the start-up file npugraph_ex_autoload.pth is not in site-packages: a program that imports torch_npu before "
    )
    what += "torch and npugraph_ex gets torch_npu's own backend"
    return [Problem(what, f"{install_command()} --force-reinstall --no-deps", fatal=False)]


def _no_device(why: str, *, emulator_error: str | None, lacks_compiler: bool) -> Problem:
    """Say why there is no NPU, and what to do: programs can run emulated if the emulator works here."""
    lacks_cann = next((library for library in _CANN_LIBRARIES if library in why), None)
    if lacks_cann is None:
        what = f"no NPU: {why}"
        real = "check the driver with `npu-smi info`"
    else:
        what = f"`import torch` fails here: it loads torch_npu, which needs CANN's {lacks_cann}"
        found = cann_home()
        real = f"`source {found}/set_env.sh`" if found else "install CANN and source its set_env.sh"
        real += " (or TORCH_DEVICE_BACKEND_AUTOLOAD=0 for torch without an NPU)"
    if emulator_error is None:
        return Problem(
            what, f"run on the emulated device: `npugraph-ex run --emulate script.py`; or {real}", fatal=False
        )
    if lacks_compiler:
        return Problem(what, f"{real}; or install a C++ compiler (g++), which the emulated device is built with")
    return Problem(what, f"{real}; the emulated device does not work either: {emulator_error}")


def _import_failed(why: str) -> Problem:
    return Problem(f"the imports fail: {why}", "mend what the message names, then run `npugraph-ex env` again")


def _wrong_meaning(here: Mapping[str, str | None], choice: str) -> list[Problem]:
    """Compare what the name means with what was asked for."""
    if here["import_name"] is None:
        return []
    ours = Path(here["import_name"]).is_relative_to(Path(__file__).parents[1])
    backend_ours = str(here["backend_string"]).startswith("npugraph_ex_autoload.")
    if choice == "bundled":
        right, wanted = not ours and not backend_ours, "torch_npu's own backend"
    else:
        right, wanted = ours and backend_ours, "this library"
    if right:
        return []
    what = f"the name npugraph_ex should mean {wanted} and means {here['import_name']}, {here['backend_string']}"
    if here.get("aside"):
        what += f"; it could not be taken: {here['aside']}"
    return [Problem(what, "reinstall npugraph-ex in this environment; look for a second one on PYTHONPATH")]
