"""Computes once, at compile time, what depends on no input, such as the mask of a sequence of known length.

Every bit stays: whole numbers and truth values are computed, floating-point values are only filled in, chosen and moved.
A value stays in the graph where it is written, leaves the graph, or is large.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.fusion.checks import GraphFacts
from npugraph_ex.graph.effects import has_effect
from npugraph_ex.graph.launches import NOTHING, Launched, launches
from npugraph_ex.graph.memory.aliases import output_values, tensor_leaves
from npugraph_ex.graph.metadata import fake_mode_of
from npugraph_ex.graph.operators import is_view
from npugraph_ex.graph.source import source_line
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.trials import FOLDED, on_real_values
from npugraph_ex.operators import PreparedGraph
from npugraph_ex.report.passes import Fusion, ReportBuilder

NAME = "lift_constants"

_aten = torch.ops.aten
_MOST_BYTES = 1 << 20
"""Of one constant, which takes memory as long as the compiled model lives."""
_FILLED = frozenset(
    {_aten.full, _aten.scalar_tensor, _aten.zeros, _aten.ones, _aten.new_zeros, _aten.new_ones, _aten.new_full}
)
_MOVED = frozenset(
    {
        *(_aten.cat, _aten.stack, _aten.where, _aten.index, _aten.clone, _aten.tril, _aten.triu),
        # Views, whose metadata may not say so after an edit of the graph.
        *(_aten.view, _aten.reshape, _aten.expand, _aten.unsqueeze, _aten.squeeze, _aten.transpose, _aten.slice),
    }
)
_OF_WHOLE_NUMBERS = frozenset(
    {
        *(_aten.arange, _aten.add, _aten.sub, _aten.mul, _aten.neg, _aten.cumsum, _aten.minimum, _aten.maximum),
        *(_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten._to_copy),  # noqa: SLF001 - its name
        *(_aten.logical_and, _aten.logical_or, _aten.logical_not, _aten.logical_xor),
        *(_aten.bitwise_and, _aten.bitwise_or, _aten.bitwise_not, _aten.bitwise_xor),
    }
)
"""Operators whose results every device computes alike, where operands and results are whole numbers or truth values."""


def fold(facts: GraphFacts, report: ReportBuilder) -> bool:
    """Put constants of the module in the place of what depends on no input.

    Returns:
        Whether the graph was edited, so that the facts are old.
    """
    report.add_rule(NAME)
    graph = facts.graph
    leaving = [value for value in output_values(graph) if isinstance(value, fx.Node)]
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        own = not facts.aliases.is_written(node) and not any(facts.aliases.share_storage(node, one) for one in leaving)
        if own and all(operand in constant for operand in node.all_input_nodes) and _is_computed_alike(node):
            constant.add(node)
    # A value on the host costs no kernel.
    on_device = [node for node in graph.nodes if node in constant and node.meta["val"].device.type == "npu"]
    needed = [node for node in on_device if not is_view(node) and _is_read(node, constant)]
    values = _computed(graph, needed, constant)
    starting = {node for node in on_device if launches(node)}  # asked before views lose what they are views of
    made = [_replaced(node, value) for node, value in values.items()]
    saves = _erase(constant, starting)
    for one in made:  # what they read in common is counted once
        report.add_fusion(replace(one, saves=saves))
        saves = NOTHING
    return bool(constant)


def _is_computed_alike(node: fx.Node) -> bool:
    """Whether a node without inputs, or of constants, has the same bits on every device."""
    leaves = tensor_leaves(node)
    if node.op != "call_function" or len(leaves) != 1 or has_effect(node) or not _is_known(leaves[0]):
        return False
    if is_view(node):
        return True
    name = getattr(node.target, "overloadpacket", None)
    if name in _FILLED:
        return _is_filled_exactly(node, leaves[0])
    return name in _MOVED or (name in _OF_WHOLE_NUMBERS and _is_whole(node))


def _is_filled_exactly(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether the number that is filled in has its value in the dtype."""
    given = terms.arguments(node)
    number = given.get("fill_value", given.get("s", 1))
    with on_real_values():
        return bool(torch.tensor(number, dtype=torch.float64).to(value.dtype).double() == number)


def _is_whole(node: fx.Node) -> bool:
    """Whether operands, arguments and result are whole numbers or truth values."""
    values = [leaf for one in (node, *node.all_input_nodes) for leaf in tensor_leaves(one)]
    fractions = any(isinstance(leaf, float) for leaf in pytree.tree_leaves((node.args, node.kwargs)))
    return not fractions and not any(value.is_floating_point() or value.is_complex() for value in values)


def _is_known(value: torch.Tensor) -> bool:
    """Whether size and place in memory are numbers, and small."""
    numbers = (*value.shape, *value.stride())
    return all(isinstance(number, int) for number in numbers) and value.numel() * value.element_size() <= _MOST_BYTES


def _is_read(node: fx.Node, constant: set[fx.Node]) -> bool:
    """Whether something else than constants reads the value or a view of it."""
    return any(user not in constant or (is_view(user) and _is_read(user, constant)) for user in node.users)


def _computed(graph: fx.Graph, needed: list[fx.Node], constant: set[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """The value of each node on the CPU; none where one cannot be computed there."""
    alone = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in constant:
            twins[node] = alone.node_copy(node, twins.__getitem__)
    alone.output(tuple(twins[node] for node in needed))
    with on_real_values():
        try:
            found = PreparedGraph(alone).run()
        except (RuntimeError, NotImplementedError, IndexError, TypeError):  # whatever the CPU lacks stays on the device
            return {}
    return dict(zip(needed, found, strict=True))


def _replaced(node: fx.Node, value: torch.Tensor) -> Fusion:
    gm, mode, like = node.graph.owning_module, fake_mode_of(node.graph), node.meta["val"]
    assert gm is not None  # noqa: S101 - passes get the graph of a module
    assert mode is not None  # noqa: S101 - asked before
    name = f"{FOLDED}{node.name}"
    with on_real_values():
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        gm.register_buffer(name, made.copy_(value))
    with node.graph.inserting_before(next(iter(node.graph.nodes))):
        read = node.graph.get_attr(name)
    read.meta["val"] = mode.from_tensor(made, static_shapes=True)
    source = source_line(node)
    node.replace_all_uses_with(read)
    return Fusion(NAME, (node.name,), (read.name,), source)


def _erase(constant: set[fx.Node], starting: set[fx.Node]) -> Launched:
    """Erase what nobody reads any more, last first; what that saves on the device, where the ``starting`` nodes start work."""
    saves = NOTHING
    for node in sorted(constant, reverse=True):
        if not node.users:
            saves += Launched.of([node] if node in starting else [])
            node.graph.erase_node(node)
    return saves
