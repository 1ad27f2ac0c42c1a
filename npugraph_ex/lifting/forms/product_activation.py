"""An activation of a product => `npu_fused_matmul`, one kernel for two, on the devices that have it: ReLU, and GELU without a bias.

The operator documentation of aclnnFusedMatmul names the devices: Ascend 950, and neither A2 nor A3.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._matrices import as_matrices, as_matrix, with_sizes_of
from npugraph_ex.lifting.proposal import Emit, Proposal, Unlike
from npugraph_ex.operators import OPERATORS

_aten = torch.ops.aten
_MATRIX = 2
_PRODUCTS = (_aten.mm.default, _aten.matmul.default, _aten.addmm.default)
_TAKEN = (torch.float16, torch.bfloat16)
_RECORD = OPERATORS["npu::npu_fused_matmul"]


class _ProductActivation:
    """The form."""

    name = "lift_product_activation"
    ends_with = frozenset({_aten.relu.default, _aten.gelu.default})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The activation that is ``node``."""
        operand = node.args[0]
        if not isinstance(operand, fx.Node) or not _is_there():
            return None
        product, value = list(terms.reshaped_from(operand))[-1], node.meta["val"]
        if not terms.calls(product, *_PRODUCTS):
            return None
        *bias, x, weight = (one for one in product.args if isinstance(one, fx.Node))
        if weight.meta["val"].dim() != _MATRIX or x.meta["val"].dim() < _MATRIX:
            return None
        kind = _kind(node)
        dtypes = {one.meta["val"].dtype for one in (node, x, weight, *bias)}
        if len(dtypes) > 1 or not dtypes <= set(_TAKEN):
            return Unlike(node, f"product and activation are {', '.join(sorted(map(str, dtypes)))}")
        if bias and kind != "relu":
            return Unlike(node, "npu_fused_matmul takes no bias with GELU")
        if bias and not _is_row(bias[0], product):
            return Unlike(node, "what is added to the product is no row, or one of both is scaled")
        of = with_sizes_of(x, value.shape)
        if of is None:
            return Unlike(node, f"the result is {list(value.shape)}, of several symbols")

        def build(emit: Emit, x: fx.Node, weight: fx.Node, *bias: fx.Node) -> tuple[fx.Node, ...]:
            added = {"bias": bias[0]} if bias else {}
            rows = as_matrix(emit, x)
            made = emit(torch.ops.npu.npu_fused_matmul.default, rows, weight, fused_op_type=kind, **added)
            return (as_matrices(emit, made, x, value.shape),)

        return Proposal((of, weight, *bias), (node,), (build,), sums_rows=True)


def _is_there() -> bool:
    """Whether this release of torch_npu and this device have the operator."""
    return _RECORD.overload is not None and _RECORD.is_surely_on(torch.npu.get_device_name())


def _kind(node: fx.Node) -> str:
    """The activation, as the operator names it."""
    if node.target is _aten.relu.default:
        return "relu"
    return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu_erf"


def _is_row(bias: fx.Node, product: fx.Node) -> bool:
    """Whether ``bias`` is a vector that is added to each row of the product, neither of them scaled."""
    scaled = any(product.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    return not scaled and same_numbers(bias.meta["val"].shape, product.meta["val"].shape[-1:])


FORM = _ProductActivation()
