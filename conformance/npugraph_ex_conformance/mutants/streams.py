"""Faults of streams: native streams, scopes and tagged events; the race check, joins and lifetimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npugraph_ex.graph.streams.labels import MAIN, STREAM
from npugraph_ex.passes.auto_streams import SIDE
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering, doing_nothing, with_result

_WALK = "npugraph_ex.stream_check.analysis:_StreamAnalysis"
_CLOSURE = "npugraph_ex.passes.event_closure"
_SIDE = "npugraph_ex.passes.auto_streams"
_NATIVE = "npugraph_ex.frontend.native_streams.streams:_NativeLowering"
_EVENTS = "npugraph_ex.passes.events:_Lowering"


def _at_the_output(original: Any) -> Any:
    del original
    return lambda graph: next(iter(graph.find_nodes(op="output")))


def _ordering_nothing(original: Any) -> Any:
    del original
    return lambda self, node, _first, _then: self._replace(node, [])


def _without_a_word(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wait that finds no record goes, and nobody is told."""

    def wait(self: Any, node: Any) -> None:
        if self._event(node).record is None:
            self.graph.erase_node(node)
        else:
            original(self, node)

    return wait


def _without_stream(labels: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in labels.items() if key not in {STREAM, "stream_label"}}


def _never_on(label: str) -> Callable[[Any], Any]:
    """Waits that a stream does not get."""

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def insert(graph: Any, before: Any, stream: str, records: Any) -> Any:
            return None if stream == label else original(graph, before, stream, records)

        return insert

    return replacement


MUTANTS = (
    Mutant(
        "races-of-whole-regions", "bytes that are interleaved and disjoint do not conflict",
        "npugraph_ex.stream_check.accesses:share_no_byte", answering(answer=False), "streams",
    ),
    Mutant(
        "check-forgets-what-it-met", "a later use of memory stands for an earlier one only if it covers it",
        "npugraph_ex.stream_check.accesses:Touch._includes", answering(answer=True), "stream graphs",
    ),
    Mutant(
        "functional-writes-are-not-ordered", "writes whose functional forms depend on each other are ordered",
        "npugraph_ex.stream_check.analysis:_StreamAnalysis._made_dependent", doing_nothing, "parts",
    ),
    Mutant(
        "functional-writes-are-races", "streams may write disjoint parts of one buffer",
        "npugraph_ex.stream_check.restored:Restored.__bool__", answering(answer=False), "racy parts",
    ),
    Mutant(
        "check-ignores-reuse", "memory freed on one stream is not reused while another still uses it",
        f"{_WALK}._reused", doing_nothing, "streams",
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
        "lifetimes-are-not-lengthened", "memory lives until every stream has finished with it",
        "npugraph_ex.passes.lifetimes:_protect", doing_nothing, "streams",
    ),
    Mutant(
        "side-stream-is-not-awaited", "the main stream waits for a branch before it reads the branch's results",
        f"{_SIDE}:insert_wait", _never_on(MAIN), "side streams",
    ),
    Mutant(
        "side-stream-begins-at-once", "a branch begins after the work whose results it reads",
        f"{_SIDE}:insert_wait", _never_on(SIDE), "side streams",
    ),
    Mutant(
        "side-stream-takes-writes", "what writes memory runs beside nothing",
        f"{_SIDE}:has_effect", answering(answer=False), "side streams",
    ),
    Mutant(
        "native-wait-stream-orders-nothing", "a stream that waits for another begins after it",
        f"{_NATIVE}._order", _ordering_nothing, "forms",
    ),
    Mutant(
        "scopes-lose-their-stream", "an operator in a scope runs on the stream of the scope",
        "npugraph_ex.passes.scopes:labels_of", with_result(_without_stream), "forms",
    ),
    Mutant(
        "waits-before-records-go-unsaid", "a wait for a tagged event that was not recorded yet is reported",
        f"{_EVENTS}._wait", _without_a_word, "events",
    ),
)  # fmt: skip
