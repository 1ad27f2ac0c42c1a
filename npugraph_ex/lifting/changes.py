"""What becomes of a program that is changed as a near-miss says: its graph, as torch and torch_npu make it of the changed lines."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.fusion.tracing import fresh, trace
from npugraph_ex.lifting.proposal import Change


def traced(change: Change, mode: FakeTensorMode | None) -> fx.GraphModule:
    """The graph of the changed lines by themselves, in inference, on the metadata of the inputs of today.

    Must run under ``mode``. What the trace asks of symbolic sizes does not restrict the graph that is compiled.
    """
    shape_env = getattr(mode, "shape_env", None)
    with torch.no_grad(), shape_env.suppress_guards() if shape_env is not None else nullcontext():
        return trace(change.program, [fresh(node.meta["val"]) for node in change.now.inputs])
