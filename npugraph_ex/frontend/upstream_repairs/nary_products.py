"""Splits products of three or more sizes into products of two; torch writes them as one call.

The fault is in torch's `_build_proxy_for_sym_expr`; pytorch#175398 mended sums alone.
`operator.mul(192, s0, s1)` is an error if the graph is interpreted. Printed as Python it becomes `192 * s0`, a wrong size:
the strides of a base that several inputs share were too small, in `aot_eager` too.
"""

from __future__ import annotations

import operator

from torch import fx

from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A product of three sizes or more is written as one call of three arguments, which is an error or a wrong size.",
    threads=("pytorch#175398",),
    test="tests/frontend/test_nary_products.py",
)


_OF_TWO = frozenset({operator.mul, operator.and_, operator.or_})


def pair(graph: fx.Graph) -> None:
    """Give every product of ``graph`` two factors, in place."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _OF_TWO or len(node.args) <= 2:
            continue
        product, *factors, last = node.args
        with graph.inserting_before(node):
            for factor in factors:
                values = fx.map_arg((product, factor), lambda argument: argument.meta["val"])
                product = graph.call_function(node.target, (product, factor))
                product.meta = {**node.meta, "val": node.target(*values)}
        node.args = (product, last)
