"""``x @ w + bias`` => `addmm`, one kernel for two, as ``torch.nn.functional.linear`` has it. The sum is rounded once."""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Emit, Proposal, Unlike

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.matmul.default)
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)


class _Bias:
    """The form."""

    name = "lift_bias"
    ends_with = frozenset({_aten.add.Tensor})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The sum that is ``node``."""
        for product, bias in (node.args[:2], node.args[1::-1]):
            if terms.calls(product, *_PRODUCTS) and terms.tensor(bias) is not None:
                return _with_bias(node, product, bias)  # type: ignore[arg-type]
        return None


def _with_bias(node: fx.Node, product: fx.Node, bias: fx.Node) -> Proposal | Unlike | None:
    x, weight = product.args
    left, right, added = (terms.tensor(one) for one in (x, weight, bias))
    if left is None or right is None or added is None or right.dim() != 2 or left.dim() < 2:
        return None
    if added.dim() != 1 or not terms.same_size(added.shape[0], right.shape[1]):
        return None
    dtypes = {one.dtype for one in (left, right, added)}
    if len(dtypes) > 1 or not dtypes <= set(_TAKEN) or node.kwargs.get("alpha", 1) != 1:
        return Unlike(node, f"product and bias are {', '.join(sorted(map(str, dtypes)))}, or the bias is scaled")
    sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    if sizes.count(-1) > 1:
        return Unlike(node, f"the result is {list(node.meta['val'].shape)}, of several symbols")

    def build(emit: Emit, x: fx.Node, weight: fx.Node, bias: fx.Node) -> tuple[fx.Node, ...]:
        if left.dim() == 2:
            return (emit(_aten.addmm.default, bias, x, weight),)
        rows = emit(_aten.reshape.default, x, [-1, left.shape[-1]])
        return (emit(_aten.view.default, emit(_aten.addmm.default, bias, rows, weight), sizes),)

    return Proposal((x, weight, bias), (node,), (build,), sums_rows=True)  # type: ignore[arg-type]


FORM = _Bias()
