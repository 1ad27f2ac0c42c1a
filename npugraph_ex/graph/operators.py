"""What one node reads, writes and views, from its operator's schema and its own metadata.

These are facts of single nodes; `aliases` joins them to facts of a graph.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.graph.collectives import awaited_by, receives, waits
from npugraph_ex.graph.undeclared import is_undeclared_out, remember, writes_undeclared
from npugraph_ex.versions.out_tag import has_out_tag

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def tensor_leaves(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that ``node`` produces."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or isinstance(value, _NUMBERS):
        return []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def schema_of(node: fx.Node) -> torch.FunctionSchema | None:
    """The schema of the operator that ``node`` calls, if the operator has one."""
    return _torch_private.schema(node.target) if isinstance(node.target, OpOverload) else None


def named_arguments(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema, without defaults."""
    positional = [argument.name for argument in _torch_private.schema(target).arguments if not argument.kwarg_only]
    return {**dict(zip(positional, args, strict=False)), **kwargs}


def _nodes_in(value: object) -> Iterable[fx.Node]:
    """The nodes in one argument, which may be a list."""
    if isinstance(value, fx.Node):
        return (value,)
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node)]


_ASK_FOR_THE_SHAPE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
        "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
    )
)  # fmt: skip
"""Operators that read a tensor's size and not its elements."""

_OFFSETS: Mapping[object, int] = {
    torch.ops.aten.as_strided: 3,
    torch.ops.aten.as_strided_copy: 3,
    torch.ops.aten.as_strided_scatter: 4,
}
"""The operators that reach bytes of a storage beyond their argument; the position of the offset among their arguments."""

_OVERWRITE = frozenset({torch.ops.aten.copy, torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_})
"""Operators that do not read the elements of their first argument: they overwrite it, or (`copy`) take only its layout."""


def is_filled(overload: OpOverload, argument: torch.Argument) -> bool:
    """Whether an argument is an ``out``, which the operator overwrites completely.

    A keyword-only argument that an operator writes need not be one: it may be a cache of which the operator changes some
    rows. Torch's tag marks operators with an ``out``, but torch_npu tags operators with such a cache too.
    """
    named = overload.namespace != "npu" or overload._overloadname.startswith("out")
    tagged = argument.is_out and named and has_out_tag(overload, _torch_private.schema(overload))
    return tagged or is_undeclared_out(overload, argument)


_MAY_RETURN_THEIR_ARGUMENT = frozenset({torch.ops.prims.device_put.default, torch.ops.aten.dropout.default})
"""Operators that do so where there is nothing to do, which neither their schemas nor their fake results show."""


class _Parameter(NamedTuple):
    """A schema argument: its position, if it is positional, and its name."""

    position: int | None
    name: str

    def of(self, node: fx.Node) -> object:
        """The value that ``node`` passes for it; None if the call leaves it out."""
        if self.position is not None and self.position < len(node.args):
            return node.args[self.position]
        return node.kwargs.get(self.name)


class _Traits(NamedTuple):
    """What a schema declares about memory, with corrections.

    Attributes:
        written: the arguments that the operator writes.
        aliased: the arguments in whose memory a result may lie.
        is_view: every result lies in an argument and nothing is written.
        read: the arguments that the operator reads; None for all of them.
        receives: it receives into all its tensors and returns them.
        waits: it waits for a collective and returns that one's memory.
    """

    written: tuple[_Parameter, ...]
    aliased: tuple[_Parameter, ...]
    is_view: bool
    read: tuple[_Parameter, ...] | None
    receives: bool
    waits: bool


@functools.cache
def _traits(overload: OpOverload) -> _Traits:
    schema = _torch_private.schema(overload)
    every = [
        (_Parameter(None if argument.kwarg_only else position, argument.name), argument)
        for position, argument in enumerate(schema.arguments)
    ]
    slots = [(slot, argument.alias_info) for slot, argument in every if argument.alias_info is not None]
    results = [result.alias_info for result in schema.returns]
    # torch drops the alias set of a list result, ``Tensor(a)[]``, so the list may lie in any argument.
    aliased = [
        slot
        for slot, info in slots
        if any(result is not None and result.before_set in (set(), info.before_set) for result in results)
    ]
    is_view = bool(results) and None not in results and not schema.is_mutable
    overwrites = overload.overloadpacket in _OVERWRITE
    read = [
        slot for slot, argument in every if not (is_filled(overload, argument) or (slot.position == 0 and overwrites))
    ]
    written = [slot for slot, info in slots if info.is_write]
    kept_quiet = [slot for slot, argument in every if writes_undeclared(overload, argument)]
    aliased += [slot for slot, _ in every[:1] if overload in _MAY_RETURN_THEIR_ARGUMENT]
    return _Traits(
        (*written, *kept_quiet), (*aliased, *kept_quiet), is_view, tuple(read) if len(read) < len(every) else None,
        receives(overload), waits(overload),
    )  # fmt: skip


