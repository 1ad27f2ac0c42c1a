"""Dynamo's form of `Tensor.record_stream`."""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch_npu 2.12 traces `record_stream` as torch's operator; before, as a function that a backend has to replace.",
    since=(2, 12),
    old=("torch.npu.fake_record_stream",),
    test="conformance/npugraph_ex_conformance/tests/test_streams.py",
)


def as_operators(graph: fx.Graph) -> None:
    """Replace each such function in a Dynamo graph by torch's operator; a stream that is no traced object stays, and is refused."""
    recorded = torch.npu.fake_record_stream if DIFFERENCE.older else None  # type: ignore[attr-defined]
    for node in list(graph.nodes) if recorded is not None else ():
        if node.op == "call_function" and node.target is recorded and isinstance(node.args[1], fx.Node):
            tensor, stream = node.args
            with graph.inserting_before(node):
                operator = graph.call_function(torch.ops.streams.record_stream, (tensor, *stream.args))
            operator.meta = dict(node.meta)
            node.replace_all_uses_with(operator)
            graph.erase_node(node)
