"""Projections that read one input, each in a kernel of its own, where one projection with a longer weight would do.

Joining weights costs memory or the model's parameters, so no pass does it by itself: the model's author can, or for gate and up the
option `join_projections`. A weight that its author joins does not follow a training step, so this is for frozen weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from npugraph_ex.graph.launches import NOTHING, Launched
from npugraph_ex.graph.source import source_line
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.projections import Projection, projected

_aten = torch.ops.aten
_GATED = 2


@dataclass(frozen=True)
class SharedInput:
    """Projections of one input.

    Attributes:
        source: the lines of the projections.
        times: how often these lines occur.
        saves: kernels and bytes of all of them together.
        change: the lines that join them, for the first of these occurrences.
    """

    source: str
    times: int
    saves: Launched
    change: str


def shared_projections(graph: fx.Graph, names: Mapping[fx.Node, str], *, lifted: bool) -> list[SharedInput]:
    """The groups of projections of one input, those of equal lines together.

    Args:
        graph: AOT's graph for inference.
        names: the user's names of its inputs, as Dynamo writes them.
        lifted: whether the program lifts by judgement, so that joined gate and up become one operator.
    """
    groups: dict[tuple[fx.Node, object, bool], list[Projection]] = {}
    for node in graph.nodes:
        one = projected(node)
        if one is not None:
            groups.setdefault((one.x, node.target, one.bias is None), []).append(one)
    found: dict[str, SharedInput] = {}
    for those in groups.values():
        if len(those) < 2:
            continue
        joined = _joined(those, names, lifted=lifted)
        old = found.get(joined.source)
        found[joined.source] = (
            joined if old is None else SharedInput(joined.source, old.times + 1, old.saves + joined.saves, old.change)
        )
    return list(found.values())


def _joined(those: Sequence[Projection], names: Mapping[fx.Node, str], *, lifted: bool) -> SharedInput:
    gated = _gate_and_up(those)
    # One product instead of several: x is read once.
    saves = Launched(len(those) - 1, (len(those) - 1) * _read(those[0].x))
    source = ", ".join(dict.fromkeys(source_line(one.node) for one in those))
    if gated is None:
        results = ", ".join(f"y{at}" for at in range(len(those)))
        sizes = ", ".join(str(one.node.meta["val"].shape[-1]) for one in those)
        split, note = f"split(({sizes}), dim=-1)", ""
    else:
        those, kernels = gated
        besides = Launched.of(kernels) - Launched(1, Launched.of(kernels[1:]).bytes)
        saves += besides if lifted else NOTHING
        results, split = "gate, up", "chunk(2, dim=-1)"
        note = (
            "   # npu_swiglu is then lifted, which the row counts"
            if lifted
            else '   # {"lift": "judged"} would then lift npu_swiglu, which the row does not count'
        )
    lines = [_cat("weight", [one.weight for one in those], names)]
    biases = [one.bias for one in those if one.bias is not None]
    if biases:
        lines.append(_cat("bias", biases, names))
    read = "x, weight, bias" if biases else "x, weight"
    lines.append(f"{results} = torch.nn.functional.linear({read}).{split}{note}")
    return SharedInput(source, 1, saves, "\n".join(lines))


def _cat(name: str, parameters: Sequence[fx.Node], names: Mapping[fx.Node, str]) -> str:
    parts = ", ".join(_spelt(names.get(one, str(one.target))) for one in parameters)
    return f"{name} = torch.cat(({parts}))   # once, after the last change of the weights"


def _spelt(name: str) -> str:
    """Dynamo's ``L['self'].layers.0.weight`` as the model's code has it: ``self.layers[0].weight``."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", re.sub(r"^[LG]\['(\w+)'\]", r"\1", name))


def _read(x: fx.Node) -> int:
    value = terms.tensor(x)
    return 0 if value is None else value.untyped_storage().nbytes() if isinstance(value.numel(), int) else 0


def _gate_and_up(those: Sequence[Projection]) -> tuple[Sequence[Projection], tuple[fx.Node, fx.Node]] | None:
    """Gate before up, with activation and product of ``silu(gate) * up``; None where they are no such pair."""
    if len(those) != _GATED or len({one.node.meta["val"].shape[-1] for one in those}) > 1:
        return None
    for gate, up in (those, those[::-1]):
        for active in gate.node.users:
            if terms.calls(active, _aten.silu.default, _aten.silu_.default):
                for product in active.users:
                    if terms.calls(product, _aten.mul.Tensor, _aten.mul_.Tensor) and up.node in product.args:
                        return (gate, up), (active, product)
    return None
