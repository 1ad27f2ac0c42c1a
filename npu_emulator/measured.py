"""Loads what a real device answered: a file of `npugraph-ex fidelity --target npu` switches the rules that are data.

Data are decisions of the runtime: which error an operation gives in a capture, or that it gives none. What the device computes
and orders, and what torch_npu's own code does, is no data and stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_emulator.errors import EmulatorError
from npu_emulator.plurals import counted

__all__ = ["SWITCHES", "MeasuredErrors", "read"]

_READS = ("item", "tolist", "cpu", "numpy", "bool", "int")
_SIZES = ("nonzero", "masked-select", "unique", "equal")
_COPIES = ("copy-from-host", "to-device", "tensor", "pageable")

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "read": tuple(f"capture.refuses-{name}" for name in _READS),
    "size": tuple(f"capture.refuses-{name}" for name in _SIZES),
    "copy": tuple(f"capture.refuses-{name}" for name in _COPIES),
    "device": ("capture.refuses-device-synchronize", "capture.refuses-empty-cache"),
    "stream": ("capture.refuses-stream-synchronize",),
    "event": ("capture.refuses-event-synchronize",),
    "replay": ("capture.replay",),
    "query-stream": ("capture.query-stream",),
    "query-event": ("capture.query-event",),
    "unjoined": ("capture.unjoined",),
    "conflict": ("capture.conflict",),
    "event-outside": ("capture.event-outside",),
    "group-outside": ("update.group-outside",),
}
"""The runtime's decisions (`answered` in runtime/), each with the rules that it decides. Modes other than global follow them."""

_NEVER_PERMITTED = ("size", "replay", "conflict", "group-outside")
"""Decisions where the emulated device has nothing to do in place of the error."""


@dataclass(frozen=True)
class MeasuredErrors:
    """A device's answers as the emulated device takes them.

    Attributes:
        codes: by decision, the error that the device gives; 0 where it gives none.
        contrary: decisions for whose rules the device gives several answers, or one that is no code.
        others: the rules that are no data.
    """

    codes: Mapping[str, int]
    contrary: tuple[str, ...]
    others: tuple[str, ...]

    def describe(self, file: str) -> str:
        """What became of the file, in a sentence."""
        kept = [rule for decision in self.contrary for rule in SWITCHES[decision]] + list(self.others)
        return (
            f"as measured in {file}: {counted(len(self.codes), 'decision')}. {counted(len(kept), 'rule')} cannot be switched, "
            f"because no data decides; `npugraph-ex fidelity --as-measured {file}` says which differ"
        )


def read(file: str) -> MeasuredErrors:
    """Read a file of answers.

    Raises:
        EmulatorError: it is none.
    """
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EmulatorError(
            f"NPU_EMULATOR_AS_MEASURED must be a file of `npugraph-ex fidelity`, got {file!r}: {error}"
        ) from error
    answers = found.get("answers") if isinstance(found, dict) else None
    if not isinstance(answers, dict):
        raise EmulatorError(
            f'NPU_EMULATOR_AS_MEASURED must be a file of `npugraph-ex fidelity`, got {file!r}, which has no object "answers"'
        )
    codes: dict[str, int] = {}
    contrary = []
    for decision, rules in SWITCHES.items():
        given = {str(answers[rule]) for rule in rules if rule in answers}
        code = next(iter(given), "")
        if len(given) == 1 and (code.isdigit() or (code == "done" and decision not in _NEVER_PERMITTED)):
            codes[decision] = int(code) if code.isdigit() else 0
        elif given:
            contrary.append(decision)
    data = {rule for rules in SWITCHES.values() for rule in rules}
    return MeasuredErrors(codes, tuple(contrary), tuple(sorted(set(answers) - data)))
