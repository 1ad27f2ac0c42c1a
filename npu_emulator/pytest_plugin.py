"""pytest plugin: `pytest --npu=emulated` gives a test suite that uses `device="npu"` an emulated one.

`--npu=hardware` runs the same suite on a real NPU and stops with one sentence where there is none. Without `--npu` the plugin
does nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npu_emulator import EmulatorError, activate, is_active

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--npu` and `--npu-schedule`."""
    group = parser.getgroup("npu", "the Ascend NPU that tests run on")
    group.addoption(
        "--npu", choices=("emulated", "hardware"), help="emulated: npu_emulator's device; hardware: a real one"
    )
    group.addoption(
        "--npu-schedule",
        metavar="SCHEDULE",
        help="order of queued work on the emulated device: fifo, lazy, random:SEED, pct:SEED:DEPTH",
    )
    group.addoption(
        "--npu-races", action="store_true", help="fail a test in which two streams race (emulated device only)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start the device before any conftest can import torch."""
    options = early_config.known_args_namespace
    if options.npu == "emulated" and not is_active():
        try:
            activate(quiet=True, schedule=options.npu_schedule)
        except EmulatorError as error:
            raise pytest.UsageError(f"--npu=emulated: {error}") from error
    elif options.npu == "hardware":
        if is_active() or os.environ.get("NPU_EMULATOR") == "1":
            raise pytest.UsageError("--npu=hardware, but this process runs under npu_emulator; start pytest without it")
        if not any(Path("/dev").glob("davinci[0-9]*")):
            raise pytest.UsageError("--npu=hardware, but there is no NPU here (no /dev/davinci*); use --npu=emulated")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which device runs."""
    if is_active():
        from npu_emulator import current

        settings = current().settings
        return f"npu: emulated {settings.soc}, {settings.devices} device(s), schedule {settings.schedule}"
    return "npu: hardware" if config.getoption("--npu") == "hardware" else None


@pytest.fixture(autouse=True)
def _npu_races(request: pytest.FixtureRequest) -> Iterator[None]:
    """Under `--npu-races`, stop a test at the launch that completes a race."""
    if not (request.config.getoption("--npu-races") and is_active()):
        yield
        return
    from npu_emulator import detect_races

    with detect_races(stop_at_first=True):
        yield
