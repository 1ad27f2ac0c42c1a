"""Every setting of the emulator: one table, read from the environment, overridden by keyword arguments."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from npu_emulator.chips import CHIPS, DEFAULT
from npu_emulator.errors import EmulatorError
from npu_emulator.faults import parse_faults
from npu_emulator.measured import read as read_measured
from npu_emulator.schedules import parse

__all__ = ["PYTHON", "RELATIVES", "SOCS", "SWITCH", "Settings"]

SWITCH = "NPU_EMULATOR"
"""The variable in a child's environment that marks an emulated parent (children.py)."""
_PREFIX = f"{SWITCH}_"
_OURS = "NPUEMULAT"
"""The prefix, in capitals and without underscores, of a variable that is ours or looks like ours."""
RELATIVES = f"{SWITCH}_RELATIVES"
"""The variable that says where the processes of a program find each other (children.py)."""
PYTHON = f"{SWITCH}_PYTHON"
"""The variable that names the interpreter for `bin/npu-smi`."""
_NOT_FIELDS = ("NPU_EMULATOR_CACHE", PYTHON, RELATIVES)
"""Variables that other modules read: the folder of the built runtime (build.py), and the two above."""

SOCS = (
    *("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA"),
    *("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1"),
    *("Ascend910_9362", "Ascend910_9363", "Ascend910_9372", "Ascend910_9381", "Ascend910_9382"),
    *("Ascend910_9391", "Ascend910_9392"),
    *("Ascend310P1", "Ascend310P2", "Ascend310P3", "Ascend310P4", "Ascend310P5", "Ascend310P7"),
    *("Ascend310B1", "Ascend310B2", "Ascend310B3", "Ascend310B4"),
    *(f"Ascend950PR_{number}" for number in ("9579", "957b", "957c", "957d", "9589", "958b", "9599")),
    *(f"Ascend950DT_95{number}" for number in (*range(71, 79), *range(81, 89), 91, 92, 95, 96, "A1", "A2")),
)
"""Chips that torch_npu 2.13 knows by name; it refuses to start on any other. For the 950 generation the emulator has the
operators and dtypes, but not the core kinds and formats."""


