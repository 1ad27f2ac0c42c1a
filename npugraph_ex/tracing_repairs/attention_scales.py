"""Gives `scaled_dot_product_attention` without a scale the one of its head size, which is a number then.

torch_npu reads the scale of a traced call as a C++ double. Where the size of a head is an expression of symbols, as in
`x.view(b, n, 4, x.shape[-1] // 4)`, there is none, and torch's placeholder is NaN. (CUDA had
the same fault.) torch_npu guards each size of the call already, so each head size has its own graph with and without this repair.
A graph that others traced is refused if it has such a scale.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import isnan, sqrt
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.graph.operators import named_arguments
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="`scaled_dot_product_attention` on an NPU gives NaN where the size of a head is an expression of symbols.",
    threads=("pytorch#144021",),
    test="tests/frontend/test_attention_scales.py",
)

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default


def kept() -> AbstractContextManager[None]:
    """Within the block AOT traces each call with a scale."""
    return _torch_private.npu_kernels({_OPERATOR: _scaled})


def _scaled(query: torch.Tensor, *inputs: Any, scale: float | None = None, **settings: Any) -> torch.Tensor:
    scale = 1 / sqrt(int(query.shape[-1])) if scale is None else scale
    with _torch_private.npu_kernels({_OPERATOR: None}):
        return _OPERATOR(query, *inputs, scale=scale, **settings)  # type: ignore[no-any-return]


def refuse_lost(graph: fx.Graph) -> None:
    """Refuse an AOT graph of symbolic sizes in which a scale is NaN.

    Raises:
        GraphVerificationError: names the node.
    """
    if not any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.find_nodes(op="placeholder")):
        return
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and _has_lost(node.target, node):
            raise GraphVerificationError(
                f"node {node.name} ({node.target}) has a scale of NaN: it was traced with a head size that is a symbol, which "
                "torch_npu cannot read. Pass scale=, trace with that size as a number, or compile by "
                "torch.compile(backend='npugraph_ex'), which mends it"
            )


def _has_lost(operator: OpOverload, node: fx.Node) -> bool:
    scales = [value for name, value in named_arguments(operator, node.args, node.kwargs).items() if "scale" in name]
    return any(isinstance(value, float) and isnan(value) for value in scales)
