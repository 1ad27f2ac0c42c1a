"""``x @ w + bias`` => `addmm`, one kernel for two, as ``torch.nn.functional.linear`` has it. The sum is rounded once.

The product may be spelled by `einsum` or `tensordot`: operands and result are seen through the views around it. Of `bmm` the weight
is one that is repeated for each matrix.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._attention_scores import ScoreProduct, product_behind
from npugraph_ex.lifting.forms._matrices import as_matrices, as_matrix, with_sizes_of
from npugraph_ex.lifting.forms.rms_norm import as_vector, vector
from npugraph_ex.lifting.proposal import Emit, Proposal, Unlike

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_MATRIX = 2


class _Bias:
    """The form."""

    name = "lift_bias"
    ends_with = frozenset({_aten.add.Tensor})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The sum that is ``node``."""
        for product, bias in (node.args[:2], node.args[1::-1]):
            value = terms.tensor(bias)
            if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or value is None:
                continue
            row = vector(bias, node.meta["val"].shape[-1], value.dtype) if node.meta["val"].dim() else None
            found = None if row is None else product_behind(product)
            if row is not None and isinstance(found, ScoreProduct) and (found.scale, found.added) == (1.0, None):
                return _with_bias(node, found, row)
        return None


def _with_bias(node: fx.Node, found: ScoreProduct, bias: fx.Node) -> Proposal | Unlike | None:
    """``bias`` is a row that is added to the product."""
    value, rank = node.meta["val"], node.meta["val"].dim()
    turned = found.seen.rows == (rank - 1,)  # the weight is the first operand
    seen = found.seen.turned() if turned else found.seen
    x, weight = (found.right, _unrepeated(found.left)) if turned else (found.left, _unrepeated(found.right))
    shapes = [one.meta["val"].shape for one in (x, weight)]
    of_rows = [dim for dim in (*seen.lead, *seen.rows) if not terms.same_size(value.shape[dim], 1)]
    alone = [all(terms.same_size(size, 1) for size in shape[:-_MATRIX]) for shape in shapes]
    if seen.columns != (rank - 1,) or of_rows != sorted(of_rows) or not alone[1] or (turned and not alone[0]):
        return None
    dtypes = {one.meta["val"].dtype for one in (x, weight, bias)}
    if len(dtypes) > 1 or not dtypes <= set(_TAKEN) or node.kwargs.get("alpha", 1) != 1:
        return Unlike(node, f"product and bias are {', '.join(sorted(map(str, dtypes)))}, or the bias is scaled")
    of = with_sizes_of(x, value.shape)
    if of is None:
        return Unlike(node, f"the result is {list(value.shape)}, of several symbols")

    def build(emit: Emit, x: fx.Node, weight: fx.Node, bias: fx.Node) -> tuple[fx.Node, ...]:
        operands = [as_matrix(emit, one) for one in (x, weight)]
        operands = [emit(_aten.t.default, one) for one in operands] if turned else operands
        made = emit(_aten.addmm.default, as_vector(emit, bias), *operands)
        return (as_matrices(emit, made, x, value.shape),)

    return Proposal((of, weight, bias), (node,), (build,), sums_rows=True, dense=True)


def _unrepeated(node: fx.Node) -> fx.Node:
    """The one matrix that ``node`` repeats, which may be its copy; ``node`` where it repeats none."""
    inner = terms.core(node)
    source = inner.args[0] if terms.calls(inner, _aten.expand.default, _aten.repeat.default) else None
    if not isinstance(source, fx.Node) or source.meta["val"].dim() < _MATRIX:
        return node
    *lead, rows, columns = source.meta["val"].shape
    alone = same_numbers((rows, columns), node.meta["val"].shape[-_MATRIX:]) and all(
        terms.same_size(size, 1) for size in lead
    )
    return source if alone else node


FORM = _Bias()
