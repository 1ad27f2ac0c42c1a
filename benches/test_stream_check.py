"""What the stream check costs: a graph of 2,000 nodes on 8 streams, how the time grows, and what findings add.

Times are of the processor, so that a busy machine changes little. The gates are ratios, but for the one promise that was
made in milliseconds; that is why nothing here runs in CI.
"""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest
import torch
from measured_tables import Table
from torch import fx

from npugraph_ex.stream_check.analysis import analyse
from npugraph_ex.testing.streams.builder import StreamBuilder

NODES, STREAMS = 2000, 8
PROMISED = 0.2
"""Seconds in which a graph of that size is analysed."""

aten = torch.ops.aten


def stream_graph(nodes: int, *, clean: bool) -> fx.Graph:
    """A graph in layers: the main stream forks seven others, each computes a chain, and the main stream adds them up.

    Args:
        nodes: how many nodes, events included; a few more to end the last layer.
        clean: every fork and join is there; otherwise one in three is left out, but for the first fork and the last join.
    """
    rng, b = random.Random(0), StreamBuilder()
    sides = [f"s{number}" for number in range(1, STREAMS)]
    total = b.input(64, 64)
    b.fork(*sides)
    while len(b) < nodes:
        ends = [_chain(b, stream, total) for stream in ["", *sides]]
        b.join(*(stream for stream in sides if clean or rng.random() < 2 / 3))
        for end in ends:
            total = b.call(aten.add.Tensor, total, end)
        b.fork(*(stream for stream in sides if clean or rng.random() < 2 / 3))
    b.join(*sides)
    return b.finish(total).graph


def _chain(b: StreamBuilder, stream: str, value: fx.Node) -> fx.Node:
    """Seven operators, one of them in place, on one stream."""
    with b.on(stream):
        for _ in range(6):
            value = b.call(aten.mul.Tensor, value, 3)
        b.call(aten.add_.Tensor, b.call(aten.slice.Tensor, value, 0, 0, 32), 1)
    return value


def seconds(graph: fx.Graph, rounds: int = 5) -> tuple[float, Any]:
    """The least processor time of several analyses, and what they found."""
    times, found = [], None
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        found = analyse(graph)
        times.append(time.process_time() - start)
    return min(times), found


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "racy"])
def test_grows_linearly(clean: bool, table: Table) -> None:
    """Four times the nodes, with or without findings, cost at most six times the time."""
    small, _ = seconds(stream_graph(NODES // 4, clean=clean))
    large, found = seconds(stream_graph(NODES, clean=clean))
    figures = {f"{NODES // 4} nodes": small * 1e3, f"{NODES} nodes": large * 1e3, "times": large / small}
    graph = "clean" if clean else "racy"
    table("the stream check, ms of processor time", graph=graph, streams=STREAMS, findings=len(found), **figures)
    assert bool(found.errors) != clean
    assert large < PROMISED
    assert large <= 6 * small


def test_costs_little_beside_making_the_graph(table: Table) -> None:
    """The check of a graph takes at most a third of the time that fake execution needed to make its metadata."""
    start = time.process_time()
    graph = stream_graph(NODES, clean=False)
    making = time.process_time() - start
    checking, _ = seconds(graph)
    table("the stream check beside making the graph, ms", making=making * 1e3, checking=checking * 1e3)
    assert checking <= making / 3
