"""The campaign's kind of steered examples: each item is a search of its own, over the examples of another kind."""

from __future__ import annotations

import pkgutil
import random
from collections.abc import Callable, Hashable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer, ItemKind, KindNamed

if TYPE_CHECKING:
    from npugraph_ex_conformance.steering.points import Points
    from npugraph_ex_conformance.steering.search import SteeredExample

_BASES = {"integers": 240, "integers-dynamic": 120, "near-misses": 120, "replays": 80, "shared-pool": 30, "callers": 20}
"""The kinds whose examples are steered, in turns, and how many of each an item checks: some four seconds of processor time."""
_PACKAGES = ("passes", "fusion", "graph", "aclgraph")
"""Whose conditions are counted."""


@cache
def _modules() -> list[str]:
    names = [f"npugraph_ex.{name}" for name in _PACKAGES]
    found = [module for name in names for module in pkgutil.walk_packages(import_module(name).__path__, f"{name}.")]
    return [module.name for module in found if not module.ispkg]


def _base(number: int) -> str:
    return [*_BASES][number % len(_BASES)]


@cache
def points_of_the_library() -> Points:
    """Compiled once a process, which takes a second."""
    from npugraph_ex_conformance.steering.points import Points

    return Points(_modules())


def search(
    settings: CampaignSettings, number: int, check: Callable[[int], ItemAnswer]
) -> tuple[SteeredExample | None, ItemAnswer]:
    """The first example of an item's search that fails; or none, and all that the search reached."""
    from npugraph_ex_conformance.steering.search import Steering

    points = points_of_the_library()

    def reached(answer: ItemAnswer) -> list[Hashable]:
        return [*points.taken(), *dict.fromkeys(answer.features)]

    chance = random.Random(f"{settings.seed}:steered:{number}")
    steering, base = Steering(check, reached, chance), _base(number)
    with points.counting():
        for example, answer in steering.examples(_BASES[base], first=number * max(_BASES.values())):
            if answer.message:
                return example, answer._replace(label=f"{base}/{example}")
    return None, ItemAnswer(features=sorted(map(str, steering.counts)), label=base)


def again(settings: CampaignSettings, label: str, kind_named: KindNamed) -> tuple[str, str]:
    """What is wrong with a failed example, which its label makes again, and the script of the smallest failure like it."""
    from npugraph_ex_conformance.steering.search import SteeredExample

    base, _, text = label.partition("/")
    kind, example = kind_named(base), SteeredExample.read(text)
    check = kind.opened(settings)
    with example.tape().on():
        message = check(example.number).message
    if not message or kind.shrink is None:
        return message, ""
    with example.tape().on():
        return message, kind.shrink(settings, example.number)


def steered(kind_named: KindNamed) -> ItemKind:
    """The kind of items: each is a search among the examples of another kind."""

    def opened(settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
        of_base = cache(lambda base: kind_named(base).opened(settings))
        return lambda number: search(settings, number, of_base(_base(number)))[1]

    def shrink(settings: CampaignSettings, number: int) -> str:
        example, answer = search(settings, number, kind_named(_base(number)).opened(settings))
        return "" if example is None else again(settings, answer.label, kind_named)[1]

    return ItemKind(
        "steered", f"searches among {', '.join(_BASES)}, steered by what their examples reach", opened, shrink=shrink, batch=1
    )  # fmt: skip