@dataclass(frozen=True)
class Settings:
    """The emulated device and its behaviour.

    Each field is also an environment variable: `null_kernels` is `NPU_EMULATOR_NULL_KERNELS`.
    """

    devices: int = 1
    """The number of devices."""
    memory_gb: int = DEFAULT.memory >> 30
    """Memory of each device in GiB; address space is reserved, pages are allocated at their first use."""
    streams: int = DEFAULT.streams
    """The number of streams of a device; a captured graph owns one for each of its lanes."""
    events: int = 65536
    """The number of events of a device."""
    cube_cores: int = DEFAULT.cube_cores
    """The number of cube cores (AIC) of a device. A program can read it; no core limit may exceed it."""
    vector_cores: int = DEFAULT.vector_cores
    """The number of vector cores (AIV) of a device, likewise."""
    soc: str = DEFAULT.name
    """The chip. torch_npu selects operators and formats by its name. A chip with public figures (chips.py) also
    sets memory, streams, events and cores, unless they have their own setting, and the modelled clock."""
    schedule: str = "fifo"
    """When queued work runs; see `npu_emulator.schedules`."""
    faults: str = ""
    """Ranks that fail on purpose; see `npu_emulator.faults`."""
    null_kernels: bool = False
    """Launch, capture and replay as usual but run no kernel bodies. Only the host's cost remains."""
    poison: bool | None = None
    """Fill device memory with 0xFF bytes when it is allocated and freed. None does so under every schedule except fifo."""
    check_memory: bool = False
    """Fail at reads of unwritten memory, and at replays over freed memory."""
    kernel_log: str = ""
    """File that gets a JSON line for each kernel, copy and fill that ran; child processes add their number to its name."""
    as_measured: str = ""
    """File of a real device's answers (`npugraph-ex fidelity --output`): the rules that are data are as measured there."""
    force: bool = False
    """Emulate even where CANN or a real NPU is present."""

    def __post_init__(self) -> None:
        """Reject impossible values."""
        if not 1 <= self.devices <= 16:
            raise EmulatorError(f"{_PREFIX}DEVICES must lie in 1..16, got {self.devices}")
        if self.memory_gb < 1:
            raise EmulatorError(f"{_PREFIX}MEMORY_GB must be at least 1, got {self.memory_gb}")
        if self.soc not in SOCS:
            raise EmulatorError(
                f"{_PREFIX}SOC must be the name of an Ascend chip that torch_npu knows, got {self.soc!r}"
                f"{_did_you_mean(self.soc, SOCS) or f'; for instance {DEFAULT.name}'}"
            )
        for name in ("streams", "events", "cube_cores", "vector_cores"):
            if getattr(self, name) < 1:
                raise EmulatorError(f"{_PREFIX}{name.upper()} must be at least 1, got {getattr(self, name)}")
        log = Path(self.kernel_log)
        if self.kernel_log and (log.is_dir() or not os.access(log.parent, os.W_OK)):
            raise EmulatorError(
                f"{_PREFIX}KERNEL_LOG must be a file in a folder that is there and can be written, got {self.kernel_log!r}"
            )
        parse(self.schedule)
        parse_faults(self.faults, self.devices)
        if self.as_measured:
            read_measured(self.as_measured)

    @classmethod
    def from_environment(cls, **overrides: Any) -> Settings:
        """Read the `NPU_EMULATOR_*` variables; keyword arguments that are not None override them, and both override the chip."""
        _refuse_unknown_variables({_PREFIX + field.name.upper() for field in fields(cls)})
        found: dict[str, Any] = {}
        for field in fields(cls):
            text = os.environ.get(_PREFIX + field.name.upper())
            if text is not None:
                found[field.name] = _parse(field.name, field.default, text)
        unknown = set(overrides) - {field.name for field in fields(cls)}
        if unknown:
            known = ", ".join(field.name for field in fields(cls))
            hint = _did_you_mean(min(unknown), [field.name for field in fields(cls)])
            raise EmulatorError(f"unknown emulator setting {min(unknown)!r}{hint}; the settings are {known}")
        found.update((name, value) for name, value in overrides.items() if value is not None)
        return cls(**{**_of_the_chip(found.get("soc", DEFAULT.name)), **found})


def _of_the_chip(name: str) -> dict[str, int]:
    """The settings from a chip's figures; none for a chip without figures."""
    chip = CHIPS.get(name)
    if chip is None:
        return {}
    figures = {
        "memory_gb": chip.memory >> 30,
        "streams": chip.streams,
        "events": chip.events,
        "cube_cores": chip.cube_cores,
        "vector_cores": chip.vector_cores,
    }
    return {setting: figure for setting, figure in figures.items() if figure is not None}


def _refuse_unknown_variables(known: set[str]) -> None:
    """Reject unknown variables, because a misspelt one would silently have no effect, even one with a misspelt prefix."""
    every = sorted({*known, *_NOT_FIELDS})
    for name in sorted(os.environ):
        plain = name.upper().replace("_", "")
        if plain.startswith(_OURS) and name not in every and name != SWITCH:
            raise EmulatorError(
                f"unknown environment variable {name}{_did_you_mean(name.upper(), every)}; the emulator reads {', '.join(every)}"
            )


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _parse(name: str, default: object, text: str) -> object:
    """Turn the text of one environment variable into the type of its field."""
    variable = _PREFIX + name.upper()
    if isinstance(default, bool) or default is None:
        if text.lower() in {"1", "true", "yes", "on"}:
            return True
        if text.lower() in {"", "0", "false", "no", "off"}:
            return False
        raise EmulatorError(f"{variable} must be 0 or 1, got {text!r}")
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError:
            raise EmulatorError(f"{variable} must be a whole number, got {text!r}") from None
    return text
