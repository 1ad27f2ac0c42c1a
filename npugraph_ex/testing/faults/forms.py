"""Faults of what streams are written in: native streams and events, scopes, tagged events, waits for tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npugraph_ex.graph.streams.labels import MAIN, STREAM
from npugraph_ex.testing.faults._patches import answering, doing_nothing, with_result
from npugraph_ex.testing.mutation import Mutant

_NATIVE = "npugraph_ex.frontend.native_streams.streams:_Lowering"
_EVENTS = "npugraph_ex.passes.events:_Lowering"


def _erasing(original: Any) -> Any:
    """The operator goes, and nothing takes its place."""
    del original
    return lambda self, node, *_rest: self.graph.erase_node(node)


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


def _a_tag_each_time(original: Any) -> Any:
    del original
    return lambda self, _number: f"event {next(self.numbers)}"


def _all_on_one(original: Callable[..., Any]) -> Callable[..., Any]:
    def name_streams(self: Any) -> None:
        original(self)
        self.labels.update({number: "one" for number, label in self.labels.items() if label != MAIN})

    return name_streams


def _without_stream(labels: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in labels.items() if key not in {STREAM, "stream_label"}}


def _first_record_only(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait_for_producers(self: Any, node: Any) -> None:
        node.args, node.kwargs = (list(node.args[0])[:1],), {}
        original(self, node)

    return wait_for_producers


MUTANTS = (
    Mutant(
        "native-wait-stream-orders-nothing", "a stream that waits for another begins after it",
        f"{_NATIVE}._order", _ordering_nothing, "forms",
    ),
    Mutant(
        "native-blocks-are-ignored", "what stands in `with torch.npu.stream(s)` runs on s",
        f"{_NATIVE}._enclose", doing_nothing, "forms",
    ),
    Mutant(
        "native-streams-are-one", "two stream objects are two streams",
        f"{_NATIVE}._name_streams", _all_on_one, "forms",
    ),
    Mutant(
        "native-events-never-meet", "a record and a wait of one event object are of one event",
        f"{_NATIVE}._tag", _a_tag_each_time, "forms",
    ),
    Mutant(
        "scopes-lose-their-stream", "what stands in a scope runs on its stream",
        "npugraph_ex.passes.scopes:labels_of", with_result(_without_stream), "forms",
    ),
    Mutant(
        "scopes-are-not-written-back", "a label becomes a scope again before the graph runs",
        "npugraph_ex.passes.scopes:_spelt", answering(()), "forms",
    ),
    Mutant(
        "tagged-waits-are-dropped", "a wait for a tagged event waits for its record",
        f"{_EVENTS}._wait", _erasing, "forms",
    ),
    Mutant(
        "waits-before-records-go-unsaid", "a wait for a tagged event that was not recorded yet is reported",
        f"{_EVENTS}._wait", _without_a_word, "events",
    ),
    Mutant(
        "waits-for-tensors-are-dropped", "a wait for a tensor waits for what computes it",
        f"{_EVENTS}._wait_for_producers", _erasing, "forms",
    ),
    Mutant(
        "waits-for-tensors-see-the-first", "a wait for several tensors waits for all of them",
        f"{_EVENTS}._wait_for_producers", _first_record_only, "forms",
    ),
)  # fmt: skip
