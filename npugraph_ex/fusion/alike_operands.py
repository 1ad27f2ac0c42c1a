"""Whether an operator of a replacement takes its operands: some it takes only in one shape or in one dtype.

The fake functions of fused operators do not ask, so that a trace goes through what the device refuses: a sum may broadcast, and
the norm of a sum may not.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.fusion.arguments import argument_names, effective_arguments
from npugraph_ex.fusion.conditions import same_sizes
from npugraph_ex.operators import record_of


def unlike_operands(replacement: fx.Graph) -> str | None:
    """The first pair of operands that an operator's record wants alike and that is not.

    Equal sizes under different symbols may be assumed, as by a condition.
    """
    for node in replacement.nodes:
        record = record_of(node.target)
        if record is None or not any(record.alike):
            continue
        given = dict(zip(argument_names(node.target), effective_arguments(node), strict=True))
        values = {name: value.meta.get("val") for name, value in given.items() if isinstance(value, fx.Node)}
        for what, (leader, *others) in record.alike.groups():
            for name in others:
                first, other = values.get(leader), values.get(name)
                if not (isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor)):
                    continue
                if not (same_sizes(first, other) if what == "shape" else record.alike.fits(what, name, other, first)):
                    return (
                        f"{leader} has the {what} {_shown(what, first)} and {name} {_shown(what, other)}; "
                        f"{record.name.partition('::')[2]} takes one {what}"
                    )
    return None


def _shown(what: str, value: torch.Tensor) -> str:
    return str(list(value.shape)) if what == "shape" else str(value.dtype)
