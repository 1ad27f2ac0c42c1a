"""Asks a device for the rules of the emulated one, each in a process that may end. Imports nothing of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from npugraph_ex_conformance.campaign.warm import WarmProcess
from npugraph_ex_conformance.fidelity.table import FIDELITY, all_rules
from npugraph_ex_conformance.items import CampaignSettings


def ask(numbers: Iterable[int], target: str) -> Iterator[tuple[str, Any]]:
    """Each rule and the answer to it, in a process of its own; that of a probe that ended its process is how it ended."""
    names = [rule.name for rule in all_rules()]
    process = WarmProcess(CampaignSettings(target=target))
    try:
        for number in numbers:
            row = process.run(FIDELITY.name, number)
            yield names[number], row.value if row.state in {"failed", "passed"} else f"{row.state}: {row.message}"
    finally:
        process.close()
