"""The pytest plugin: one suite, either device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_SUITE = """
import torch

def test_adds():
    assert (torch.ones(2, device="npu") + 1).sum().item() == 4

def test_races():
    x, side = torch.zeros(4, device="npu"), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.add_(1)
    x.mul_(2)
"""


def _pytest(tmp_path: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_suite.py").write_text(_SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path)]
    return subprocess.run(
        [*command, *options, str(tmp_path)], env=environment, capture_output=True, text=True, check=False, timeout=240
    )


def test_a_suite_runs_on_the_emulated_device(tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]) -> None:
    """`--npu=emulated` starts the device before torch is imported and says so in the header."""
    done = _pytest(tmp_path, fresh_environment(), "--npu=emulated", "--npu-schedule=lazy", "-v")
    assert "npu: emulated Ascend910B2, 1 device(s), schedule lazy" in done.stdout, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_races_fail_a_test(tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]) -> None:
    """With `--npu-races` the racing test fails with the report, the other passes."""
    done = _pytest(tmp_path, fresh_environment(), "--npu=emulated", "--npu-races")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "missing edge" in done.stdout


def test_hardware_is_refused_where_there_is_none(
    tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]
) -> None:
    """`--npu=hardware` without an NPU stops with one sentence."""
    done = _pytest(tmp_path, fresh_environment(), "--npu=hardware")
    assert done.returncode == 4
    assert "there is no NPU here" in done.stderr
