"""Kinds of items for the tests of campaigns: they need no device, and do to their process whatever can be done to one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Where kinds imported them from in release 0.2.
from npugraph_ex_conformance.campaign.items import CampaignSettings, ItemAnswer, ItemKind


def _marked(settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
    """Each item leaves a line in a file, so that it is known how often it ran."""

    def check(number: int) -> ItemAnswer:
        with Path(settings.checkout).open("a", encoding="ascii") as file:
            file.write(f"{number}\n")
        time.sleep(0.05)
        return ItemAnswer(
            "" if number % 10 else f"output 3 of call {number} differs at /tmp/x{number}", [f"f{number % 7}"]
        )

    return check


def _fatal(_settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
    kept = []

    def check(number: int) -> ItemAnswer:
        if number == 1:
            os.abort()
        while number == 2:
            time.sleep(60)
        while number == 3:
            pass
        if number == 4:
            kept.append(bytearray(560 << 20))
        if number == 5:
            raise ZeroDivisionError("five")
        if number == 7:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
                return ItemAnswer("Ctrl-C was lost")
        return ItemAnswer(skipped="nothing to do" if number == 6 else "")

    return check


def _cumulative(_settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
    kept: list[bytearray] = []

    def check(_number: int) -> ItemAnswer:
        kept.append(bytearray(150 << 20))
        return ItemAnswer()

    return check


MARKED = ItemKind("campaign_kinds:MARKED", "leaves a mark", _marked, batch=6)
# The limit is for the endless loop alone: a new process starts, and fills its memory, in less on a busy machine, too.
FATAL = ItemKind("campaign_kinds:FATAL", "ends its process", _fatal, size=lambda _: 8, processor=4)
CUMULATIVE = ItemKind("campaign_kinds:CUMULATIVE", "leaves memory behind", _cumulative)
