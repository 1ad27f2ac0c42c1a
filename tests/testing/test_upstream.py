"""`npugraph-ex upstream`: files, chips, causes and known differences, and one real run over a small made-up checkout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from npu_emulator.settings import SOCS
from npugraph_ex.errors import UsageError
from npugraph_ex_conformance.upstream import checkout, known, process, tables
from npugraph_ex_conformance.upstream.outcome import UpstreamOutcome, cause_of
from npugraph_ex_conformance.upstream.worker import in_child

FIRST = """
import os, sys, unittest
import beside, helper, torch, torch_npu
from npu_emulator import KernelMissingError
from torch_npu.testing.common_utils import SupportedDevices
def test(of_no_case): pass
def test_cases_of_others(): yield beside
class TestFirst(unittest.TestCase):
    def test_a_passes(self):
        self.assertEqual(torch.ones(2).npu().sum().item(), helper.TWO)
    def test_b_wrong_value(self):
        torch.testing.assert_close(torch.ones(2).npu(), torch.zeros(2).npu())
    def test_c_no_kernel(self):
        raise KernelMissingError("the emulated NPU has no kernel for npu::npu_of_a_test; give it one")
    def test_d_dies(self):
        os.kill(os.getpid(), 9)
    def test_e_comes_after_it(self):
        open("written", "w").close()
        assert os.path.dirname(sys.executable) in os.environ["PATH"].split(":")[:2]  # where torchrun lies; npu-smi may be before
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(0))  # as in every run
    @unittest.skip("not today")
    def test_f_skips(self): pass
    @SupportedDevices(["Ascend950"])
    def test_g_asks_for_a_chip(self):
        assert torch_npu.npu.get_device_name(0).startswith("Ascend950")
"""
SECOND = "def test_takes_long():\n    while True: pass\n"
THIRD = "import no_such_module_of_anyone\n"
LAST = "import time\ndef test_waits():\n    time.sleep(1000)\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with four test files, a helper and a folder that says whose it is."""
    tests = tmp_path / "checkout" / "test"
    (tests / "ops").mkdir(parents=True)
    (tests.parent / "op_plugin").mkdir()
    (tests / "helper.py").write_text("TWO = 2.0\n")
    for name in ("__init__", "beside"):  # a package, whose files import each other as if it were none
        (tests / "ops" / f"{name}.py").touch()
    for name, text in (("a_first", FIRST), ("b_second", SECOND), ("c_third", THIRD), ("d_last", LAST)):
        (tests / "ops" / f"test_{name}.py").write_text(text)
    return tests.parent


