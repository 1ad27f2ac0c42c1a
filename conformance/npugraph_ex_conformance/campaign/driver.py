"""Hands the batches of a campaign to Ray, takes the answers, and loses none.

A batch whose worker does not come back is handed out again. No more batches are under way than the cluster has cores, and one
more for each core to begin with next: that is the back-pressure.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from npugraph_ex.errors import UsageError
from npugraph_ex_conformance.campaign.batches import Batch, batches
from npugraph_ex_conformance.campaign.kinds import kind_named
from npugraph_ex_conformance.campaign.ledger import Ledger, Row
from npugraph_ex_conformance.campaign.summary import causes
from npugraph_ex_conformance.campaign.warm import ask, run_batch
from npugraph_ex_conformance.items import CampaignSettings

_WAITING = 1
"""Batches for each core that wait for it: it goes from one to the next without the driver."""
_LOST = 3
"""A batch that was lost so often is divided; a single item that was has crashed its worker."""
_PATIENCE = 10.0
"""Seconds after which the driver looks for new nodes though no answer has come."""
_SHRUNK = 20
"""So many causes are shrunk."""
_STORE = 100 << 20
"""Bytes of Ray's object store on this machine: answers are a few kilobytes each."""


@dataclass
class Measured:
    """What one run of a campaign took.

    Attributes:
        wall: seconds.
        driver: processor seconds of the driver.
        items: that were answered.
        lost: batches that were handed out again.
        cores: of the cluster, at most.
        nodes: machines that answered.
    """

    wall: float = 0.0
    driver: float = 0.0
    items: int = 0
    lost: int = 0
    cores: int = 0
    nodes: list[str] = field(default_factory=list)


@contextmanager
def cluster(address: str | None, workers: int | None) -> Iterator[str]:
    """Be connected to Ray: to a cluster, or to one of this machine's cores. The value is the dashboard's address, or nothing."""
    import ray

    # Ray's own default, 15, leaves a campaign what other work does not take; --nice says how far it stands back.
    if not address:
        os.environ.setdefault("RAY_worker_niceness", "0")
    kept = {"log_to_driver": False, "logging_level": "ERROR", "ignore_reinit_error": True}
    alone = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": _STORE}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        context = ray.init(**kept, **({"address": address} if address else alone))
    except (ConnectionError, ValueError) as error:
        if not address:
            raise
        why = str(error).partition(". ")[0]
        raise UsageError(
            f"--address: no Ray cluster answers at {address!r} ({why}); `ray status` there says its address"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray's own prints stacks and ends the process
    try:
        yield str(context.dashboard_url or "")
    finally:
        ray.shutdown()


def sizes(settings: CampaignSettings, plan: Mapping[str, int | None]) -> dict[str, int]:
    """How many items of each kind there are: all, where the plan has no number for a kind that has an end."""
    import ray

    remote = ray.remote(ask)
    found: dict[str, int] = {}
    for name, count in plan.items():
        has_end = kind_named(name).size is not None
        whole = ray.get(remote.remote(settings, {"kind": name, "size": True})).get("size") if has_end else None
        if has_end and whole is None:
            raise UsageError(f"how many {name} there are cannot be said here; the process that was asked ended")
        found[name] = min(number for number in (count, whole) if number is not None)
    return found


class Driver:
    """One run of a campaign.

    Args:
        ledger: open; what it has is not run again.
        settings: of the campaign.

    Attributes:
        on_rows: called with rows after they have been written.
        measured: what the run took.
    """

    def __init__(self, ledger: Ledger, settings: CampaignSettings) -> None:
        import ray

        self._ray, self._ledger, self._settings = ray, ledger, settings
        self.on_rows: Callable[[list[Row]], object] = lambda _: None
        self._begun = ledger.rows[-1].at if ledger.rows else 0.0
        self._start = time.monotonic()
        self._running: dict[Any, Batch] = {}
        self._again: deque[Batch] = deque()
        self._asked, self._cores = float("-inf"), 0
        # Retries are the driver's own affair, so that they are counted and an item that ends every worker is known.
        self._task: Any = ray.remote(run_batch).options(max_retries=0)
        self.measured = Measured()

    def run(self) -> Measured:
        """Run all that is left."""
        processor = time.process_time()
        todo = batches(self._ledger.plan, self._ledger.done)
        try:
            while True:
                while len(self._running) < self._room() and (batch := self._next(todo)) is not None:
                    self._running[self._task.remote(self._settings, batch.kind, batch.numbers)] = batch
                if not self._running:
                    break
                ready, _ = self._ray.wait([*self._running], num_returns=1, timeout=_PATIENCE)
                for answer in ready:
                    self._take(answer)
        finally:
            self.measured.wall = time.monotonic() - self._start
            self.measured.driver = time.process_time() - processor
            self._ledger.note(run=asdict(self.measured))
        return self.measured

    def shrink(self) -> None:
        """Make one failure of each cause small, unless that was done before; all at once."""
        done = {line["shrunk"] for line in self._ledger.notes if "shrunk" in line}
        remote, asked = self._ray.remote(ask), []
        for rows in list(causes(self._ledger.rows).values())[:_SHRUNK]:
            row = rows[0]
            if row.state == "failed" and row.item not in done and kind_named(row.kind).shrink is not None:
                asked.append((row, remote.remote(self._settings, {"kind": row.kind, "shrink": row.number})))
        for row, answer in asked:
            self._ledger.note(shrunk=row.item, script=self._ray.get(answer).get("script", ""))

    def _room(self) -> int:
        """How many batches may be under way. The cluster is asked once a second: the question costs more than a batch."""
        if time.monotonic() > self._asked + 1.0:
            self._asked = time.monotonic()
            self._cores = int(self._ray.cluster_resources().get("CPU", 0))
            self.measured.cores = max(self.measured.cores, self._cores)
        return max(self._cores, 1) * (1 + _WAITING)

    def _next(self, todo: Iterator[Batch]) -> Batch | None:
        return self._again.popleft() if self._again else next(todo, None)

    def _take(self, answer: Any) -> None:
        batch = self._running.pop(answer)
        try:
            rows: list[Row] = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            self.measured.lost += 1
            self._lost(replace(batch, lost=batch.lost + 1), error)
            return
        self._keep(rows)

    def _lost(self, batch: Batch, error: Exception) -> None:
        if batch.lost < _LOST:
            self._again.append(batch)
        elif len(batch.numbers) > 1:
            self._again.extend(Batch(batch.kind, (number,)) for number in batch.numbers)
        else:
            why = f"its worker did not come back {_LOST} times: {str(error).splitlines()[0]}"
            self._keep([Row(batch.kind, batch.numbers[0], "crashed", message=why)])

    def _keep(self, rows: list[Row]) -> None:
        at = round(self._begun + time.monotonic() - self._start, 2)
        fresh = self._ledger.add(replace(row, at=at) for row in rows)
        self.measured.items += len(fresh)
        self.measured.nodes = sorted({*self.measured.nodes, *(row.node for row in fresh if row.node)})
        self.on_rows(fresh)
