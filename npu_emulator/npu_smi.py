"""`npu-smi` of the emulated device: what clients of the driver's tool ask for, in the form that they read.

An emulated process finds `bin/npu-smi` on its PATH. Each answer says that the device is emulated: on stderr, and where a reader of
the form allows it. What a program cannot know of an emulated device (power, temperature, bus, load) is `NA`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from npu_emulator.settings import Settings

__all__ = ["main"]

_EMULATED = "emulated by npu_emulator; no NPU is used"
_TABLE = (27, 15, 52)
"""Widths of the columns of the overview."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one command; exit status 0, or 1 for a device that is not there and 2 for what the tool does not have."""
    parser = argparse.ArgumentParser(
        "npu-smi", description=f"npu-smi, {_EMULATED}.", epilog="Another command of the driver's tool is an error."
    )
    info = parser.add_subparsers(dest="command", required=True).add_parser("info", help="the devices")
    info.add_argument("-l", dest="list", action="store_true", help="how many cards there are")
    info.add_argument("-m", dest="mapping", action="store_true", help="the numbers of cards, chips and devices")
    info.add_argument("-t", dest="topic", choices=sorted(_TOPICS), help="one topic")
    info.add_argument("-i", dest="card", type=int, default=0, metavar="CARD", help="the number of a card")
    info.add_argument("-c", dest="chip", type=int, metavar="CHIP", help="the number of a chip of the card")
    given = parser.parse_args(arguments)
    settings = Settings.from_environment()
    sys.stderr.write(f"npu-smi: {_EMULATED}\n")
    if (given.card, given.chip or 0) not in _chips(settings):
        sys.stderr.write(
            f"npu-smi: there is no chip {given.chip or 0} of card {given.card}; the cards are {_cards(settings)}\n"
        )
        return 1
    if given.topic:
        lines = _TOPICS[given.topic](settings, given.card, given.chip)
    elif given.list:
        lines = _fields(
            {"Total Count": len(_cards(settings))},
            *({"NPU ID": card, "Chip Count": _per_card(settings)} for card in _cards(settings)),
        )
    else:
        lines = _mapping(settings) if given.mapping else _overview(settings)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def _per_card(settings: Settings) -> int:
    """An Atlas A3 card has two chips, any other one."""
    return 2 if settings.soc.startswith("Ascend910_") else 1


def _chips(settings: Settings) -> list[tuple[int, int]]:
    """Card and chip of each device, in the order of the devices."""
    return [divmod(device, _per_card(settings)) for device in range(settings.devices)]


def _cards(settings: Settings) -> list[int]:
    return sorted({card for card, _ in _chips(settings)})


def _names(settings: Settings) -> dict[str, str]:
    """The chip's name in the fields of the driver's tool: family and number, in one field or in two."""
    family, _, number = settings.soc.partition("_")
    if number:
        return {"Chip Name": family, "NPU Name": number}
    return {"Chip Type": "Ascend", "Chip Name": settings.soc.removeprefix("Ascend")}


def _fields(*groups: Mapping[str, object]) -> Iterable[str]:
    return (f"\t{name:<30} : {value}" for group in groups for name, value in group.items())


def _board(settings: Settings, card: int, chip: int | None) -> Iterable[str]:
    """The card, and one of its chips where the command names it; the 950 family tells of its chip in any case."""
    board: dict[str, object] = {"NPU ID": card, "Product Name": _EMULATED, "PCIe Bus Info": "NA"}
    if chip is None and not settings.soc.startswith("Ascend950"):
        return _fields({**board, "Chip Count": _per_card(settings)})
    return _fields({**board, "Chip ID": chip or 0, **_names(settings)})


def _health(settings: Settings, card: int, chip: int | None) -> Iterable[str]:
    del settings, card, chip
    return _fields({"Health": "OK"})


def _memory(settings: Settings, card: int, chip: int | None) -> Iterable[str]:
    return _fields({"NPU ID": card, "Chip ID": chip or 0, "HBM Capacity(MB)": settings.memory_gb << 10})


def _topology(settings: Settings, card: int, chip: int | None) -> Iterable[str]:
    """No link between devices is modelled; every device is near every processor that this process may use."""
    del card, chip
    names = [f"NPU{device}" for device in range(settings.devices)]
    processors = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for row in (["", *names, "CPU Affinity"], *([name, *_links(name, names), processors] for name in names)):
        yield "".join(f"{cell:<10}" for cell in row).rstrip()


def _links(name: str, names: list[str]) -> Iterable[str]:
    return ("X" if other == name else "NA" for other in names)


_TOPICS: dict[str, Callable[[Settings, int, int | None], Iterable[str]]] = {
    "board": _board,
    "health": _health,
    "memory": _memory,
    "topo": _topology,
}


def _mapping(settings: Settings) -> Iterable[str]:
    header = ("NPU ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID", "Chip Name")
    rows = ((*chip, device, device, f"{settings.soc} (emulated)") for device, chip in enumerate(_chips(settings)))
    return ("\t" + "".join(f"{cell!s:<31}" for cell in row).rstrip() for row in (header, *rows))


def _overview(settings: Settings) -> Iterable[str]:
    """The devices, and the process that asks: each emulated process has devices of its own."""
    yield _rule("-", sum(_TABLE) + 2)
    yield f"| {'npu-smi, ' + _EMULATED:<{sum(_TABLE)}} |"
    yield _rule("-", *_TABLE)
    yield _row("NPU   Name", "Health", "Power(W)    Temp(C)           Hugepages-Usage(page)")
    yield _row("Chip", "Bus-Id", "AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)")
    for card, chip in _chips(settings):
        yield _rule("=", *_TABLE)
        yield _row(f"{card:<6}{settings.soc.removeprefix('Ascend')}", "OK", "NA          NA                NA")
        yield _row(f"{chip}", "NA", f"NA          NA                NA / {settings.memory_gb << 10}")
    yield _rule("=", *_TABLE)
    yield _row("NPU     Chip", "Process id", "Process name             | Process memory(MB)")
    parent = os.getppid()
    command = Path(f"/proc/{parent}/comm")
    name = command.read_text(encoding="utf-8").strip() if command.exists() else "NA"
    for card, chip in _chips(settings):
        yield _rule("=", *_TABLE)
        yield _row(f"{card:<8}{chip}", str(parent), f"{name:<24} | NA")
    yield _rule("=", *_TABLE)


def _rule(line: str, *widths: int) -> str:
    return "+" + "+".join(line * width for width in widths) + "+"


def _row(*cells: str) -> str:
    return "|" + "|".join(f" {cell:<{width - 1}}" for cell, width in zip(cells, _TABLE, strict=True)) + "|"


if __name__ == "__main__":
    raise SystemExit(main())
