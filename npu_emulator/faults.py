"""Faults on purpose: a rank that is killed, comes late, or loses its connection, for tests of a program's own recovery.

    kill:DEVICE:N             SIGKILL to the process of a device, as its Nth collective begins
    delay:DEVICE:N:SECONDS    that collective begins so much later
    drop:DEVICE:N             the connection to the other ranks of that collective is lost

Several are separated by commas. Sends and receives count as collectives; N begins with 1, at the start or at `inject_faults`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from npu_emulator.errors import EmulatorError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Fault", "parse_faults"]

_KINDS = ("kill", "delay", "drop")
_FORM = re.compile(r"(?:(kill|drop):(\d+):([1-9]\d*)|(delay):(\d+):([1-9]\d*):(\d+(?:\.\d+)?))")


class Fault(NamedTuple):
    """One fault in the runtime's form."""

    kind: int
    device: int
    number: int
    milliseconds: int = 0


def parse_faults(text: str, devices: int) -> tuple[Fault, ...]:
    """Read a list of faults of so many devices; raise EmulatorError for anything else."""
    found = tuple(_faults(text))
    for fault in found:
        if fault.device >= devices:
            raise EmulatorError(
                f"a fault (NPU_EMULATOR_FAULTS) names device {fault.device}, and the number of emulated devices is {devices} "
                f"(0..{devices - 1}); name one of them, or emulate more (--devices)"
            )
    return found


def _faults(text: str) -> Iterable[Fault]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _FORM.fullmatch(part)
        if found is None:
            raise EmulatorError(
                f"a fault (NPU_EMULATOR_FAULTS) must be 'kill:DEVICE:N', 'delay:DEVICE:N:SECONDS' or 'drop:DEVICE:N', got {part!r}"
            )
        kind, device, number, seconds = [group for group in found.groups() if group is not None] + ["0"] * (
            found[4] is None
        )
        yield Fault(_KINDS.index(kind), int(device), int(number), round(1000 * float(seconds)))
