"""Steered searches beside blind ones: `python -m npugraph_ex_conformance.campaign.steering_gain SECONDS FAULTS`.

First how many conditions integer programs reach, and reach often, in so much processor time. Then which faults they notice: those
by hand that integer programs are to notice, and so many of the passes' systematic ones. Five searches each, every one in a fork of
a warm process. A fault that no first search notices gets no further ones.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

from npugraph_ex.testing import mutant, mutants
from npugraph_ex_conformance.campaign.child import start
from npugraph_ex_conformance.campaign.kinds import kind_named
from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer
from npugraph_ex_conformance.mutation.oracle import all_sites, forked
from npugraph_ex_conformance.mutation.sites import made
from npugraph_ex_conformance.steering.kind import points_of_the_library
from npugraph_ex_conformance.steering.search import CHANGED, Steering
from npugraph_ex_conformance.words import words

_SEEDS, _WARM, _OFTEN = 5, 200, (1, 5, 15)
_SHARES = {"blind": 0, "steered": CHANGED}
_Fault = Callable[[], AbstractContextManager[object]]


def search(check: Callable[[int], ItemAnswer], seconds: float, seed: int, share: int, fault: _Fault) -> str:
    """Examples until one fails, or zero; the processor time; and how many conditions were reached once, five and fifteen times."""
    points, counts = points_of_the_library(), Counter[int]()

    def reached(_: ItemAnswer) -> list[Hashable]:
        taken = points.taken()
        counts.update({point for point, _ in taken})
        return [*taken]

    steering = Steering(check, reached, random.Random(str(seed)), share)
    begin, noticed, spent = time.process_time(), 0, 0.0
    with points.counting(), fault():
        for number, (_, answer) in enumerate(steering.examples(10**9, first=seed * 10**5), 1):
            noticed, spent = number if answer.message else 0, time.process_time() - begin
            if noticed or spent > seconds:
                break
    return json.dumps(
        [noticed, round(spent, 2), *(sum(count >= often for count in counts.values()) for often in _OFTEN)]
    )


def main(seconds: str, faults: str) -> None:
    """Print the medians of what is reached, then a line a fault, and the sums."""
    with ExitStack() as stack:
        settings = CampaignSettings()
        start(settings, stack)
        check = kind_named("integers").opened(settings)
        for number in range(_WARM):  # what runs once a process counts for nobody
            check(10**8 + number)
        points_of_the_library()
        _reach(partial(search, check, float(seconds)))
        named: dict[str, _Fault] = {
            m.name: partial(mutant, m.name) for m in mutants().values() if m.found_by == "exact"
        }
        sites = [site for part, site in all_sites() if part == "passes"][: int(faults)]
        _notice(partial(search, check, float(seconds)), named | {site.name: partial(made, site) for site in sites})


def _reach(searched: Callable[..., str]) -> None:
    for name, share in _SHARES.items():
        rows = [json.loads(forked(partial(searched, seed, share, nullcontext), 600)) for seed in range(_SEEDS)]
        medians = [statistics.median(column) for column in zip(*rows, strict=True)][2:]
        print(
            name,
            *(f"{count:g} conditions {often} times" for count, often in zip(medians, _OFTEN, strict=True)),
            flush=True,
        )


def _notice(searched: Callable[..., str], faults: dict[str, _Fault]) -> None:
    sums = dict.fromkeys(_SHARES, (0, 0, 0.0))
    for fault, switched_on in faults.items():
        found: dict[str, list[list[float]]] = {name: [] for name in _SHARES}
        for seed in range(_SEEDS):
            for name, share in _SHARES.items():
                said = forked(partial(searched, seed, share, switched_on), 600)
                found[name].append(json.loads(said)[:2] if said.startswith("[") else [1, 0.0])
            if not any(rows[-1][0] for rows in found.values()):
                break
        for name, rows in found.items():
            count, noticed, spent = sums[name]
            if any(row[0] for both in found.values() for row in both):
                sums[name] = (
                    count + len(rows),
                    noticed + sum(row[0] > 0 for row in rows),
                    spent + sum(row[1] for row in rows),
                )
        print(fault, found, flush=True)
    for name, (count, noticed, spent) in sums.items():
        print(f"{name}: {noticed} of {count} noticed, in {spent:.0f} s", flush=True)


if __name__ == "__main__":
    seconds = ("seconds", "processor time of a search")
    main(
        *words(
            "npugraph_ex_conformance.campaign.steering_gain",
            __doc__,
            seconds,
            ("faults", "how many of the passes' systematic faults"),
        )
    )
