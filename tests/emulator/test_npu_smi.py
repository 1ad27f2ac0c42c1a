"""`npu-smi` of the emulated device: found by an emulated program, in the form that clients read, and never taken for a real one."""

from __future__ import annotations

import pytest

from npu_emulator.npu_smi import main
from tests.emulator.conftest import Program


def _fields(text: str) -> dict[str, str]:
    return {name.strip(): value.strip() for name, _, value in (line.partition(" : ") for line in text.splitlines())}


@pytest.mark.parametrize(
    ("soc", "card", "names"),
    [
        ("Ascend910B2", 2, {"Chip Type": "Ascend", "Chip Name": "910B2"}),
        ("Ascend310P3", 2, {"Chip Type": "Ascend", "Chip Name": "310P3"}),
        ("Ascend910_9391", 1, {"Chip Name": "Ascend910", "NPU Name": "9391"}),
        ("Ascend950PR_9579", 2, {"Chip Name": "Ascend950PR", "NPU Name": "9579"}),
    ],
)
def test_cards_chips_and_names(
    soc: str, card: int, names: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third device's card and chip are where the chip's family has them, and so are the fields of its name."""
    monkeypatch.setenv("NPU_EMULATOR_SOC", soc)
    monkeypatch.setenv("NPU_EMULATOR_DEVICES", "3")
    assert main(["info", "-m"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[2] for row in rows] == ["0", "1", "2"]
    assert rows[2][:2] == [str(card), "0"]
    assert main(["info", "-t", "board", "-i", str(card), "-c", "0"]) == 0
    board = _fields(capsys.readouterr().out)
    assert {name: board.get(name) for name in ("Chip Type", "Chip Name", "NPU Name") if name in board} == names
    assert "emulated" in board["Product Name"]
    assert main(["info", "-t", "health", "-i", str(card + 1)]) == 1
    assert f"card {card + 1}" in capsys.readouterr().err


def test_what_it_does_not_have_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown topic ends with the topics that there are."""
    with pytest.raises(SystemExit, match="2"):
        main(["info", "-t", "power"])
    assert "health" in capsys.readouterr().err


def test_a_program_finds_it(program: Program) -> None:
    """An emulated program's `npu-smi` shows the program's own devices and process, and says that they are emulated."""
    text = """
import os, subprocess
table = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, check=True)
rows = [line.strip("|").split("|") for line in table.stdout.splitlines() if line.startswith("| ")]
behind = [row[0].split()[0] for row in rows if len(row) > 1 and row[1].strip() == str(os.getpid())]
print(behind, "emulated" in table.stdout, "emulated" in table.stderr)
"""
    done = program(text, "--quiet", "--devices", "2")
    assert done.stdout == "['0', '1'] True True\n", done.stderr
