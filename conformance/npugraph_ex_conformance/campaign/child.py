"""The process that runs items, one after the other: an order a line on its input, an answer a line on the descriptor it is given.

Whatever an item does to this process, `warm` on the other side sees it and knows the item.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from npugraph_ex_conformance.campaign.kinds import kind_named
from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer

_PR_SET_PDEATHSIG = 1


def main(text: str, descriptor: int) -> None:
    """Answer orders until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # an item may run when its worker is killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = CampaignSettings(**json.loads(text))
    os.nice(settings.nice)
    # Ray starts its processes with SIGINT blocked, and shells may ignore it; items press Ctrl-C themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    logging.disable(logging.ERROR)
    opened: dict[str, Callable[[int], ItemAnswer]] = {}
    seen: set[str] = set()
    with ExitStack() as stack, os.fdopen(descriptor, "w", encoding="utf-8", buffering=1) as answers:
        start(settings, stack)
        for line in sys.stdin:
            answers.write(json.dumps(_answer(json.loads(line), settings, opened, seen)) + "\n")


def start(settings: CampaignSettings, stack: ExitStack) -> None:
    """The device, and what every process of a campaign has besides; until the stack closes."""
    if not settings.target:
        return
    from npugraph_ex.testing.targets import start_target

    start_target(settings.target)
    import torch

    from npugraph_ex import _torch_private
    from npugraph_ex._garbage_collection import rare_collection
    from npugraph_ex.testing.generator.client_operators import client_operators

    torch.set_num_threads(1)  # a process is a core
    stack.enter_context(client_operators())
    stack.enter_context(rare_collection())
    stack.enter_context(_torch_private.unmeasured_guards())


def _answer(
    order: dict[str, Any], settings: CampaignSettings, opened: dict[str, Callable[[int], ItemAnswer]], seen: set[str]
) -> dict[str, Any]:
    kind, before = kind_named(order["kind"]), time.process_time()
    try:
        if "size" in order:
            return {"size": kind.size(settings) if kind.size is not None else None}
        if "shrink" in order:
            return {"script": kind.shrink(settings, order["shrink"]) if kind.shrink is not None else ""}
        if kind.name not in opened:
            opened[kind.name] = kind.opened(settings)
        verdict = opened[kind.name](order["number"])
    except Exception as error:  # noqa: BLE001 - whatever an example raises is its answer
        verdict = ItemAnswer(f"raised {type(error).__name__}: {str(error)[:1500]}")
    new = [feature for feature in dict.fromkeys(verdict.features) if feature not in seen]
    seen.update(new)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "state": "failed" if verdict.message else "skipped" if verdict.skipped else "passed",
        "message": verdict.message or verdict.skipped,
        "label": verdict.label,
        "value": verdict.value,
        "new": new,
        "seconds": round(time.process_time() - before, 4),
        "memory": pages * resource.getpagesize(),
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
