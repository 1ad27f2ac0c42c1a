"""A sum, then `npu_rms_norm` of it => `npu_add_rms_norm`, which hands out the sum too.

The published kernel normalises the sum as it is rounded for the second result (CANN operator documentation, aclnnAddRmsNorm;
ops-nn, norm/add_rms_norm), so nothing is rounded otherwise.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Emit, Proposal, Unlike

_ADD = torch.ops.aten.add.Tensor


class _AddRmsNorm:
    """The form."""

    name = "lift_add_rms_norm"

    @property
    def ends_with(self) -> frozenset[torch._ops.OpOverload]:
        """The norm; looked up late, because torch_npu defines it."""
        return frozenset({torch.ops.npu.npu_rms_norm.default})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The sum and the norm that ``node`` is."""
        given = terms.arguments(node)
        total, gamma, epsilon = given["input"], given["gamma"], given.get("epsilon", 1e-6)
        if not terms.calls(total, _ADD):
            return None
        results = [user for user in node.users if user.target is getitem]
        if [user.args[1] for user in results if user.users] != [0]:
            return Unlike(node, "the norm's second result is used, or its first is not")
        found = [terms.tensor(operand) for operand in (*total.args, total)]
        values = [value for value in found if value is not None]
        operands = [operand for operand in total.args if isinstance(operand, fx.Node)]
        if len(values) != 3 or total.kwargs.get("alpha", 1) != 1:
            return Unlike(node, "what is normalised is no sum of two tensors")
        first, second, third = values
        if not all(same_numbers(value.shape, third.shape) and value.dtype == third.dtype for value in (first, second)):
            return Unlike(node, "what is added has several shapes or dtypes")

        def build(emit: Emit, x1: fx.Node, x2: fx.Node, weight: fx.Node) -> tuple[fx.Node, ...]:
            fused = emit(torch.ops.npu.npu_add_rms_norm.default, x1, x2, weight, epsilon)
            return emit(getitem, fused, 2), emit(getitem, fused, 0)

        normed = next(user for user in results if user.args[1] == 0)
        return Proposal((*operands, gamma), (total, normed), (build,), (third.shape[-1],), rounds_alike=True)


FORM = _AddRmsNorm()
