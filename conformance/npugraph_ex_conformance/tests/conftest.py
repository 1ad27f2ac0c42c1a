"""The suite's settings, its target, and what it prints. The target is started here, before anything imports torch."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from npugraph_ex.console.interrupts import end_children
from npugraph_ex.testing.targets import KINDS, TargetError, start_target
from npugraph_ex.versions.frame_room import roomy
from npugraph_ex_conformance.folders import SCRIPTS, FolderError, prepare
from npugraph_ex_conformance.known_failures import Known, KnownFailuresError, mark, read
from npugraph_ex_conformance.results import Books
from npugraph_ex_conformance.session import PROFILES, Run
from npugraph_ex_conformance.terminal import Reporter
from npugraph_ex_conformance.xdist import Notes, is_worker

RUN = pytest.StashKey[Run]()
KNOWN = pytest.StashKey[list[Known]]()
REFUSED = pytest.StashKey[str]()
_BEFORE_ALL = int(pytest.ExitCode.USAGE_ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The suite's own options; each also says its default."""
    group = parser.getgroup("conformance")
    default = os.environ.get("NPUGRAPH_EX_TARGET", "emulated")
    group.addoption(
        "--target", choices=KINDS, default=default, help="which device (default: NPUGRAPH_EX_TARGET, or emulated)"
    )
    group.addoption("--profile", choices=sorted(PROFILES), default="quick", help="how many examples (default: quick)")
    group.addoption("--seed", type=int, default=0, help="the same seed gives the same examples (default: 0)")
    group.addoption(
        "--mutant", metavar="NAME", help="switch a deliberate fault on: the run must then fail; 'list' lists them"
    )
    group.addoption(
        "--report-dir", type=Path, metavar="DIR",
        help="write report.html, junit.xml, cases.jsonl, tests.jsonl and failing scripts there; what an earlier run left "
        "there moves to its folder `earlier`",
    )  # fmt: skip
    group.addoption(
        "--resume", action="store_true", help="go on with the run in --report-dir: what passed there is not run again"
    )
    group.addoption(
        "--xfails-file", type=Path, metavar="FILE", help="known failures, each with the link of its report; see docs"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start the target, say what it is, and switch the mutant on."""
    folder = _folder(config)
    path: Path | None = config.getoption("xfails_file")
    try:
        config.stash[KNOWN] = read(path) if path is not None else []
    except KnownFailuresError as error:
        pytest.exit(str(error), returncode=_BEFORE_ALL)
    config.addinivalue_line("filterwarnings", "ignore:.*torch.jit:DeprecationWarning")
    # torch logs its tracing at DEBUG for tools of its own; pytest would collect and print all of it.
    config.option.show_capture = "no"
    config.pluginmanager.set_blocked("logging-plugin")
    try:
        target = start_target(config.getoption("target"))
    except TargetError as error:
        pytest.exit(str(error), returncode=_BEFORE_ALL)
    from npugraph_ex import _torch_private, testing
    from npugraph_ex._garbage_collection import rare_collection

    name = config.getoption("mutant")
    if name == "list":
        lines = [f"{mutant.name:<32} breaks: {mutant.breaks}" for mutant in testing.mutants().values()]
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print("\n".join(lines))
        pytest.exit("these are the mutants", returncode=0)
    profile, seed = config.getoption("profile"), config.getoption("seed")
    identity = {"target": target.describe(), "profile": profile, "seed": seed, "mutant": name}
    books = Books(None if is_worker(config) else folder, identity)
    run = Run(target, PROFILES[profile], seed, books, None if folder is None else folder / SCRIPTS)
    try:
        if config.getoption("resume"):
            books.read()
    except FolderError as error:
        pytest.exit(str(error), returncode=_BEFORE_ALL)
    config.stash[RUN] = run
    stack = ExitStack()
    config.add_cleanup(stack.close)
    stack.enter_context(rare_collection())
    stack.enter_context(_torch_private.unmeasured_guards())
    if name is not None:
        try:
            run.mutant = stack.enter_context(testing.mutant(name)).name
        except ValueError as error:
            pytest.exit(str(error), returncode=_BEFORE_ALL)
        config.option.maxfail = config.option.maxfail or 1
    config.pluginmanager.register(Notes(run, config), "conformance-notes")
    import torch

    torch.set_num_threads(1)  # a process is a core; its tensors are too small to share among several
    if not is_worker(config):
        config.pluginmanager.register(Reporter(run, config), "conformance-reporter")


def _folder(config: pytest.Config) -> Path | None:
    """The report folder, which is this run's alone from now on; None where nothing is written."""
    folder: Path | None = config.getoption("report_dir")
    if is_worker(config) or config.option.collectonly:
        return None if config.option.collectonly else folder
    resume = config.getoption("resume")
    if folder is None:
        if resume:
            pytest.exit("--resume goes on with the run in --report-dir; say which folder that is.", _BEFORE_ALL)
        return None
    try:
        lock = prepare(folder, resume=resume)
    except FolderError as error:
        pytest.exit(str(error), returncode=_BEFORE_ALL)
    config.add_cleanup(lambda: os.close(lock))
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker reads no books; it is told which tests passed already."""
    node.workerinput["done"] = sorted(node.config.stash[RUN].books.done)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Models last: what is wrong with one pattern is better learnt from that pattern. What passed is not run again."""
    items.sort(key=lambda item: "test_models" in item.nodeid)
    try:
        mark(config.stash[KNOWN], items)
    except KnownFailuresError as error:
        if not is_worker(config):
            pytest.exit(str(error), returncode=_BEFORE_ALL)
        config.workeroutput["refused"] = str(error)
        items.clear()
    done = set(config.workerinput["done"]) if is_worker(config) else config.stash[RUN].books.done
    items[:] = [item for item in items if item.nodeid not in done]
    for item in items:
        if isinstance(item, pytest.Function):
            item.obj = roomy(item.obj)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker that refused to begin says why, once for all of them."""
    config = node.config
    refused = getattr(node, "workeroutput", {}).get("refused")
    if refused is not None and config.stash.get(REFUSED, None) is None:
        config.stash[REFUSED] = refused
        config.pluginmanager.get_plugin("terminalreporter").write_line(refused, red=True)


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Ctrl-C ends the worker processes, for which pytest-xdist would wait; not where failures ended the run."""
    if excinfo.type is KeyboardInterrupt:
        end_children()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A resumed run with nothing left to do is a success, unless failures of before were not run again.

    Enough failures are failures, whoever ended the run for them.
    """
    config = session.config
    nothing = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and config.stash.get(REFUSED, None) is None
    if nothing and config.stash[RUN].books.done:
        session.exitstatus = pytest.ExitCode.OK
    if session.exitstatus == pytest.ExitCode.OK and config.stash[RUN].books.failed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    # xdist ends a run at its last permitted failure by interrupting it.
    if exitstatus == pytest.ExitCode.INTERRUPTED and 0 < (config.option.maxfail or 0) <= session.testsfailed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """The run that this test belongs to."""
    return request.config.stash[RUN]
