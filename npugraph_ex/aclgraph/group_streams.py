"""Orders a replay with the other work of its groups of processes.

torch_npu runs all collectives of a group on one stream of the group's, so that all ranks meet in the order of the calls. A replay
runs its collectives elsewhere. So it waits for what the group began before, which the program may not have awaited yet, and
what the group begins later waits for the replay.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.aclgraph import _npu_private
from npugraph_ex.graph.collectives import sequence


class GroupStreams:
    """The streams of the groups in which a captured graph communicates; none for most graphs.

    Args:
        graph: captured already, so that its groups have their streams.
        device: of the graph, its number.
    """

    def __init__(self, graph: fx.Graph, device: int) -> None:
        names = dict.fromkeys(group for _, group in sequence(graph))
        self._streams = [stream for name in names for stream in _npu_private.group_streams(name, device)]
        self._device = device

    def __bool__(self) -> bool:
        return bool(self._streams)

    def hold_back_replay(self) -> None:
        """Make the current stream wait for all that the groups began."""
        current = torch.npu.current_stream(self._device)
        for stream in self._streams:
            current.wait_stream(stream)

    def follow_replay(self) -> None:
        """Make the groups' streams wait for the current stream."""
        current = torch.npu.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(current)
