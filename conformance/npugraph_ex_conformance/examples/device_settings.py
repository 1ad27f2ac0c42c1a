"""Examples of the emulated device's settings: random variables and files of a real device's answers, and what they mean.

The examples have wrong ones, too, which must be refused by name. Right ones also decide what `npu-smi` says.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from npu_emulator import npu_smi
from npu_emulator.chips import CHIPS, DEFAULT, Chip
from npu_emulator.errors import EmulatorError
from npu_emulator.measured import SWITCHES, MeasuredErrors, read
from npu_emulator.settings import Settings
from npugraph_ex.testing.generator.choices import Choices, Sampled

_CHIPS = (*CHIPS, "Ascend310P1", "Ascend950PR_9599", "Ascend910A")
_FIGURES: Mapping[str, Callable[[Chip], int | None]] = {
    "memory_gb": lambda chip: chip.memory // 2**30,
    "streams": lambda chip: chip.streams,
    "events": lambda chip: chip.events,
    "cube_cores": lambda chip: chip.cube_cores,
    "vector_cores": lambda chip: chip.vector_cores,
}
"""What a chip's figures are in the settings."""
_SWITCHES = {
    **dict.fromkeys(("1", "true", "YES", "on"), True),
    **dict.fromkeys(("", "0", "False", "no", "OFF"), False),
}
_SWITCH_FIELDS = ("null_kernels", "poison", "check_memory", "force")
_WRONG, _MISSPELT, _KEYWORD = 25, 8, 25
"""Chances in percent: that a value is none; that a variable of no setting is there; that a value is a keyword argument instead."""
_PREFIX = "NPU_EMULATOR_"
_NOTHING_TO_DO = ("size", "replay", "conflict", "group-outside")
"""Decisions where the emulated device cannot go on without the error."""


@dataclass
class _DrawnSettings:
    """Variables and keyword arguments, what the settings are then, and which names the refusal has."""

    variables: dict[str, str] = field(default_factory=dict)
    keywords: dict[str, Any] = field(default_factory=dict)
    meant: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def add(self, choices: Choices, name: str, text: str, value: object, *, wrong: bool) -> None:
        """One setting; text that says no value can only come from the environment."""
        if choices.chance(_KEYWORD) and value is not None:
            self.keywords[name] = value
        else:
            self.variables[_PREFIX + name.upper()] = text
        if wrong:
            self.refused.append(_PREFIX + name.upper())
        else:
            self.meant[name] = value


def device_setting_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    choices = Choices(Sampled(f"device settings {seed}"))
    drawn = _drawn(choices)
    clean = {name: text for name, text in os.environ.items() if not name.startswith("NPU_EMULATOR")}
    with patch.dict(os.environ, {**clean, **drawn.variables}, clear=True):
        try:
            settings = Settings.from_environment(**drawn.keywords)
        except EmulatorError as error:
            wrong = "" if any(name in str(error) for name in drawn.refused) else f"are refused: {error}"
        except Exception as error:  # noqa: BLE001 - whatever a fault makes the emulator raise is what was found
            wrong = f"raise {type(error).__name__}: {error}"
        else:
            wrong = _wrong_settings(settings, drawn) or (_wrong_answers(settings) if not drawn.keywords else "")
    if wrong:
        return f"the settings {drawn.variables} and {drawn.keywords} {wrong}"
    return _wrong_measured(choices)


def _drawn(choices: Choices) -> _DrawnSettings:
    drawn = _DrawnSettings()
    soc = choices.pick(_CHIPS)
    if choices.chance(70):
        wrong = choices.chance(_WRONG)
        soc += "x" if wrong else ""
        drawn.add(choices, "soc", soc, soc, wrong=wrong)
    chip = CHIPS.get(drawn.meant.get("soc", DEFAULT.name))
    figures = {name: read(chip) for name, read in _FIGURES.items()} if chip else {}
    for name in ("devices", *_FIGURES):
        if not choices.chance(35):
            continue
        wrong = choices.chance(_WRONG)
        most = 16 if name == "devices" else 300
        value = choices.pick((0, -1, 17 if name == "devices" else 0)) if wrong else choices.number(1, most)
        if wrong and choices.chance(50):
            drawn.add(choices, name, choices.pick(("2.5", "two", "1 2")), None, wrong=True)
        else:
            drawn.add(choices, name, str(value), value, wrong=wrong)
    for name in _SWITCH_FIELDS:
        if choices.chance(25):
            text = choices.pick((*_SWITCHES, "maybe"))
            drawn.add(choices, name, text, _SWITCHES.get(text), wrong=text not in _SWITCHES)
    drawn.meant = {**{name: value for name, value in figures.items() if value is not None}, **drawn.meant}
    if choices.chance(_MISSPELT):
        name = choices.pick(("NPU_EMULATOR_SOCK", "NPUEMULATOR_DEVICES", "NPU_EMULATORS", "npu_emulator_soc"))
        drawn.variables[name] = "1"
        drawn.refused.append(name)
    return drawn


def _wrong_settings(settings: Settings, drawn: _DrawnSettings) -> str:
    if drawn.refused:
        return f"are accepted, though {drawn.refused} are wrong"
    meant = {one.name: drawn.meant.get(one.name, one.default) for one in fields(Settings)}
    found = {name: getattr(settings, name) for name in meant}
    return "" if found == meant else f"are {found} instead of {meant}"