def learn(overload: OpOverload, arguments: frozenset[str]) -> bool:
    """Treat arguments of an operator as written and returned from now on, whatever its schema declares.

    Returns:
        Whether that was not known before.
    """
    is_new = remember(overload, arguments)
    _traits.cache_clear()
    _returned.cache_clear()
    return is_new


def written_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """The argument nodes whose memory ``node`` writes, by its schema; all of them if there is no schema."""
    if isinstance(node.target, OpOverload):
        traits = _traits(node.target)  # once: looking an operator up is what this costs
        if traits.receives:
            return tuple(node.all_input_nodes)
        if not traits.written or _only_evaluates(node):
            return ()
        return tuple([source for slot in traits.written for source in _nodes_in(slot.of(node))])
    if node.op not in ("call_function", "call_method", "call_module"):
        return ()
    pure = (operator.getitem, torch.ops.higher_order.out_dtype)
    if node.target in pure or node.target in _torch_private.auto_functionalized_operators():
        return ()
    return tuple(argument for argument in node.all_input_nodes if tensor_leaves(argument))


def _only_evaluates(node: fx.Node) -> bool:
    """Whether batch normalisation does not train, and so leaves the running statistics as they are."""
    training = _Parameter(5, "training")
    return getattr(node.target, "overloadpacket", None) is torch.ops.aten.native_batch_norm and not training.of(node)


def declares_view(overload: OpOverload) -> bool:
    """Whether every result lies in an argument and nothing is written, by the schema; the tensors of a call may say otherwise."""
    return _traits(overload).is_view


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` is only a view of its arguments: it starts no work and reads no element."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or not _traits(node.target).is_view:
        return False
    # `reshape` and `contiguous` declare an alias but may copy, so the tensors decide.
    sources = {_torch_private.storage_key(leaf) for source in node.all_input_nodes for leaf in tensor_leaves(source)}
    return all([_torch_private.storage_key(leaf) in sources for leaf in tensor_leaves(node)])  # noqa: C419 - a list is faster


def read_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """The argument nodes whose elements ``node`` may read: none for a view, else all except those that it only fills."""
    if not isinstance(node.target, OpOverload):
        return () if node.target is operator.getitem else tuple(node.all_input_nodes)
    if node.target.overloadpacket in _ASK_FOR_THE_SHAPE or is_view(node):
        return ()
    traits = _traits(node.target)
    if traits.waits:  # the collective reads its inputs until here
        started = awaited_by(node)
        return tuple(node.all_input_nodes) + (tuple(started.all_input_nodes) if started is not None else ())
    slots = traits.read
    if slots is None:
        return tuple(node.all_input_nodes)
    return tuple(dict.fromkeys([source for slot in slots for source in _nodes_in(slot.of(node))]))


@functools.cache
def _returned(overload: OpOverload) -> _Parameter | None:
    """The argument that an operator writes and returns as its only result; None if the operator changes metadata."""
    schema = _torch_private.schema(overload)
    if len(schema.returns) != 1 or torch.Tag.inplace_view in overload.tags:
        return None
    result = schema.returns[0].alias_info
    if result is None or not result.is_write:
        return None
    return next((slot for slot in _traits(overload).written if slot in _traits(overload).aliased), None)


def reaches_beyond(node: fx.Node) -> bool:
    """Whether ``node`` is an `as_strided`, or its copy or scatter: it may reach bytes that its argument does not cover."""
    return getattr(node.target, "overloadpacket", None) in _OFFSETS


def counts_from_the_storage(node: fx.Node) -> bool:
    """Whether ``node``, one that reaches beyond its argument, counts from the beginning of the storage instead."""
    offset = _OFFSETS.get(getattr(node.target, "overloadpacket", None))
    return offset is not None and (len(node.args) > offset or "storage_offset" in node.kwargs)


_KEEP_THE_STORAGE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("copy", "select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter")
)


def keeps_the_storage(node: fx.Node) -> bool:
    """Whether the result of ``node`` begins in its own storage where its first argument begins: it is a copy of that storage."""
    return getattr(node.target, "overloadpacket", None) in _KEEP_THE_STORAGE


def returned_argument(node: fx.Node) -> fx.Node | None:
    """The argument that ``node``, an in-place operator or one with an ``out``, writes and returns."""
    slot = _returned(node.target) if isinstance(node.target, OpOverload) else None
    argument = slot.of(node) if slot is not None else None
    return argument if isinstance(argument, fx.Node) else None


def may_alias(node: fx.Node) -> list[fx.Node]:
    """The argument nodes in whose memory a result of ``node`` may lie, by its schema."""
    if not isinstance(node.target, OpOverload):
        return []
    traits = _traits(node.target)
    if traits.waits or traits.receives:
        return list(node.all_input_nodes)
    return [source for slot in traits.aliased for source in _nodes_in(slot.of(node))]
