"""A typed client of `npu_emulator`: every public name, used as the documentation uses it."""

from __future__ import annotations

from pathlib import Path

import torch
from typing_extensions import assert_type

import npu_emulator


@npu_emulator.register_kernel("mine::scale")
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """A kernel of the client's own; the decorator keeps its type."""
    return x * factor


def activated() -> npu_emulator.Emulator:
    """The device, on or off; its errors have one root."""
    npu_emulator.register_kernel("mine::other", scale)
    scaled = scale(torch.ones(2), 2.0)
    assert_type(scaled, torch.Tensor)
    try:
        emulator = npu_emulator.activate(quiet=True, schedule="lazy")
    except (npu_emulator.ActivationError, npu_emulator.BuildError) as error:
        raise SystemExit(str(error)) from error
    except npu_emulator.EmulatorError:
        emulator = npu_emulator.current()
    settings: npu_emulator.Settings = emulator.settings
    assert_type(settings.devices, int)
    return emulator if npu_emulator.is_active() else npu_emulator.current()


def program() -> float:
    """Work on the device."""
    return torch.ones(2).sum().item()


def ordered() -> dict[str, float]:
    """Schedules, one or all."""
    with npu_emulator.schedule("random:7"):
        program()
    return dict(npu_emulator.every_order(program, limit=10))


def watched() -> list[str]:
    """Races and memory faults, as lists or as errors."""
    try:
        with npu_emulator.detect_races(stop_at_first=True) as races, npu_emulator.check_memory() as faults:
            program()
    except (npu_emulator.RaceError, npu_emulator.MemoryFaultError, npu_emulator.KernelMissingError) as error:
        return [str(error)]
    return [*map(str, races), *map(str, faults)]


def counted() -> int:
    """What ran, how often, and when on the modelled clock."""
    with npu_emulator.null_kernels(), npu_emulator.kernel_log("aten.*") as log:
        program()
    with npu_emulator.timeline() as timeline:
        program()
    timeline.save("timeline.json")
    counts: dict[str, int] = npu_emulator.kernel_counts()
    origins: dict[str, str] = npu_emulator.kernel_origins()
    return (
        len(log)
        + len(origins)
        + counts.get("aten::add", 0)
        + npu_emulator.launch_count()
        + npu_emulator.resources().streams
    )


def over_ranks(files: list[str]) -> Path:
    """Faults on purpose, and the timelines of all ranks as one."""
    npu_emulator.inject_faults("delay:0:1:0.5")
    npu_emulator.inject_faults("")
    return npu_emulator.merge_timelines(files, Path("all.json"))


def lacking() -> int:
    """How many calls of operators without a kernel a program makes."""
    with npu_emulator.missing_kernels() as calls:
        program()
    return calls.total()
