"""Operations that a capture forbids, found before the capture and named with their source line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from npugraph_ex.observe.report import source_line
from npugraph_ex.passes.aliases import tensor_leaves

_HOST_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True)
class Obstacle:
    """One operation that cannot be captured: the node, why, and where the user wrote it."""

    node: str
    reason: str
    source: str

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.node}: {self.reason}" + (f" ({self.source})" if self.source else "")


def find_obstacles(gm: fx.GraphModule) -> list[Obstacle]:
    """Everything in ``gm`` that keeps it from being captured, in graph order."""
    return list(_obstacles(gm))


def _obstacles(gm: fx.GraphModule) -> Iterator[Obstacle]:
    home: torch.device | None = None
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        reason = _reason(node, home)
        if reason:
            yield Obstacle(node.name, reason, source_line(node))
        home = home or next((leaf.device for leaf in tensor_leaves(node) if leaf.device.type == "npu"), None)


def _reason(node: fx.Node, home: torch.device | None) -> str:
    """Why ``node`` keeps the graph from being captured on the device ``home``; empty if it does not."""
    if _HOST_READS & set(getattr(node.target, "tags", ())):
        return "the host has to read its result, or the shape of it, from the device"
    for leaf in tensor_leaves(node):
        if leaf.device.type != "npu":
            return f"a tensor on device {leaf.device.type!r} would be read once, at capture, and never again"
        if home is not None and leaf.device != home:
            return f"it lies on {leaf.device} and the graph began on {home}; a captured graph belongs to one device"
    return ""
