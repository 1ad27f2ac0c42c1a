"""Leaves gradients undefined that belong to results of which the loss uses nothing, where AOT's backward gets zeros.

Eager mode does not run the backward of such a result: parameters that it alone needs keep `grad=None`, and AdamW leaves them as
they are. In AOT's backward they get zeros, so AdamW decays them, and zero times infinity makes NaN of other gradients.

Here the backward gets None. What depends on undefined gradients alone is None as a result, and is not computed. Where it is added
to another gradient, the other one is the sum; anything else takes zeros for it, or what a user's own backward makes of zeros. Such
a shorter graph is made once for each set of undefined gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.graph.effects import draws_random_numbers, has_effect
from npugraph_ex.graph.metadata import difference
from npugraph_ex.graph.operators import is_view, tensor_leaves
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="Parameters that only unused results need get zeros as gradients, not None; zero times infinity makes others NaN.",
    threads=("pytorch#131794", "pytorch#177764", "pytorch#186355", "pytorch#194523"),
    test="tests/frontend/test_undefined_gradients.py",
)


def kept(compiled: Callable[..., Any], metadata: object) -> Callable[..., Any]:
    """A function of AOT that is trained, whose backward is a `Backward`: it gets None for undefined gradients.

    Args:
        compiled: the function.
        metadata: AOT's facts about it.
    """

    def run(*inputs: Any) -> Any:
        results = compiled(*inputs)
        if torch.is_grad_enabled():
            _torch_private.keep_gradients_undefined([*results, *inputs], metadata)
        return results

    return run


def can_be_kept(backward: fx.Graph) -> bool:
    """Whether zeros can be made in the place of each value that depends on gradients: the graph has the sizes for it."""
    sizes = _KnownSizes(backward)
    return all(
        sizes.has(size)
        for node in backward.nodes
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        for size in ([*leaf.shape, *leaf.stride()] if isinstance(leaf, torch.Tensor) else [leaf])
    )


class Backward:
    """A backward graph that runs operator by operator, a function of its inputs.

    Args:
        gm: AOT's backward graph.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        inputs = gm.graph.find_nodes(op="placeholder")
        self._gradients = [place for place, node in enumerate(inputs) if _torch_private.is_gradient(node)]
        self._shorter: dict[tuple[frozenset[int], frozenset[int]], fx.GraphModule] = {}

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph without what depends on the gradients that are None."""
        undefined = frozenset(place for place in self._gradients if inputs[place] is None)
        if not undefined:
            return self._gm.forward(*inputs)  # type: ignore[no-any-return]
        which = undefined, frozenset(_torch_private.hooked_inputs())
        if which not in self._shorter:  # two threads may make the same one
            self._shorter[which] = without(self._gm, *which)
        return self._shorter[which].forward(*inputs)  # type: ignore[no-any-return]


def without(gm: fx.GraphModule, undefined: Collection[int], hooked: Collection[int] = ()) -> fx.GraphModule:
    """A backward graph without what depends on undefined gradients alone, with the same inputs.

    Args:
        gm: the graph.
        undefined: the positions of these gradients among its inputs.
        hooked: the positions of results that are zeros, not None, because a user's hook takes them.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    shorter = _Shorter(gm.graph, {inputs[place] for place in undefined})
    for node in gm.graph.nodes:
        if node.op != "output":
            shorter.take(node)
    shorter.end(gm.graph.output_node(), hooked)
    return fx.GraphModule(gm, shorter.graph)


