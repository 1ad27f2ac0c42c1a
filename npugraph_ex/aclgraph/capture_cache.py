"""`CaptureCache`: the captures of one compiled graph by graph key, and why a call needs a new capture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from npugraph_ex.aclgraph.capture_pool import CapturePool
from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.errors import address_of
from npugraph_ex.observe.logger import logger


class GraphKey(NamedTuple):
    """The values that select the captures for a call.

    Attributes:
        numbers: sizes, scalars, storage offsets, and the scopes in force.
        addresses: the addresses of the inputs that the graph uses in place.
    """

    numbers: tuple[Any, ...]
    addresses: tuple[int, ...]


class KeyRunner(Protocol):
    """Runs the calls of one graph key."""

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run with ``inputs`` and return the results."""


class CaptureCache:
    """Captures for at most `capture_limit` keys. A new key replaces the least recently used one.

    Args:
        plan: has the names of the inputs, for the reasons.
        limit: the largest number of keys.
        pool: takes the captures that are dropped.

    Attributes:
        epoch: how often captures were dropped.
    """

    def __init__(self, plan: InputPlan, limit: int, pool: CapturePool) -> None:
        self._plan = plan
        self._limit = limit
        self._pool = pool
        self._runners: OrderedDict[GraphKey, KeyRunner] = OrderedDict()
        self._has_warned = False
        self.epoch = 0
        self._why_empty = "the first call"

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._runners)

    def __reversed__(self) -> Iterator[GraphKey]:
        """The keys, the most recently used first."""
        return reversed(self._runners)

    def get(self, key: GraphKey) -> KeyRunner | None:
        """The runner of ``key``, or None. The key becomes the most recently used one."""
        runner = self._runners.get(key)
        if runner is not None:
            self._runners.move_to_end(key)
        return runner

    def add(self, key: GraphKey, make: Callable[[str], KeyRunner]) -> KeyRunner:
        """Add a key, or replace the captures that it has.

        Args:
            key: the key.
            make: makes the key's runner; its argument is the reason for the capture.
        """
        known = self._runners.pop(key, None)
        reason = self._reason(key) if known is None else "the option force_recapture"
        if known is not None:
            self.epoch += 1
            self._pool.retire([known])
        elif len(self._runners) >= self._limit:
            self._drop_oldest(reason)
        self._runners[key] = runner = make(reason)
        return runner

    def clear(self, why: str = "") -> int:
        """Drop all captures, for a reason that the next one names; return how many keys had captures."""
        count = len(self._runners)
        self._pool.retire(self._runners.values())
        self._runners.clear()
        self.epoch += 1
        self._why_empty = (why or "invalidate() having dropped the earlier graphs") if count else self._why_empty
        return count

    def _drop_oldest(self, reason: str) -> None:
        self.epoch += 1
        self._pool.retire([self._runners.popitem(last=False)[1]])
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "capture_limit=%d graphs are captured; the least recently used is dropped for each new one (%s)\n%s",
                self._limit,
                reason,
                address_of("capture_limit"),
            )

    def _reason(self, key: GraphKey) -> str:
        """Why no known key serves a call. If only addresses differ, it names the inputs that moved."""
        if not self._runners:
            return self._why_empty
        moved = [self._moved(key, known) for known in self._runners if known.numbers == key.numbers]
        if moved:
            fewest = min(moved, key=len)
            return f"a new address of {', '.join(fewest)}"
        others = [known.numbers for known in self._runners if len(known.numbers) == len(key.numbers)]
        changed = [[new for new, old in zip(key.numbers, other, strict=True) if new != old] for other in others]
        return f"new sizes or scalars {tuple(dict.fromkeys(min(changed, key=len, default=key.numbers)))}"

    def _moved(self, key: GraphKey, known: GraphKey) -> list[str]:
        """The names of the inputs whose addresses differ."""
        addresses = zip(self._plan.in_place, key.addresses, known.addresses, strict=True)
        return [self._plan.names[position] for position, new, old in addresses if new != old]
