"""Which examples look for a fault: those of its part that run its statement, each time in a fork of a warm process."""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import resource
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer, ItemKind, KindNamed
from npugraph_ex_conformance.mutation.reach import Example, Reach, traced
from npugraph_ex_conformance.mutation.sites import FaultSite, by_chance, chosen, made

_SECONDS = 90
"""Of processor time for all examples of a fault; one that takes more is noticed by that."""
_TRACING = 1800
"""Of processor time for the examples of a part, once a process: who runs which line."""


@dataclass(frozen=True)
class MutationTarget:
    """A part of the code, and what looks at it.

    Attributes:
        packages: whose modules get faults.
        count: how many faults.
        kinds: of campaign items that may look for them, and how many of each; the cheapest first.
    """

    packages: tuple[str, ...]
    count: int
    kinds: tuple[tuple[str, int], ...]


_CAPTURE = (
    ("replays", 60), ("callers", 30), ("random-numbers", 12), ("updates", 12), ("shared-pool", 12), ("cache", 6),
    ("compiled", 20), ("undeclared-effects", 40), ("static-kernels", 20), ("idioms", 40), ("side-streams", 12), ("forms", 12),
    ("collectives", 24),
)  # fmt: skip
_FUSION = (("near-misses", 192), ("planted", 96), ("user-rules", 48), ("literals", 32), ("collectives", 24))
_PASSES = (
    ("integers", 200), ("integers-dynamic", 120), ("near-misses", 40), ("planted", 40), ("streams", 25), ("parts", 36),
    ("user-rules", 12), ("callers", 20), ("idioms", 40), ("side-streams", 12), ("forms", 12),
    ("wrong-passes", 400), ("collectives", 60), ("racy-parts", 24), ("nested-regions", 60),
)  # fmt: skip
_STREAMS = (
    ("streams", 25), ("stream-graphs", 400), ("forms", 12), ("parts", 24), ("racy-parts", 120), ("events", 60),
)  # fmt: skip
_DEVICE = (
    ("fidelity", 157), ("device-programs", 120), ("device-settings", 120), ("pytest-projects", 120), ("replays", 30),
    ("streams", 25), ("stream-graphs", 200), ("forms", 12),
)  # fmt: skip
TARGETS: Mapping[str, MutationTarget] = MappingProxyType(
    {
        "saving": MutationTarget(("npugraph_ex.saving",), 80, (("saved-graphs", 60), ("cache", 12), ("callers", 60))),
        "lifting": MutationTarget(
            ("npugraph_ex.lifting",), 100, (("spellings-in-turn", 624), ("joined-parameters", 60))
        ),
        "matcher": MutationTarget(("npugraph_ex.fusion",), 180, _FUSION),
        "streams": MutationTarget(("npugraph_ex.stream_check",), 120, _STREAMS),
        "passes": MutationTarget(("npugraph_ex.passes",), 180, _PASSES),
        "graph facts": MutationTarget(("npugraph_ex.graph",), 180, _PASSES),
        "capture": MutationTarget(("npugraph_ex.aclgraph",), 220, _CAPTURE),
        "emulator": MutationTarget(("npu_emulator",), 100, _DEVICE),
    }
)
_LEFT_OUT = tuple(f"npu_emulator.{name}" for name in ("__main__", "kernels", "compilation", "build", "dynamo"))
"""Start-up, and formulas, which the kind `operators` checks."""


@cache
def all_sites() -> tuple[tuple[str, FaultSite], ...]:
    """Every fault that is looked for, with its part: part by part, because each costs a trace; in a part by chance."""
    every = [(part, sorted(chosen(_modules(part), target.count), key=by_chance)) for part, target in TARGETS.items()]
    return tuple((part, site) for part, of_part in every for site in of_part)


@cache
def _modules(part: str) -> list[str]:
    packages = [(import_module(name).__path__, f"{name}.") for name in TARGETS[part].packages]
    found = [module for path, prefix in packages for module in pkgutil.walk_packages(path, prefix)]
    return [module.name for module in found if not module.ispkg and not module.name.startswith(_LEFT_OUT)]


def _opened(settings: CampaignSettings, kind_named: KindNamed) -> Callable[[int], ItemAnswer]:
    sites = all_sites()
    opened: dict[str, Callable[[int], ItemAnswer]] = {}
    reach: dict[tuple[tuple[str, int], ...], Reach] = {}

    def look(number: int) -> ItemAnswer:
        part, site = sites[number]
        kinds = TARGETS[part].kinds
        for kind, _ in kinds:
            if kind not in opened:
                opened[kind] = kind_named(kind).opened(settings)
        if kinds not in reach:
            reach[kinds] = _reach(kinds, opened)
        examples = reach[kinds].of(site)
        value = {"part": part, "by": "", "examples": len(examples), "fault": [*site.identity]}
        if not examples:
            return ItemAnswer("no example runs it", label=site.name, value=value)
        try:
            with made(site):  # the fork has it, too
                value["by"] = forked(lambda: _noticed(examples, opened), _SECONDS)[:200]
        except LookupError as error:
            return ItemAnswer(label=site.name, skipped=str(error))
        return ItemAnswer("" if value["by"] else "survives", label=site.name, value=value)

    return look


def _reach(kinds: tuple[tuple[str, int], ...], opened: Mapping[str, Callable[[int], ItemAnswer]]) -> Reach:
    """Who runs which line of the parts with these examples: they run once, traced, in a fork. One that fails looks for no fault.

    Raises:
        RuntimeError: the fork ended without an answer.
    """
    examples = [(kind, number) for kind, count in kinds for number in range(count)]
    parts = [part for part, target in TARGETS.items() if target.kinds == kinds]
    modules = [module for part in parts for module in _modules(part)]

    def trace() -> str:
        return json.dumps(traced(modules, examples, lambda example: _message(example, opened)))

    said = forked(trace, _TRACING)
    try:
        right, lines = json.loads(said)
    except ValueError:
        raise RuntimeError(f"the examples of {', '.join(parts)} could not be traced: {said[:500]}") from None
    whole = {module: {int(line): who for line, who in of.items()} for module, of in lines.items()}
    return Reach([(kind, number) for kind, number in right], whole)


def _noticed(examples: Iterable[Example], opened: Mapping[str, Callable[[int], ItemAnswer]]) -> str:
    """Which example is the first to fail, and how; empty when none is."""
    return next(
        (f"{kind}/{number}: {said}" for kind, number in examples if (said := _message((kind, number), opened))), ""
    )


def _message(example: Example, opened: Mapping[str, Callable[[int], ItemAnswer]]) -> str:
    """What an example finds wrong; an exception is wrong, too."""
    kind, number = example
    try:
        return opened[kind](number).message
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the program raise
        return f"raised {type(error).__name__}: {error}"


def forked(action: Callable[[], str], seconds: int) -> str:
    """What an action says in a fork of this process, of which nothing remains; how the fork ended if it says nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        logging.disable(logging.CRITICAL)
        try:
            said = action()
        except BaseException as error:  # noqa: BLE001 - whatever a fault makes the program raise
            said = f"{type(error).__name__}: {error}"
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(said).encode())
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


def systematic_mutants(kind_named: KindNamed) -> ItemKind:
    """The kind of items: each is a fault, which the examples of other kinds look for."""
    return ItemKind(
        "systematic-mutants", "small faults made by rule all over the library: does the suite notice?",
        lambda settings: _opened(settings, kind_named),
        size=lambda _: len(all_sites()), batch=4, processor=_TRACING + 2 * _SECONDS,
    )  # fmt: skip
