"""Faults of what is known and done about streams: the order, the race check, forks, joins, lifetimes, dropped events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npugraph_ex.testing.faults._patches import answering, doing_nothing
from npugraph_ex.testing.mutation import Mutant

_WALK = "npugraph_ex.stream_check.analysis:_Walk"
_CLOCKS = "npugraph_ex.graph.streams.order:Clocks"
_CLOSURE = "npugraph_ex.passes.event_closure"


def _reads_after_writes_only(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: bool(original(self, other)) and not other.writes


def _reads_harmless(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: bool(original(self, other)) and self.writes and other.writes


def _direct_knowledge(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wait tells of one stream only."""

    def learn(self: Any, stream: str, clock: Any) -> None:
        latest = max(clock.items(), key=lambda item: item[1], default=None)
        original(self, stream, {} if latest is None else dict([latest]))

    return learn


def _at_the_output(original: Any) -> Any:
    del original
    return lambda graph: next(iter(graph.find_nodes(op="output")))


def _nothing_needed(original: Callable[..., Any]) -> Callable[..., Any]:
    def over(self: Any, graph: Any) -> None:
        original(self, graph)
        self.needed.clear()

    return over


MUTANTS = (
    Mutant(
        "races-of-reads-only", "a write may not overtake an earlier read",
        "npugraph_ex.stream_check.accesses:Touch.conflicts", _reads_after_writes_only, "streams",
    ),
    Mutant(
        "races-of-writes-only", "a read may not overtake an earlier write",
        "npugraph_ex.stream_check.accesses:Touch.conflicts", _reads_harmless, "streams",
    ),
    Mutant(
        "races-never", "two accesses to the same bytes, one of them a write, need an order",
        f"{_WALK}._races", doing_nothing, "streams",
    ),
    Mutant(
        "races-of-whole-regions", "bytes that are interleaved and disjoint do not conflict",
        "npugraph_ex.stream_check.accesses:share_no_byte", answering(answer=False), "streams",
    ),
    Mutant(
        "races-of-no-bytes", "bytes that two strided views share conflict",
        "npugraph_ex.stream_check.accesses:share_no_byte", answering(answer=True), "streams",
    ),
    Mutant(
        "check-ignores-the-end", "every stream is joined before the graph ends",
        f"{_WALK}._end", doing_nothing, "streams",
    ),
    Mutant(
        "check-ignores-forks", "a stream's work belongs to the graph",
        f"{_WALK}._never_forked", doing_nothing, "streams",
    ),
    Mutant(
        "check-ignores-reuse", "memory freed on one stream is not reused while another still uses it",
        f"{_WALK}._reused", doing_nothing, "streams",
    ),
    Mutant(
        "clocks-know-everything", "what is not ordered is not known to be over",
        f"{_CLOCKS}.knows", answering(answer=True), "streams",
    ),
    Mutant(
        "clocks-learn-nothing", "a wait orders",
        f"{_CLOCKS}.learn", doing_nothing, "streams",
    ),
    Mutant(
        "clocks-are-not-transitive", "order follows through a third stream",
        f"{_CLOCKS}.learn", _direct_knowledge, "streams",
    ),
    Mutant(
        "closure-does-not-fork", "a side stream waits for what stands before it",
        f"{_CLOSURE}:_fork", doing_nothing, "streams",
    ),
    Mutant(
        "closure-does-not-join", "the main stream waits for all others in the end",
        f"{_CLOSURE}:_join", doing_nothing, "streams",
    ),
    Mutant(
        "closure-joins-after-write-back", "the join comes before written inputs are written back",
        f"{_CLOSURE}:epilogue", _at_the_output, "streams",
    ),
    Mutant(
        "redundancy-drops-every-event", "an event that orders something stays",
        "npugraph_ex.passes.redundant_events:_Walk.over", _nothing_needed, "streams",
    ),
    Mutant(
        "lifetimes-are-not-lengthened", "memory lives until every stream is through with it",
        "npugraph_ex.passes.lifetimes:_protect", doing_nothing, "streams",
    ),
    Mutant(
        "lifetimes-trust-any-order", "memory is safe only behind a proven order",
        "npugraph_ex.graph.streams.order:Order.proves", answering(answer=True), "streams",
    ),
)  # fmt: skip
