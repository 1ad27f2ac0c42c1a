"""Puts independent work on a side stream where the modelled clock says that it pays: the option `auto_streams`.

A *window* is a sequence of kernels, one after the other in the graph, that only compute: nothing writes, draws, communicates,
or answers the host. In it, kernels that depend on each other form *branches*, and branches are independent of each other. The
pass divides a window's branches between the main stream and one side stream. The side stream begins after the work before
the window, and the main stream waits for it at the window's end. Nothing moves in the list of nodes.

The kernels between fork and join take as long as the longer of the two sides. The time won is what the other side takes, less
that of the two events. Windows do not overlap, so the gains of a graph's windows add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import fx

from npugraph_ex.graph.effects import draws_random_numbers, has_effect
from npugraph_ex.graph.memory.lifetimes import result_bytes
from npugraph_ex.graph.operators import keeps_the_storage, tensor_leaves
from npugraph_ex.graph.source import source_line
from npugraph_ex.graph.streams.events import MAIN, computes, insert_record, insert_wait, orders_streams, stream_of
from npugraph_ex.graph.undeclared import is_foreign
from npugraph_ex.passes.base import PassContext
from npugraph_ex.report.passes import Branch

SIDE = "auto"
"""The label of the side stream. A graph with streams of its own is left alone, so no other stream has it."""
START_US = 2.0
"""Microseconds to start a task, as the modelled clock has them."""
EVENTS_US = 4 * START_US
"""What a fork and a join cost: two records and two waits, each taken as a task that only starts."""
MARGIN = 1.25
"""What both sides of a window must take, at least: so many times the cost of the events."""
LONGEST = 64
"""The most kernels in a window, so that the search takes time in proportion to the graph."""

_ANSWERS_THE_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _Window(NamedTuple):
    """Kernels from `first` up to `end`, by position, those for the side stream among them, and the time won."""

    first: int
    end: int
    side: tuple[int, ...]
    gain: float


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Put branches of `gm.graph` on a side stream, and report them."""
    graph, price = gm.graph, context.price or (lambda _: START_US)
    if any(stream_of(node) != MAIN or orders_streams(node) for node in graph.nodes):
        return
    kernels = [node for node in graph.nodes if computes(node)]
    for window in _chosen(_WindowSearch(graph, kernels, price)):
        _fork_and_join(graph, kernels, window)
        side = [kernels[place] for place in window.side]
        context.report.add_branch(
            Branch(
                tuple(node.name for node in side),
                kernels[window.first].name,
                kernels[window.end].name if window.end < len(kernels) else "output",
                round(window.gain, 2),
                sum(map(result_bytes, side)),
                source_line(side[0]),
            )
        )


def _only_computes(node: fx.Node) -> bool:
    """Whether a kernel may run beside others: all that it does is its result, which no other process and no host waits for."""
    target, known = node.target, (node, *node.all_input_nodes)
    devices = {leaf.device for part in known for leaf in tensor_leaves(part)}
    return (
        isinstance(target, torch._ops.OpOverload)
        and [device.type for device in devices] == ["npu"]  # what the host computes or reads stays in its place
        and not is_foreign(target)
        and not has_effect(node)
        and not draws_random_numbers(node)
        and not keeps_the_storage(node)  # it copies bytes beyond its argument
        and not any(tag in target.tags for tag in _ANSWERS_THE_HOST)
        and "float_status" not in str(target)  # that of all streams
        and "core_limit" not in node.meta  # who divides the cores has divided the work
    )