def _wrong_measured(choices: Choices) -> str:
    """A file switches a decision for whose rules the device gives one answer, which the emulated device can give."""
    answers: dict[str, str | int] = {}
    codes, contrary = {}, []
    for decision, rules in SWITCHES.items():
        answered = [rule for rule in rules if choices.chance(60)]
        kinds: tuple[str | int, ...] = (107030, "107029", "done", "raised")
        given = [choices.pick(kinds) for _ in range(choices.number(1, 2))]
        answers |= {rule: choices.pick(given) for rule in answered}
        said = {str(answers[rule]) for rule in answered}
        if len(said) == 1 and (said <= {"107030", "107029"} or (said == {"done"} and decision not in _NOTHING_TO_DO)):
            codes[decision] = int(min(said).replace("done", "0"))
        elif said:
            contrary.append(decision)
    others = sorted(name for name in ("stream.order", "memory.reuse") if choices.chance(50))
    answers |= dict.fromkeys(others, "done")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "answers.json"
        file.write_text(json.dumps({"answers": answers}), encoding="utf-8")
        found = read(str(file))
        file.write_text(choices.pick(("", "[]", "{}", '{"answers": []}', "{")), encoding="utf-8")
        try:
            return f"a file that holds {file.read_text()!r} is read as {read(str(file))}"
        except EmulatorError as error:
            refused = "AS_MEASURED" in str(error)
    if not refused or found != MeasuredErrors(codes, tuple(contrary), tuple(others)):
        return f"the answers {answers} are read as {found} instead of {codes}, {contrary}, {others}"
    told = [int(number) for number in re.findall(r"\b(\d+) (?:decision|rule)s?\b", found.describe("FILE"))]
    wanted = [len(codes), sum(len(SWITCHES[decision]) for decision in contrary) + len(others)]
    return "" if told == wanted else f"{found} is described as {found.describe('FILE')}"


def _said(*arguments: str) -> tuple[int, str]:
    """What npu-smi answers; each answer says that the device is emulated."""
    output, errors = StringIO(), StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        status = npu_smi.main(["info", *arguments])
    return status if "emulated" in errors.getvalue() else -1, output.getvalue()


def _rows(text: str) -> list[tuple[str, str]]:
    return [(name.strip(), value.strip()) for name, _, value in (line.partition(" : ") for line in text.splitlines())]


def _wrong_answers(settings: Settings) -> str:
    """Compare npu-smi's answers with the settings: an Atlas A3 card has two chips."""
    chips = 2 if re.match("Ascend910_", settings.soc) else 1
    places = [(device // chips, device % chips) for device in range(settings.devices)]
    cards = places[-1][0] + 1
    listed = [("Total Count", str(cards))]
    listed += [row for card in range(cards) for row in (("NPU ID", str(card)), ("Chip Count", str(chips)))]
    family, _, number = settings.soc.partition("_")
    names = (
        [("Chip Name", family), ("NPU Name", number)]
        if number
        else [("Chip Type", "Ascend"), ("Chip Name", family.removeprefix("Ascend"))]
    )
    wanted: dict[tuple[str, ...], list[tuple[str, str]]] = {("-l",): listed}
    for card, chip in places:
        of = ("-i", str(card), "-c", str(chip))
        head = [("NPU ID", str(card)), ("Chip ID", str(chip))]
        wanted |= {
            ("-t", "memory", *of): [*head, ("HBM Capacity(MB)", str(settings.memory_gb * 1024))],
            ("-t", "health", *of): [("Health", "OK")],
            ("-t", "board", *of): [head[0], *_BOARD, head[1], *names],
        }
    told_of_its_chip = settings.soc.startswith("Ascend950")
    wanted[("-t", "board")] = [
        *(("NPU ID", "0"), *_BOARD),
        *([("Chip ID", "0"), *names] if told_of_its_chip else [("Chip Count", str(chips))]),
    ]
    for arguments, rows in wanted.items():
        status, text = _said(*arguments)
        if status or _rows(text) != rows:
            return f"make npu-smi {arguments} answer {status}, {text!r}, instead of {rows}"
    return _wrong_tables(settings, places)


_BOARD = (("Product Name", "emulated by npu_emulator; no NPU is used"), ("PCIe Bus Info", "NA"))


def _wrong_tables(settings: Settings, places: list[tuple[int, int]]) -> str:
    """The mapping, the topology and the overview have each device once; a card that is not there is an error."""
    _, mapping = _said("-m")
    found = [tuple(line.split()[:4]) for line in mapping.splitlines()[1:]]
    if found != [(*map(str, place), str(device), str(device)) for device, place in enumerate(places)]:
        return f"make npu-smi say {mapping!r} of {places}"
    _, links = _said("-t", "topo")
    names = [f"NPU{device}" for device in range(settings.devices)]
    table = [line.split() for line in links.splitlines()]
    if table[0][: len(names)] != names or [row[: len(names) + 1] for row in table[1:]] != [
        [name, *("X" if other == name else "NA" for other in names)] for name in names
    ]:
        return f"make npu-smi say {links!r} of the links"
    _, overview = _said()
    memory, name = f"NA / {settings.memory_gb * 1024} ", settings.soc.removeprefix("Ascend")
    heads = [(int(a), int(b)) for a, b in re.findall(rf"\| (\d+) +{name} .*\n\| (\d+) ", overview)]
    owners = re.findall(rf"\| (\d+) +(\d+) +\| {os.getppid()} ", overview)
    if heads != places or overview.count(memory) != len(places) or [(int(a), int(b)) for a, b in owners] != places:
        return f"make npu-smi say {overview}"
    status, text = _said("-i", str(places[-1][0] + 1))
    return "" if status == 1 and not text else f"make npu-smi answer {status}, {text!r} for a card that is not there"
