"""What all unit tests share: ways to ask a fresh interpreter; imports and the device are settled once a process.

The tests' own process has a device too: the emulated one, or the real one where there is one.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from interpreter import PYTHON, QUICK
from turns import Turn

import npu_emulator
from npugraph_ex.versions.frame_room import roomy

if TYPE_CHECKING:
    from npugraph_ex_conformance.stand_in_cann import StandInCann

# A worker, or a program that a test starts, is a core; threads that wait for others take a tenth of the processors' time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# AOT warns of a custom operator that breaks its schema, and raises where the variable CI is set: everywhere here.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"

_STARTS_A_PROGRAM = {"ask", "command", "fresh_environment"}

# torch_npu loads only beside CANN's libraries. `npu_emulator.activate()` would import torch, and with it settle the
# very order that a test is about; these lines bring the libraries alone.
_REFUSAL = pytest.StashKey[str]()
_LIBRARIES_ONLY = """
import ctypes, os
from npu_emulator.build import libraries
os.environ["TASK_QUEUE_ENABLE"] = "0"
for path in libraries():
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
"""


def pytest_configure(config: pytest.Config) -> None:
    """Start the emulated device before any test imports torch. No example of Hypothesis has a time limit: cores may be busy."""
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")
    if "torch" in sys.modules and not npu_emulator.is_active():
        raise pytest.UsageError("torch is imported before the emulated device could start; which plugin does that?")
    # Pytest's log capture would attach to torch's trace for tools, which then renders each graph: a tenth of a compilation.
    logging.getLogger("torch.__trace").addHandler = lambda _: None
    try:
        npu_emulator.activate(quiet=True, devices=2)
    except npu_emulator.ActivationError as refusal:
        # A real device or CANN is here; the emulator never hides it.
        config.stash[_REFUSAL] = str(refusal)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run of every change leave most of the slow tests to the runs after it."""
    parser.addoption(
        "--slow",
        metavar="TURN/TURNS",
        default="0/1",
        help="of the tests marked slow run one part of several: 5/4 is the second of four (default: %(default)s, all of them)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the root's tests, whose programs and pages take longest: the last of them would run while nothing else does.

    Whatever starts a program is slow, for that imports torch once more.
    """
    for item in items:
        if not _STARTS_A_PROGRAM.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    turn = Turn.from_words(config.getoption("--slow"))
    left = {item for item in items if item.get_closest_marker("slow") and not turn.has(item.nodeid)}
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
    root = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent != root)
    for item in items:
        if isinstance(item, pytest.Function):
            item.obj = roomy(item.obj)  # what a test compiles, it traces too


def pytest_collection_finish() -> None:
    """Let no collection go through what is imported again: each capture begins with one, and many tests make some."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # compilations make many objects that stay


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor through what the tests of a file leave in caches. Nothing that decides what is compiled may be left by them.

    Memory of the device that nobody uses goes back: it is memory of this machine, and a worker would come to keep several GB.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
        if (
            (torch := sys.modules.get("torch")) is not None
            and "torch_npu" in sys.modules
            and torch.npu.is_initialized()
        ):
            torch.npu.empty_cache()
        if "npugraph_ex.fusion" in sys.modules:
            left = _settings_left()
            assert not left, f"a test of {item.path.name} leaves for the tests after it: {left}"


def _settings_left() -> dict[str, object]:
    """What of the process decides how the next test compiles and is not as it was at the start."""
    import torch

    from npugraph_ex.aclgraph import scopes
    from npugraph_ex.fusion.registry import USER_RULES

    found = {
        "replacements": [prepared.rule.name for prepared in USER_RULES.snapshot()],
        "open scopes": scopes.here.opened,
        "level of determinism": scopes.deterministic_level(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "dtype by default": torch.get_default_dtype() != torch.float32,
        "gradients off": not torch.is_grad_enabled(),
    }
    return {name: value for name, value in found.items() if value}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let a test's streams be others than the one that captures, whatever ran before: torch hands out 32 in turn."""
    if "torch_npu" not in sys.modules:
        return
    import torch

    if (capturing := torch.npu.graph.default_capture_stream) is not None:
        while torch.npu.Stream(capturing.device) != capturing:
            pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let Dynamo not time its guards; skip a test whose program the installed torch cannot trace: the library refuses it."""
    try:
        with _unmeasured_guards() if "torch._dynamo" in sys.modules else nullcontext():
            return (yield)
    except Exception as error:
        from npugraph_ex.versions.stream_methods import DIFFERENCE, REFUSED

        if DIFFERENCE.older and REFUSED in "".join(traceback.format_exception(error)):
            pytest.skip(DIFFERENCE.what)
        raise


def _unmeasured_guards() -> AbstractContextManager[None]:
    from npugraph_ex._torch_private import unmeasured_guards

    return unmeasured_guards()


def pytest_report_header(config: pytest.Config) -> str:
    """Say on which device the tests run."""
    return f"device: {config.stash.get(_REFUSAL, 'emulated')}"


def _clean_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without what would decide the question, plus `variables`."""
    decisive = {"NPUGRAPH_EX", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TASK_QUEUE_ENABLE"}
    return {**{name: value for name, value in os.environ.items() if name not in decisive}, **variables}


@pytest.fixture(scope="session")
def ask() -> Callable[..., Any]:
    """Run code in a fresh interpreter and return what it leaves in `answer`."""

    def run(code: str, **variables: str) -> Any:
        libraries = _LIBRARIES_ONLY if npu_emulator.is_active() else ""
        program = f"{QUICK}\n{libraries}\n{code}\nimport json\nprint('\\n' + json.dumps(answer))"
        done = subprocess.run(
            [*PYTHON, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            env=_clean_environment(**variables),
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `npugraph-ex` as a person would and return the finished process. No command colours what is piped."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        entry = f"{QUICK}; import sys; from npugraph_ex_autoload import command_line; sys.exit(command_line())"
        done = subprocess.run(
            [*PYTHON, "-c", entry, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=_clean_environment(**variables),
            timeout=900,
        )
        assert "\x1b" not in done.stdout + done.stderr
        return done

    return run


def _fresh_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a user who has no emulated parent process, plus `variables`."""
    ours = ("NPU_EMULATOR", "NPUGRAPH_EX")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours) or name.endswith("_CACHE")}
    # Under the last two, pytest's summary repeats whole messages.
    for name in ("TASK_QUEUE_ENABLE", "CI", "BUILD_NUMBER"):
        kept.pop(name, None)
    folders = kept.pop("LD_LIBRARY_PATH", "").split(os.pathsep)
    others = [folder for folder in folders if folder and not (Path(folder) / "npu_emulator").exists()]
    return {**kept, **({"LD_LIBRARY_PATH": os.pathsep.join(others)} if others else {}), **variables}


@pytest.fixture(scope="session")
def fresh_environment() -> Callable[..., dict[str, str]]:
    """Make the environment of a user who has no emulated parent process."""
    return _fresh_environment


@pytest.fixture(scope="module")
def as_torchair() -> Iterator[None]:
    """`torchair` means this library, until the end of the module."""
    import npugraph_ex.frontend.entry.backend  # noqa: F401 - defines the operators
    from npugraph_ex.compat import use_as_torchair

    def taken() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchair"}

    before, finders = taken(), sys.meta_path.copy()
    for name in before:
        del sys.modules[name]
    use_as_torchair()
    yield
    for name in taken():
        del sys.modules[name]
    sys.modules.update(before)
    sys.meta_path[:] = finders


@pytest.fixture
def cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCann]:
    """A stand-in for CANN's operator compiler, an empty cache, and no static kernels left in this process afterwards."""
    if not npu_emulator.is_active():
        pytest.skip("the stand-in is for the emulated device")
    from npugraph_ex.aclgraph.static_kernels import prepare
    from npugraph_ex_conformance.stand_in_cann import StandInCann, end_of_process

    made = StandInCann.at(tmp_path / "cann" / "8.0")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(made.home))
    monkeypatch.setenv("NPUGRAPH_EX_CACHE", str(tmp_path / "cache"))
    prepare._warn.cache_clear()  # warnings are said once a process
    yield made
    end_of_process()
