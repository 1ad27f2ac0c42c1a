"""Lets Dynamo read a tensor's sizes and strides after `t_`, `squeeze_`, `unsqueeze_`, `transpose_`; it gives those from before.

In `y = x * 2; y.t_(); return torch.zeros(y.shape)` the result had the shape of `x`, with each backend. This precedes any graph, so
`npugraph_ex_autoload` calls `_torch_private.traced_metadata` when Dynamo is imported, and each backend of the process gains.
An argument is not concerned: Dynamo ends the graph there.
"""

from __future__ import annotations

from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="The sizes and strides of a tensor that was transposed or squeezed in place are those from before.",
    threads=("pytorch#185888",),
    torch=("2.10", "2.11", "2.12", "2.13"),
    test="tests/frontend/test_stale_metadata.py",
)
