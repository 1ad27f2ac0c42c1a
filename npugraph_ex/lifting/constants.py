"""Computes once, at compile time, what depends on no input, such as the mask of a sequence of known length.

Every bit stays: whole numbers and truth values are computed; floating-point values are filled in, chosen, moved, and added,
multiplied and cast where nothing is rounded, as in ``(1 - mask) * -65504``. The weight of ones that a norm without a weight gets is
a constant, too. A value stays in the graph where it is written, leaves the graph, or is large.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

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
from npugraph_ex.lifting.distances import same_bits
from npugraph_ex.lifting.trials import FOLDED, on_real_values
from npugraph_ex.operators import PreparedGraph
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import SAME_BITS, Fusion

NAME = "lift_constants"

_aten = torch.ops.aten
_MOST_BYTES = 1 << 22
"""Of one constant, which takes memory as long as the compiled model lives: the causal mask of fused attention, 2048 x 2048."""
_FILLED = frozenset(
    {_aten.full, _aten.scalar_tensor, _aten.zeros, _aten.ones, _aten.new_zeros, _aten.new_ones, _aten.new_full}
)
_MOVED = frozenset(
    {
        *(_aten.cat, _aten.stack, _aten.where, _aten.index, _aten.clone, _aten.lift_fresh_copy, _aten.tril, _aten.triu),
        # Views, whose metadata may not say so after an edit of the graph.
        *(_aten.view, _aten.reshape, _aten.expand, _aten.unsqueeze, _aten.squeeze, _aten.transpose, _aten.slice),
    }
)
_OF_WHOLE_NUMBERS = frozenset(
    {
        *(_aten.arange, _aten.minimum, _aten.maximum, _aten.all, _aten.any),
        *(_aten.logical_and, _aten.logical_or, _aten.logical_not, _aten.logical_xor),
        *(_aten.bitwise_and, _aten.bitwise_or, _aten.bitwise_not, _aten.bitwise_xor),
    }
)
"""Operators whose results every device computes alike, where operands and results are whole numbers or truth values."""
_UNROUNDED = frozenset(
    {
        *(_aten.add, _aten.sub, _aten.rsub, _aten.mul, _aten.neg, _aten.masked_fill, _aten.copy, _aten.cumsum),
        *(_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten._to_copy),  # noqa: SLF001 - its name
    }
)
"""Operators whose results every device computes alike, where float64 has the same result; see `_are_counts` for two of them."""


def fold(facts: GraphFacts, report: ReportBuilder) -> bool:
    """Put constants of the module in the place of what depends on no input.

    Returns:
        Whether the graph was edited, so that the facts are old.
    """
    report.add_rule(NAME)
    graph = facts.graph
    leaving = [value for value in output_values(graph) if isinstance(value, fx.Node)]
    likely: set[fx.Node] = set()
    for node in graph.nodes:
        own = not facts.aliases.is_written(node) and not any(facts.aliases.share_storage(node, one) for one in leaving)
        of_constants = all(operand in likely for operand in node.all_input_nodes)
        if own and of_constants and (_is_literal(node) or _may_be_computed_alike(node)):
            likely.add(node)
    known = _computed(graph, likely)
    constant = set(known)
    # A value on the host costs no kernel.
    on_device = [node for node in graph.nodes if node in constant and node.meta["val"].device.type == "npu"]
    computed = [node for node in on_device if not is_view(node) and not _is_literal(node)]
    needed = [node for node in computed if _is_read(node, constant)]
    starting = {node for node in on_device if launches(node)}  # asked before views lose what they are views of
    kept: list[tuple[fx.Node, torch.Tensor]] = []
    made = [_replaced(node, known[node], kept) for node in needed]
    saves = _erase(constant, starting)
    for one in made:  # what they read in common is counted once
        report.add_fusion(replace(one, saves=saves))
        saves = NOTHING
    return bool(constant)


def _is_literal(node: fx.Node) -> bool:
    """Whether the program writes it down, as in ``torch.tensor(1.0)``: each reader copies it, so nobody writes it."""
    copied = all(user.target is _aten.lift_fresh_copy.default for user in node.users)
    return node.op == "get_attr" and copied and _is_known(node.meta["val"]) and type(_held(node)) is torch.Tensor


def _held(node: fx.Node) -> object:
    return attrgetter(str(node.target))(node.graph.owning_module)


def _may_be_computed_alike(node: fx.Node) -> bool:
    """Whether a node without inputs, or of constants, has the same bits on every device if it rounds nothing."""
    leaves = tensor_leaves(node)
    if node.op != "call_function" or len(leaves) != 1 or has_effect(node) or not _is_known(leaves[0]):
        return False
    if is_view(node):
        return True
    name = getattr(node.target, "overloadpacket", None)
    return name in _FILLED | _MOVED | _UNROUNDED or (name in _OF_WHOLE_NUMBERS and _is_whole(node))


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


def _computed(graph: fx.Graph, likely: set[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """The value on the CPU of each node that rounds nothing, nor what it is computed from; none where the CPU lacks an operator."""
    alone = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    literals: list[torch.Tensor] = []
    for node in graph.nodes:
        if node in likely and node.op == "get_attr":
            twins[node] = alone.placeholder(node.name)
            literals.append(_held(node))  # type: ignore[arg-type]  # asked before
        elif node in likely:
            twin = twins[node] = alone.node_copy(node, twins.__getitem__)
            if (
                getattr(node.target, "overloadpacket", None) in _FILLED
            ):  # float64 takes the place of a dtype that is written
                twin.update_kwarg("dtype", node.meta["val"].dtype)
    alone.output(tuple(twins.values()))
    exact: dict[fx.Node, torch.Tensor] = {}
    with on_real_values():
        given = [value.cpu() for value in literals]
        wide = [value.double() if value.is_floating_point() else value for value in given]
        try:
            computed = PreparedGraph(alone).run(*given), PreparedGraph(alone, wide=True).run(*wide)
        except (RuntimeError, NotImplementedError, IndexError, TypeError):  # whatever the CPU lacks stays on the device
            return {}
        for node, value, unrounded in zip(twins, *computed, strict=True):
            operands = [exact.get(operand) for operand in node.all_input_nodes]
            if _is_equal(value, unrounded) and all(one is not None and _is_sure(node, one, value) for one in operands):
                exact[node] = value
    return exact


def _is_equal(value: torch.Tensor, unrounded: torch.Tensor) -> bool:
    """Whether a value is the one that was computed in float64."""
    if not value.is_floating_point():
        return torch.equal(value, unrounded)
    return unrounded.dtype == torch.float64 and torch.equal(value.double(), unrounded)


def _is_sure(node: fx.Node, operand: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a result that is not rounded is the same on every device: sums in another order, and fractions as whole numbers."""
    if not operand.is_floating_point() or value.dtype == torch.bool:
        return True
    if not value.is_floating_point():
        return _are_counts(operand)
    return node.target is not _aten.cumsum.default or (_are_counts(operand) and _are_counts(value))


