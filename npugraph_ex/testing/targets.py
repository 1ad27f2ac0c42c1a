"""Starts the device of a run, emulated or real. torch is imported only after the target has started."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from npugraph_ex.errors import DeviceError, UsageError
from npugraph_ex.testing.arguments import checked

Kind = Literal["emulated", "npu"]
KINDS: tuple[Kind, ...] = ("emulated", "npu")


class TargetError(DeviceError, UsageError):
    """This machine cannot use the chosen target."""


@dataclass(frozen=True)
class Target:
    """A started target.

    Attributes:
        kind: "emulated" or "npu".
        device: the device's own name.
        versions: distribution name and version of what is being tested with.
    """

    kind: Kind
    device: str
    versions: tuple[tuple[str, str], ...]

    def describe(self, *, seed: int | None = None) -> str:
        """The facts that a run prints first, one a line."""
        facts = [("target", self.kind), ("device", self.device), *self.versions]
        if seed is not None:
            facts.append(("seed", str(seed)))
        return "\n".join(f"{name:<12} {value}" for name, value in facts)


def _hardware() -> str | None:
    """The device file of a real NPU, if there is one."""
    return next((str(path) for path in sorted(Path("/dev").glob("davinci[0-9]*"))), None)


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", ".".join(map(str, sys.version_info[:3])))]
    for name in ("torch", "torch_npu", "npugraph-ex", "hypothesis", "transformers"):
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


@checked
def start_target(kind: str = "auto", *, quiet: bool = True) -> Target:
    """Make ``torch.device("npu")`` mean the target. Call it before torch is imported.

    Args:
        kind: "emulated", "npu", or "auto": the real device where there is one.
        quiet: keep the emulator's banner back; the caller prints ``Target.describe()``.

    Raises:
        TargetError: there is no such target here; the message is one sentence that says why.
    """
    if kind == "auto":
        kind = "npu" if _hardware() else "emulated"
    if kind == "emulated":
        return _start_emulated(quiet=quiet)
    if kind == "npu":
        return _start_npu()
    raise TargetError(f"target must be one of {', '.join(KINDS)} or auto; it is {kind!r}.")


def device_name() -> str:
    """The name of the device that runs, once a target was started."""
    import torch

    return str(torch.npu.get_device_name())


def _start_emulated(*, quiet: bool) -> Target:
    import npu_emulator

    try:
        npu_emulator.activate(quiet=quiet)
    except npu_emulator.EmulatorError as error:
        raise TargetError(f"the emulated target cannot start: {str(error).rstrip('.')}.") from error
    import torch

    return Target("emulated", torch.npu.get_device_name(), _versions())


def _start_npu() -> Target:
    if _hardware() is None:
        raise TargetError("there is no NPU on this machine (no /dev/davinci*), so target npu cannot run; use emulated.")
    try:
        import torch
        import torch_npu  # noqa: F401 - registers the device
    except (ImportError, OSError, RuntimeError) as error:
        raise TargetError(f"torch_npu cannot be imported ({error}), so target npu cannot run.") from error
    if not torch.npu.is_available():
        raise TargetError("torch_npu sees no usable NPU (torch.npu.is_available() is False), so target npu cannot run.")
    return Target("npu", torch.npu.get_device_name(), _versions())