@pytest.mark.slow
def test_a_run_that_is_stopped_keeps_what_it_found(project: Path, tmp_path: Path) -> None:
    """Passes, failures by cause, a crash and the tests after it, the limit, a chip, a helper, an import error; then Ctrl-C."""
    differences, found = tmp_path / "known.toml", tmp_path / "found.json"
    differences.write_text('[op-plugin.mistake]\n"ops/test_a_*::*wrong_value" = "zeros are wanted"\n')
    command = subprocess.Popen(
        [sys.executable, "-m", "npugraph_ex.cli", "upstream", str(project), "--limit", "3", "--json", str(found),
         "--known", str(differences)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert command.stderr is not None
    told = [command.stderr.readline() for _ in range(3)]
    command.send_signal(signal.SIGINT)
    said, rest = command.communicate(timeout=600)
    assert told[-1].startswith("[3/4] ops/test_c_third.py: 0 passed, 1 failed"), told
    assert command.returncode == 130
    assert "stopped by Ctrl-C after 3 of 4 files" in rest

    answer = json.loads(found.read_text())
    assert not answer["complete"]
    states = {UpstreamOutcome(**outcome).name: (outcome["state"], outcome["cause"]) for outcome in answer["outcomes"]}
    first = "ops/test_a_first.py::TestFirst::"
    assert states == {
        f"{first}test_a_passes": ("passed", ""),
        f"{first}test_b_wrong_value": ("failed", "another value"),
        f"{first}test_c_no_kernel": ("failed", "no kernel for npu::npu_of_a_test"),
        f"{first}test_d_dies": ("failed", "the process dies of SIGKILL"),
        f"{first}test_e_comes_after_it": ("passed", ""),
        f"{first}test_f_skips": ("skipped", "not today"),
        f"{first}test_g_asks_for_a_chip": ("passed", ""),
        "ops/test_b_second.py::test_takes_long": ("failed", "takes more than 3 s of processor time"),
        "ops/test_c_third.py": ("failed", "ModuleNotFoundError: No module named 'no_such_module_of_anyone'"),
    }
    chips = {outcome["test"]: outcome["chip"] for outcome in answer["outcomes"]}
    assert chips["TestFirst::test_g_asks_for_a_chip"].startswith("Ascend950")
    assert chips["TestFirst::test_a_passes"] == checkout.DEFAULT_CHIP
    wrong = 1 + FIRST[: FIRST.index("torch.testing")].count("\n")
    assert f"failed: the test's own mistake (mistake)\n      1  test_a_first.py:{wrong}: zeros are wanted" in said
    assert "tests: 3 passed, 5 failed (1 known), 1 skipped, 37.5 % of those that ran" in said
    assert sorted(path.name for path in project.rglob("*") if path.is_file()) == [
        "__init__.py", "beside.py", "helper.py", "test_a_first.py", "test_b_second.py", "test_c_third.py", "test_d_last.py",
    ]  # fmt: skip


def test_files_are_found_from_a_checkout_a_folder_or_a_file(project: Path) -> None:
    """And chosen by a part of their name; what is not there is named."""
    folder = project / "test" / "ops"
    whole = checkout.find(project)
    assert (whole.project, len(whole.files)) == ("op-plugin", 4)
    assert checkout.find(folder) == whole
    assert checkout.find(project, "second").files == checkout.find(folder / "test_b_second.py").files
    assert [whole.name(file) for file in checkout.find(project, "ops/test_[ab]*").files] == [
        "ops/test_a_first.py",
        "ops/test_b_second.py",
    ]
    for path, pattern, words in (
        (project / "absent", "*", "absent"),
        (project.parent, "*", "no folder 'test'"),
        (project, "nothing", "'nothing'; there are 4 test files"),
        (project / "test" / "ops" / "test_a_first.py", "zzz", "'zzz'; there is 1 test file\n"),
    ):
        with pytest.raises(UsageError, match=words):
            checkout.find(path, pattern)


@pytest.mark.parametrize(
    ("decorators", "first", "asked"),
    [
        ("", "Ascend910B2", None),
        ("@SupportedDevices(['Ascend910B'])", "Ascend910B2", "Ascend910B2"),
        ("@SupportedDevices(['Ascend950'])", "Ascend950PR_9579", "Ascend950PR_9579"),
        ("@SupportedDevices(['Ascend910_93', 'Ascend950'])", "Ascend910_9362", "Ascend910_9362"),
        ("@SupportedDevices(['Ascend950'])\n@SupportedDevices([\"Ascend910B\"])", "Ascend910B2", "Ascend950PR_9579"),
        ("@SupportedDevices(['Ascend777'])", "Ascend910B2", None),
    ],
)
def test_the_chip_is_the_one_that_tests_name(decorators: str, first: str, asked: str | None, tmp_path: Path) -> None:
    """A file starts where most of it can run; a skip tells which chip a test wants."""
    file = tmp_path / "test_it.py"
    file.write_text(f"{decorators}\ndef test_a(): pass\n")
    assert checkout.first_chip(file, SOCS) == first
    file.write_text(f"{decorators}\ndef test_a(): pass\n\ndef test_b(): pass\n\ndef test_c(): pass\n")
    assert checkout.first_chip(file, SOCS) == checkout.DEFAULT_CHIP
    if asked is not None:
        reason = f"Only run on {decorators.partition('[')[2].partition(']')[0]}, current device is Ascend310B1."
        assert next(checkout.chips_in(reason, SOCS)) == asked


@pytest.mark.parametrize(
    ("kind", "message", "cause"),
    [
        ("KernelMissingError", "the emulated NPU has no kernel for npu::a; give it one", "no kernel for npu::a"),
        (
            "UnsupportedArgumentError",
            "npu_a: the reference does not cover mode=3; it covers 1.",
            "not covered: npu_a(mode=)",
        ),
        ("AssertionError", "Tensor-likes are not close!\n\nMismatched elements: 3 / 4", "another value"),
        ("AssertionError", "\nNot equal to tolerance rtol=0.001", "another value"),
        ("AssertionError", "RuntimeError not raised", "no error where one is expected"),
        ("AssertionError", '"perm" does not match "other"', "another error message"),
        ("RuntimeError", "size 3 at 0x7f00 is not 4.5\nmore", "RuntimeError: size N at N is not N"),
        ("ValueError", "", "ValueError"),
        ("AssertionError", "result error!", "another value"),
        ("AssertionError", "shape error", "another shape"),
        ("AssertionError", "None", "another value"),
    ],
)
def test_failures_are_counted_by_cause(kind: str, message: str, cause: str) -> None:
    """Numbers and addresses do not make two causes of one."""
    assert cause_of(kind, message) == cause


@pytest.mark.parametrize(
    "ended",
    [
        "Process 1 exited with error code 10 and exception",
        "-- Process 1 terminated with the following error:\nKeyError: 1\n\nDuring handling of it, another one occurred",
    ],
)
def test_a_failure_in_a_process_that_the_test_started_is_that_of_the_process(ended: str) -> None:
    """Its class, its words and its line of the test file, not the words of the process that waits for it."""
    calls = [
        f'  File "{file}", line {line}, in f\n    f()\n    ^^^\n' for file, line in (("/a/t.py", 7), ("/torch/x.py", 9))
    ]
    message = f"\n{ended}:\nTraceback (most recent call last):\n{''.join(calls)}torch.errors.OddError: 3: no\n\nProcess 2 exited"
    kind, said, line = in_child(message, "/a/t.py") or ("", "", 0)
    assert (kind, said.splitlines()[0], line) == ("OddError", "3: no", 7)
    assert in_child("Process 1 exited", "/a/t.py") is None


def outcome(file: str, test: str, state: str) -> UpstreamOutcome:
    """An outcome on a chip."""
    return UpstreamOutcome(file, test, "Ascend910B2", state, "another value" if state == "failed" else "")


def test_each_failure_without_a_reason_is_listed_with_its_words() -> None:
    """The test, its line, and the first line of its message; words of torch_npu's own comparison are translated."""
    ran = [
        UpstreamOutcome("ops/a.py", "T::x", "", "failed", "another value", "\nTensors are not close\nmore", 7),
        UpstreamOutcome("ops/a.py", "T::y", "", "failed", "another shape", "shape error", 9),
        UpstreamOutcome("ops/b.py", "", "", "failed", "the process dies of SIGKILL"),
        UpstreamOutcome("ops/b.py", "T::z", "", "failed", "another value", "None", known="why", kind="gap"),
    ]
    lines = [*tables.report(ran, [])]
    begin = lines.index("tests that failed")
    assert lines[begin + 1 : lines.index("", begin)] == [
        "  ops/a.py::T::x", "    line 7: Tensors are not close", "  ops/a.py::T::y", "    line 9: another shape",
        "  ops/b.py", "    the process dies of SIGKILL",
    ]  # fmt: skip


def test_known_differences_explain_failures_and_grow_stale(tmp_path: Path) -> None:
    """An entry is for one project's tests; one whose file ran without such a failure is named, one whose file did not is not."""
    file = tmp_path / "known.toml"
    file.write_text(
        '[op-plugin.gap]\n"ops/test_a.py::T::test_x" = "rounds"\n"ops/test_c.py" = "gone"\n"ops/test_d.py" = "not run"\n'
        '[op-plugin.limit]\n"ops/test_b.py" = "slow"\n"ops/test_c.py::T::*" = "large"\n'
        '[torch_npu.gap]\n"ops/test_a.py::T::test_y" = "no"\n'
    )
    entries = known.load(file, "op-plugin")
    found = known.explained(
        [outcome("ops/test_a.py", "T::test_x", "failed"), outcome("ops/test_a.py", "T::test_y", "failed"),
         outcome("ops/test_b.py", "", "failed"), outcome("ops/test_c.py", "T::test_z", "passed")],
        entries,
    )  # fmt: skip
    assert [(one.kind, one.known) for one in found] == [("gap", "rounds"), ("", ""), ("limit", "slow"), ("", "")]
    assert list(known.stale(found, entries)) == ["ops/test_c.py"]
    text = "\n".join(tables.report(found, ["ops/test_c.py"]))
    assert "delete their lines\n  ops/test_c.py" in text
    assert "tests: 1 passed, 3 failed (2 known), 0 skipped, 25.0 % of those that ran" in text
    assert "files: 1 of 3 files that ran passed whole; 0 skipped whole" in text


def test_the_share_of_files_of_covered_operators_is_counted() -> None:
    """A file that calls what has no kernel, what torch_npu does not have, or several devices is none; one with a mistake is."""

    def failed(file: str, kind: str, cause: str = "another value") -> UpstreamOutcome:
        return UpstreamOutcome(f"ops/{file}.py", "T::test", "Ascend910B2", "failed", cause, known="why", kind=kind)

    files = [outcome(f"ops/passes_{number}.py", "T::test", "passed") for number in range(3)]
    files += [
        failed("no_kernel", "gap", "no kernel for npu::npu_of_a_test"), failed("absent", "absent"),
        failed("devices", "devices"), failed("mistake", "mistake"), failed("gap", "gap"), failed("unknown", ""),
        outcome("ops/skips.py", "T::test", "skipped"),
    ]  # fmt: skip
    text = "\n".join(tables.report(files, []))
    assert "files: 3 of 9 files that ran passed whole; 1 skipped whole" in text
    assert "files of covered operators: 3 of 6 passed whole, 50.0 %" in text
    assert (
        "1 that call an operator without a kernel, 1 that call what the installed torch_npu does not have, 1 that"
        in text
    )
    assert "among them: 1 with a mistake of the test's own" in text
    assert "files of covered" not in "\n".join(tables.report(files[:3], []))


def test_our_known_differences_can_be_read(tmp_path: Path) -> None:
    """Each has a reason of one line; a file that has not is refused by name."""
    assert all(known.load(known.OURS, project) is not None for project in ("op-plugin", "torch_npu"))
    file = tmp_path / "known.toml"
    wrong = (
        "[op-plugin\n",
        '[op-plugin.gap]\n"a" = ""\n',
        '[op-plugin.gap]\n"a" = 3\n',
        '[op-plugin]\n"a" = "no kind"\n',
    )
    for text in wrong:
        file.write_text(text)
        with pytest.raises(UsageError, match=r"known\.toml"):
            known.load(file, "op-plugin")


def test_a_process_that_waits_for_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but polls for so many looks is the end; a process that runs slowly, or now and then for longer, goes on."""
    polls = [(30 + tick, False, 0) for tick in range(9)]
    looks = iter([(1, False, 0)] * 3 + [(30, False, 0)] + [(30, True, 0)] * 9 + polls)
    ended: list[int] = []
    monkeypatch.setattr(process, "_LOOKS_IDLE", 4)
    monkeypatch.setattr(process, "use_of", lambda _: next(looks))
    monkeypatch.setattr(process, "_end_session", ended.append)

    class Waiting:
        def ended(self, _: float) -> int | None:
            return -9 if ended else None

    why, status = process._watched(Waiting(), 7, process.ProcessLimits(1, 1, 1, ()))
    assert (why, status, ended) == ("waits for something that does not come", -9, [7])
    assert len(list(looks)) == 4
