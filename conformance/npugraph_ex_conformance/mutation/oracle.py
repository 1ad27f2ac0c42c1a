"""Which examples look for a fault, by the package that has it; each fault is looked for in a fork of a warm process."""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from npugraph_ex_conformance.campaign.items import CampaignSettings, ItemAnswer, ItemKind, kind_named
from npugraph_ex_conformance.mutation.sites import FaultSite, by_chance, chosen, made

_SECONDS = 90
"""Of processor time for all examples of a fault; one that takes more is noticed by that."""


@dataclass(frozen=True)
class MutationTarget:
    """A part of the code, and what looks at it.

    Attributes:
        packages: whose modules get faults.
        count: how many faults.
        kinds: of campaign items that look for them, and how many of each; the cheapest first.
    """

    packages: tuple[str, ...]
    count: int
    kinds: tuple[tuple[str, int], ...]


_CAPTURE = (("replays", 30), ("random-numbers", 4), ("updates", 4), ("shared-pool", 4), ("callers", 8), ("cache", 3))
_FUSION = (("near-misses", 32), ("planted", 24), ("user-rules", 12), ("literals", 8))
_PASSES = (("integers", 40), ("near-misses", 16), ("planted", 16), ("parts", 4), ("streams", 12), ("user-rules", 6))
TARGETS: Mapping[str, MutationTarget] = MappingProxyType(
    {
        "passes": MutationTarget(("npugraph_ex.passes",), 180, _PASSES),
        "matcher": MutationTarget(("npugraph_ex.fusion",), 180, _FUSION),
        "graph facts": MutationTarget(("npugraph_ex.graph",), 180, (*_PASSES[:2], ("streams", 24), ("parts", 4))),
        "streams": MutationTarget(("npugraph_ex.stream_check",), 120, (("streams", 60), ("forms", 6), ("parts", 6))),
        "capture": MutationTarget(("npugraph_ex.aclgraph",), 220, _CAPTURE),
        "saving": MutationTarget(("npugraph_ex.saving",), 80, (("cache", 10),)),
        "lifting": MutationTarget(("npugraph_ex.lifting",), 100, (("spellings", 40),)),
        "emulator": MutationTarget(("npu_emulator",), 100, (("fidelity", 155), ("replays", 8))),
    }
)
_LEFT_OUT = tuple(f"npu_emulator.{name}" for name in ("__main__", "kernels", "compilation", "build", "dynamo"))
"""Start-up, and formulas, which the kind `operators` checks."""


@cache
def all_sites() -> tuple[tuple[str, FaultSite], ...]:
    """Every fault that is looked for, with its part; in an order by chance, so that the first hundred say something of all."""
    every = [(part, site) for part, target in TARGETS.items() for site in chosen(list(_modules(target)), target.count)]
    return tuple(sorted(every, key=lambda pair: by_chance(pair[1])))


def _modules(target: MutationTarget) -> Iterator[str]:
    for package in target.packages:
        for found in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
            if not found.name.startswith(_LEFT_OUT) and not found.ispkg:
                yield found.name


def _opened(settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
    sites = all_sites()
    opened: dict[str, Callable[[int], ItemAnswer]] = {}

    def look(number: int) -> ItemAnswer:
        part, site = sites[number]
        for kind, _ in TARGETS[part].kinds:
            if kind not in opened:
                opened[kind] = _opened_kind(kind, settings)
        try:
            with made(site):  # the fork has it, too
                found = _forked(lambda: _noticed(part, opened))
        except LookupError as error:
            return ItemAnswer(label=site.name, skipped=str(error))
        kind, _, rest = found.partition("/")
        example = rest.partition(":")[0]
        if kind in opened and (alone := _forked(lambda: opened[kind](int(example)).message)):
            return ItemAnswer(f"{kind}/{example} fails without any fault: {alone}", label=site.name)
        value = {"part": part, "by": found[:200]}
        return ItemAnswer("" if found else "survives", label=site.name, value=value)

    return look


def _opened_kind(kind: str, settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
    return kind_named(kind).opened(settings)


def _noticed(part: str, opened: Mapping[str, Callable[[int], ItemAnswer]]) -> str:
    """Which example is the first to fail, and how; empty when none is."""
    for kind, count in TARGETS[part].kinds:
        for number in range(count):
            try:
                message = opened[kind](number).message
            except Exception as error:  # noqa: BLE001 - whatever a fault makes the program raise
                message = f"raised {type(error).__name__}: {error}"
            if message:
                return f"{kind}/{number}: {message}"
    return ""


def _forked(action: Callable[[], str]) -> str:
    """What an action says in a fork of this process, of which nothing remains; how the fork ended if it says nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 5))
        logging.disable(logging.CRITICAL)
        try:
            said = action()
        except BaseException as error:  # noqa: BLE001 - whatever a fault makes the program raise
            said = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(said[:2000]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        said_there: Any = json.loads(text)
        return str(said_there)
    return (
        f"the process dies of {signal.Signals(os.WTERMSIG(status)).name}"
        if os.WIFSIGNALED(status)
        else "the process ends"
    )


SYSTEMATIC = ItemKind(
    "systematic-mutants", "small faults made by rule all over the library: does the suite notice?", _opened,
    size=lambda _: len(all_sites()), batch=4, processor=2 * _SECONDS,
)  # fmt: skip