class _Shorter:
    """The new graph while it is made, and the nodes of the old one that are not in it."""

    def __init__(self, old: fx.Graph, undefined: set[fx.Node]) -> None:
        self.graph = fx.Graph()
        self._sizes = _KnownSizes(old)
        self._new: dict[fx.Node, fx.Node] = {}
        self._instead: dict[fx.Node, Any] = {}  # zeros and sizes for nodes that are not in it
        self._defined: set[fx.Node] = set()  # what depends on a gradient that is defined
        self._undefined = undefined  # what depends on the others alone
        # What of it is zero where these gradients are; the rest is computed from zeros if anything takes it.
        self._zero = set(undefined)

    def take(self, node: fx.Node) -> None:
        """Copy a node, in the graph's order, unless its value is an undefined gradient."""
        takes = node.all_input_nodes
        depends = not self._defined.isdisjoint(takes)
        on_undefined = not self._undefined.isdisjoint(takes)
        if node.op == "placeholder":
            self._new[node] = self.graph.node_copy(node)
            if _torch_private.is_gradient(node) and node not in self._undefined:
                self._defined.add(node)
        elif on_undefined and not tensor_leaves(node):  # a size, which is no gradient
            self._instead[node] = self._sizes.computed(node.meta.get("val"), self._new)
        elif on_undefined and not depends and _may_go(node):
            self._undefined.add(node)
            if self._is_zero(node):
                self._zero.add(node)
            else:
                self._new[node] = self.graph.node_copy(node, self._value)
        else:
            other = self._summand(node) if on_undefined else None
            self._new[node] = self._new[other] if other else self.graph.node_copy(node, self._value)
            if (depends or on_undefined) and tensor_leaves(node):
                self._defined.add(node)

    def end(self, output: fx.Node, hooked: Collection[int]) -> None:
        """Return None for what is not in the graph."""
        old: Sequence[Any] = output.args[0]  # type: ignore[assignment]
        new = [self._value(value) if isinstance(value, fx.Node) else value for value in old]
        self.graph.output(
            [
                None if value in self._undefined and place not in hooked else new[place]
                for place, value in enumerate(old)
            ]
        )
        self.graph.eliminate_dead_code()

    def _is_zero(self, node: fx.Node) -> bool:
        """Whether a value is zero if the undefined gradients are, whatever it is multiplied by."""
        if _is_filled_with_zero(node):
            return True
        name = _name(node)
        tensors = list(filter(_is_differentiable, node.all_input_nodes))
        if name in _PRODUCTS:
            return not self._zero.isdisjoint(tensors)
        if name in _LINEAR_IN_FIRST or "_backward" in name:
            return node.args[0] in self._zero
        if name not in _LINEAR and node.target is not operator.getitem and not is_view(node):
            return False
        return all(tensor in self._zero or _is_filled_with_zero(tensor) for tensor in tensors) and not any(
            number for number in node.args[_LINEAR.get(name, len(node.args)) :] if isinstance(number, (int, float))
        )

    def _summand(self, node: fx.Node) -> fx.Node | None:
        """The one part of a sum that is not zero, if it is the sum."""
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
            return None
        others = [part for part in node.args if part not in self._zero]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            return None
        is_sum = difference(others[0].meta.get("val"), node.meta.get("val")) is None
        return others[0] if is_sum else None

    def _value(self, node: fx.Node) -> Any:
        """What stands for a node of the old graph: zeros for an undefined gradient, and a size as it is."""
        if node in self._zero and node not in self._instead:
            self._instead[node] = pytree.tree_map(self._zeros, node.meta.get("val"))
        return self._instead[node] if node in self._instead else self._new[node]

    def _zeros(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return self._sizes.computed(value, self._new)
        shape, strides = (
            [self._sizes.computed(size, self._new) for size in sizes] for sizes in (value.shape, value.stride())
        )
        return self.graph.call_function(_zeros, (shape, strides, value.dtype, value.device))


_PRODUCTS = frozenset({"bmm", "dot", "mm", "mul", "mv"})
_LINEAR_IN_FIRST = frozenset({"div"})
_LINEAR = {"add": 1, "constant_pad_nd": 2, "masked_fill": 2, "scatter": 3, "sub": 1, "where": 1} | dict.fromkeys(
    (
        "_fft_c2c", "_fft_c2r", "_fft_r2c", "_to_copy", "_unsafe_view", "as_strided_copy", "as_strided_scatter", "cat",
        "channel_shuffle", "clone", "copy", "cumsum", "diag_embed", "diagonal_scatter", "flip", "gather", "index", "index_add",
        "index_put", "index_select", "mean", "neg", "pixel_shuffle", "pixel_unshuffle", "repeat", "roll", "scatter_add",
        "select_scatter", "slice_scatter", "stack", "sum", "take", "tril", "triu",
    ),
    99,
)  # fmt: skip
"""Operators that are linear in all of their tensors together; from which argument on a number counts as a value."""


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]


def _is_differentiable(node: fx.Node) -> bool:
    """Whether a node is a tensor other than an index or a mask."""
    return any(leaf.is_floating_point() or leaf.is_complex() for leaf in tensor_leaves(node))


def _is_filled_with_zero(node: fx.Node) -> bool:
    name = _name(node)
    values = node.args[0 if name == "scalar_tensor" else 1 :]
    filled = name in {"full", "full_like", "scalar_tensor"} and values[0] == 0
    return name in {"new_zeros", "zeros", "zeros_like"} or bool(filled)


def _may_go(node: fx.Node) -> bool:
    """Whether nobody misses a call whose result is not used; higher-order operators may have an effect inside."""
    return not (isinstance(node.target, HigherOrderOperator) or has_effect(node) or draws_random_numbers(node))


def _zeros(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    return torch.zeros(span, dtype=dtype, device=device).as_strided(shape, strides)


class _KnownSizes:
    """Where a backward graph's symbolic sizes can be found: among its inputs that are no gradients."""

    def __init__(self, graph: fx.Graph) -> None:
        # By expression: an input, and its dimension if it is a tensor.
        self._found: dict[Any, tuple[fx.Node, int | None]] = {}
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._found.setdefault(_torch_private.size_expression(value), (node, None))
            elif isinstance(value, torch.Tensor) and not _torch_private.is_gradient(node):
                for dimension, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        self._found.setdefault(_torch_private.size_expression(size), (node, dimension))

    def has(self, size: Any) -> bool:
        """Whether a size can be computed; floats and truths are no sizes."""
        if not isinstance(size, torch.SymInt):
            return True
        expression = _torch_private.size_expression(size)
        return expression in self._found or all(symbol in self._found for symbol in expression.free_symbols)

    def computed(self, size: Any, new: Mapping[fx.Node, fx.Node]) -> Any:
        """The size in the new graph, a number or a node."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = _torch_private.size_expression(size)
        wanted = {expression} if expression in self._found else expression.free_symbols
        graph = next(iter(new.values())).graph
        known = {}
        for part in wanted:
            node, dimension = self._found[part]
            known[part] = (
                new[node]
                if dimension is None
                else graph.call_function(torch.ops.aten.sym_size.int, (new[node], dimension))
            )
        return _torch_private.computed_size(graph, expression, known)