def _are_counts(value: torch.Tensor) -> bool:
    """Whether they are whole numbers from 0 up to that below which the dtype has all of them."""
    most = 2 / torch.finfo(value.dtype).eps
    return bool(((value >= 0) & (value <= most) & (value == value.trunc())).all())


def _replaced(node: fx.Node, value: torch.Tensor, kept: list[tuple[fx.Node, torch.Tensor]]) -> Fusion:
    """Put a constant in the node's place: one of those that are ``kept``, if it has the same bits, as each layer's mask has."""
    read = next((read for read, other in kept if _is_another(node.meta["val"], value, read.meta["val"], other)), None)
    if read is None:
        read = _made(node, value)
        kept.append((read, value))
    source = source_line(node)
    node.replace_all_uses_with(read)
    return Fusion(NAME, (node.name,), (read.name,), source, ulps=SAME_BITS, bit_equal=True)


def _is_another(like: torch.Tensor, value: torch.Tensor, of_other: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two constants have the same bits in the same places."""
    if (like.shape, like.stride(), like.device) != (of_other.shape, of_other.stride(), of_other.device):
        return False
    with on_real_values():
        return not value.is_complex() and same_bits(value, other)


def _made(node: fx.Node, value: torch.Tensor) -> fx.Node:
    """Reads a new constant of the module."""
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
    return read


def _erase(constant: set[fx.Node], starting: set[fx.Node]) -> Launched:
    """Erase what nobody reads any more, last first; what that saves on the device, where the ``starting`` nodes start work."""
    saves = NOTHING
    for node in sorted(constant, reverse=True):
        if not node.users:
            saves += Launched.of([node] if node in starting else [])
            node.graph.erase_node(node)
    return saves
