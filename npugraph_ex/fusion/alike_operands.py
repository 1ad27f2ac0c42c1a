"""Whether an operator of a replacement takes its operands: some it takes only in one shape or in one dtype, or in some sizes.

The fake functions of fused operators do not ask, so that a trace goes through what the device refuses: a sum may broadcast, and
the norm of a sum may not. The records know, and a compiled model must not end with the device's refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.fusion.arguments import argument_names, effective_arguments
from npugraph_ex.fusion.conditions import same_sizes
from npugraph_ex.graph.operators import named_arguments
from npugraph_ex.operators import RefusedArgumentError, record_of


def unlike_operands(replacement: fx.Graph) -> str | None:
    """The first pair of operands that an operator's record wants alike and that is not, or what its constraints refuse.

    Equal sizes under different symbols may be assumed, as by a condition.
    """
    for node in replacement.nodes:
        record = record_of(node.target)
        if record is None:
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
        refused = record.beside_alike and _refused(record.beside_alike, node)
        if refused:
            return refused
    return None


def _refused(constraints: Callable[..., None], node: fx.Node) -> str:
    """What the operator's constraints say against a call; of symbolic sizes only what they admit is assumed."""
    given = fx.map_arg(named_arguments(node.target, node.args, node.kwargs), lambda one: one.meta["val"])  # type: ignore[arg-type]
    shape_env = getattr(_torch_private.active_fake_mode(), "shape_env", None)
    for way in (shape_env.suppress_guards(), nullcontext()) if shape_env is not None else (nullcontext(),):
        try:
            with way:
                constraints(**given)
        except RefusedArgumentError as error:
            return str(error).partition(" NPU function error")[0].removesuffix(".")
    return ""


def _shown(what: str, value: torch.Tensor) -> str:
    return str(list(value.shape)) if what == "shape" else str(value.dtype)