class _WindowSearch:
    """The windows of a graph.

    Args:
        graph: without streams.
        kernels: its nodes that start work, in order.
        price: the modelled microseconds of a node.
    """

    def __init__(self, graph: fx.Graph, kernels: list[fx.Node], price: Callable[[fx.Node], float]) -> None:
        self.length = len(kernels)
        self._stays = [not _only_computes(node) for node in kernels]
        self._prices = [0.0 if stays else price(node) for stays, node in zip(self._stays, kernels, strict=True)]
        places = {node: place for place, node in enumerate(kernels)}
        lies_in: dict[fx.Node, frozenset[int]] = {}  # the kernels whose results a value is, or is a view of
        self._needs: list[frozenset[int]] = []
        for node in graph.nodes:
            needed = frozenset().union(*(lies_in[source] for source in node.all_input_nodes))
            if node in places:
                self._needs.append(needed)
            lies_in[node] = frozenset((places[node],)) if node in places else needed
        used = [0] * self.length
        for place in (place for needed in self._needs for place in needed):
            used[place] += 1
        # Elsewhere the kernel before could be the first one of the same branch.
        self._starts = [
            place
            for place in range(self.length)
            if not self._stays[place]
            and (place == 0 or self._stays[place - 1] or used[place - 1] > 1 or place - 1 not in self._needs[place])
        ]

    def windows(self) -> Iterator[_Window]:
        """Those that pay. Each begins where a branch does, and ends before a kernel that needs several branches."""
        for first in self._starts:
            branches: dict[int, list[int]] = {}  # by the first kernel of each
            branch_of: dict[int, int] = {}
            for place in range(first, min(first + LONGEST, self.length) + 1):
                over = place == self.length or self._stays[place]
                joined = () if over else sorted({branch_of[need] for need in self._needs[place] if need >= first})
                if (over or len(joined) > 1) and len(branches) > 1:
                    side, gain = self._divided(list(branches.values()))
                    if side:
                        yield _Window(first, place, side, gain)
                if over:
                    break
                name = joined[0] if joined else place
                for other in joined[1:]:
                    branch_of.update(dict.fromkeys(branches[other], name))
                    branches[name] += branches.pop(other)
                branches.setdefault(name, []).append(place)
                branch_of[place] = name

    def _divided(self, branches: list[list[int]]) -> tuple[tuple[int, ...], float]:
        """The kernels for the side stream and the time won; none if it does not pay. The longest branches are placed first."""
        timed = [(sum(self._prices[place] for place in branch), branch) for branch in branches]
        shorter, longer = (0.0, list[int]()), (0.0, list[int]())
        for time, branch in sorted(timed, key=lambda one: -one[0]):
            shorter = (shorter[0] + time, shorter[1] + branch)
            shorter, longer = sorted((shorter, longer), key=lambda one: one[0])
        time, side = shorter
        return (tuple(sorted(side)), time - EVENTS_US) if time > MARGIN * EVENTS_US else ((), 0.0)


def _chosen(search: _WindowSearch) -> list[_Window]:
    """Windows that do not overlap and together win the most."""
    ending: dict[int, list[_Window]] = {}
    for window in search.windows():
        ending.setdefault(window.end, []).append(window)
    best: list[tuple[float, _Window | None]] = [
        (0.0, None)
    ]  # by position: the most to win up to it, and the last window
    for end in range(1, search.length + 1):
        best.append((best[-1][0], None))
        for window in ending.get(end, ()):
            won = best[window.first][0] + window.gain
            if won > best[end][0]:
                best[end] = (won, window)
    found: list[_Window] = []
    end = search.length
    while end > 0:
        last = best[end][1]
        found += [] if last is None else [last]
        end = end - 1 if last is None else last.first
    return found[::-1]


def _fork_and_join(graph: fx.Graph, kernels: list[fx.Node], window: _Window) -> None:
    """Label one window's side, and insert its events."""
    side = [kernels[place] for place in window.side]
    for node in side:
        node.meta["stream_label"] = SIDE
    fork = insert_record(graph, kernels[window.first].prev, MAIN)
    insert_wait(graph, side[0], SIDE, [fork])
    join = insert_record(graph, side[-1], SIDE)
    after = kernels[window.end] if window.end < len(kernels) else graph.output_node()
    insert_wait(graph, after, MAIN, [join])
