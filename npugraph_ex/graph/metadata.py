"""Keeps ``node.meta["val"]`` correct: compares metadata, and derives it for nodes that were added or changed.

Fake execution happens under the graph's own fake mode, so symbolic shapes stay symbolic.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.graph.operators import returned_argument, schema_of, tensor_leaves
from npugraph_ex.graph.sizes import SYMBOLS, has_symbols


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode of the graph's own metadata; None for a graph without tensor metadata.

    Not the active fake mode, because a caller may compile under its own fake mode.
    """
    for node in graph.nodes:
        for leaf in tensor_leaves(node):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


def _same_number(left: object, right: object) -> bool:
    """Whether two sizes are equal for every value of their symbols; adds no guard."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if isinstance(left, torch.SymInt) and isinstance(right, torch.SymInt) and _is_one_expression(left, right):
        return True
    return statically_known_true(left == right)


def _is_one_expression(left: torch.SymInt, right: torch.SymInt) -> bool:
    """Whether two sizes have the same text. That is usually so, and fast to check."""
    return left.node.shape_env is right.node.shape_env and bool(left.node.expr == right.node.expr)


def same_numbers(left: Iterable[object], right: Iterable[object]) -> bool:
    """Whether two shapes or strides are equal for every value of their symbols; adds no guard."""
    left, right = list(left), list(right)
    return len(left) == len(right) and all(map(_same_number, left, right))


def difference(old: object, new: object) -> str | None:
    """The difference between two values in kind, or between two tensors apart from their elements; None if there is none."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return _difference_of_tensors(old, new)
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        if len(old) != len(new):
            return f"{len(new)} values instead of {len(old)}"
        parts = (difference(a, b) for a, b in zip(old, new, strict=True))
        return next((part for part in parts if part), None)
    if isinstance(old, (int, float, *SYMBOLS)) and isinstance(new, (int, float, *SYMBOLS)):
        return None if _same_number(old, new) else f"{new} instead of {old}"
    return None if type(old) is type(new) else f"{_kind_of(new)} instead of {_kind_of(old)}"


def _kind_of(value: object) -> str:
    """In words; a joint graph has None where an argument gets no gradient."""
    if value is None:
        return "None (no gradient)"
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _difference_of_tensors(old: torch.Tensor, new: torch.Tensor) -> str | None:
    if not same_numbers(old.shape, new.shape):
        return f"shape {list(new.shape)} instead of {list(old.shape)}"
    for name in ("dtype", "device", "layout"):
        if getattr(old, name) != getattr(new, name):
            return f"{name} {getattr(new, name)} instead of {getattr(old, name)}"
    if not same_numbers(old.stride(), new.stride()):
        return f"strides {list(new.stride())} instead of {list(old.stride())}"
    for name in ("is_conj", "is_neg"):  # lazily conjugated or negated: other elements in the same bytes
        if getattr(old, name)() != getattr(new, name)():
            return f"{name}() {getattr(new, name)()} instead of {getattr(old, name)()}"
    return None


def _value_of(node: fx.Node) -> Any:
    if "val" not in node.meta:
        raise GraphVerificationError(
            f"Node {node.name} has no metadata (meta['val']) and none can be derived, because it is a {node.op}. "
            "Set node.meta['val'] to a fake tensor when inserting such a node."
        )
    return node.meta["val"]


@contextmanager
def quiet_refusals(*others: str) -> Iterator[None]:
    """Keep the traceback away that torch logs when an operator refuses fake tensors: the refusal is an answer here.

    What other modules log stays away, too.
    """
    logs = [logging.getLogger(name) for name in (FakeTensorMode.__module__, *others)]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


def derive(node: fx.Node, mode: FakeTensorMode | None) -> Any:
    """The value of ``node``, by fake execution on the metadata of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value_of)
    try:
        return executed(node.target, args, kwargs, mode)
    except Exception as error:
        shown = pytree.tree_map(_described, (args, kwargs))
        raise GraphVerificationError(
            f"Node {node.name} calls {node.target} with arguments that it does not accept: {shown}: {error}"
        ) from error


_ITS_ARGUMENT = object()
"""What a call returns that writes its argument and leaves its form as it is."""


def derive_constants(graph: fx.Graph, mode: FakeTensorMode | None) -> None:
    """Set the metadata of all nodes without any that read a tensor of the graph's module."""
    for node in graph.find_nodes(op="get_attr"):
        if mode is None or "val" in node.meta:
            continue
        value = attrgetter(str(node.target))(graph.owning_module)
        if isinstance(value, torch.Tensor):
            node.meta["val"] = mode.from_tensor(value, static_shapes=True)


def derive_all(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Set the metadata of all nodes without any. Equal calls, such as those of equal layers, are executed once."""
    known: dict[Hashable, Any] = {}
    for node in graph.nodes:
        if "val" in node.meta or not _can_be_derived(node):
            continue
        call = node.target, *(_without_memory(_value_in(part)) for part in (node.args, node.kwargs))
        try:
            like = known.get(call)
        except TypeError:  # a symbol, or what has no hash
            node.meta["val"] = derive(node, mode)
            continue
        argument = returned_argument(node)
        if like is None:
            form = _without_memory(argument.meta["val"]) if argument is not None else None
            value = node.meta["val"] = derive(node, mode)
            if argument is not None and value is argument.meta["val"] and _without_memory(value) == form:
                known[call] = _ITS_ARGUMENT
            elif _is_plain_and_new(node):
                known[call] = value
        elif like is _ITS_ARGUMENT and argument is not None:
            node.meta["val"] = argument.meta["val"]
        else:
            node.meta["val"] = pytree.tree_map(partial(_torch_private.fresh_fake, mode), like)


def _value_in(arguments: Any) -> Any:
    return fx.map_arg(arguments, _value_of)


def _without_memory(value: Any) -> Hashable:
    """What a result's metadata can depend on, apart from whether memory is shared."""
    if isinstance(value, torch.Tensor):
        form = value.dtype, value.shape, value.stride(), value.storage_offset(), value.device
        return (*form, value.layout, value.is_conj(), value.is_neg(), value.requires_grad)
    if isinstance(value, Mapping):
        return tuple((key, _without_memory(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_without_memory, value))
    return type(value), value


def _is_plain_and_new(node: fx.Node) -> bool:
    """Whether each result is a dense tensor with memory of its own, from its first element."""
    leaves = pytree.tree_leaves(node.meta["val"])
    if not all(isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided for leaf in leaves):
        return False
    storages = {_torch_private.storage_key(leaf) for leaf in leaves}
    flagged = any(leaf.storage_offset() or leaf.is_conj() or leaf.is_neg() or leaf.requires_grad for leaf in leaves)
    given = (one.meta.get("val") for one in node.all_input_nodes)
    return len(storages) == len(leaves) and not flagged and not _lies_in(node, list(given))


def executed(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode | None) -> Any:
    """The result of ``target`` on fake tensors of ``mode``."""
    # The kernels of symbolic sizes need the Python dispatcher; others take a third of the time without it.
    symbolic = getattr(mode, "shape_env", None) is not None and has_symbols((args, kwargs))
    with _torch_private.fake_execution(mode, symbolic=symbolic):
        if mode is not None and isinstance(target, OpOverload):
            return _torch_private.run_meta_kernel(mode, target, args, kwargs)
        return target(*args, **kwargs)


def _described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return value


def _can_be_derived(node: fx.Node) -> bool:
    """False if fake execution would make new unbacked symbols or needs a subgraph; then the old value stays."""
    if node.op != "call_function" or "unbacked_bindings" in node.meta:
        return False
    return "val" not in node.meta or not isinstance(node.target, HigherOrderOperator)


def shares_memory(node: fx.Node, arguments: Iterable[fx.Node] | None = None) -> bool:
    """Whether a result of ``node`` lies in an argument's memory, so that a new argument changes it.

    Some schemas do not say so: of views of a fresh copy (`_unsafe_view`), of what returns its argument where there is nothing
    to do (`dropout`, `sum_to_size`). There the tensors do.

    Args:
        node: its metadata is of a call with ``arguments``.
        arguments: those that it has now, unless given.
    """
    schema = schema_of(node)
    if schema is not None and any(result.alias_info is not None for result in schema.returns):
        return True
    given = node.all_input_nodes if arguments is None else arguments
    return _lies_in(node, [argument.meta.get("val") for argument in given])


def _lies_in(node: fx.Node, values: object) -> bool:
    """Whether a tensor of ``node`` has the storage of one of the values."""
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    storages = set(map(_torch_private.storage_key, leaves))
    return any(_torch_private.storage_key(leaf) in storages for leaf in tensor_leaves(node))


def _of_returned_argument(node: fx.Node, old: object) -> torch.Tensor | None:
    """The value of a node that returns the argument that it writes, if that has the earlier metadata; without execution."""
    argument = returned_argument(node)
    value = argument.meta.get("val") if argument is not None else None
    return value if isinstance(value, torch.Tensor) and old is not None and difference(old, value) is None else None


def _lies_elsewhere(old: object, new: object) -> bool:
    """Whether the value has another storage or offset, so that its views change too."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return True
    same = _torch_private.storage_key(old) == _torch_private.storage_key(new)
    return not same or not _same_number(old.storage_offset(), new.storage_offset())


_FITS = "val fits"
"""In the metadata of a new node: the call, with its arguments' values, for which its own value was derived already."""


def trust(node: fx.Node) -> None:
    """Spare ``node`` the next `refresh`, because its value was derived on arguments like its own; a later edit ends that."""
    node.meta[_FITS] = _call_with_values(node)


def _call_with_values(node: fx.Node) -> tuple[Any, ...]:
    return (node.target, node.args, node.kwargs, *(one.meta.get("val") for one in (node, *node.all_input_nodes)))


def _is_trusted(node: fx.Node) -> bool:
    """Whether nothing has changed since `trust`; asked once."""
    then, now = node.meta.pop(_FITS, ()), _call_with_values(node)
    return len(then) == len(now) and all(one is other for one, other in zip(then, now, strict=True))


def refresh(graph: fx.Graph, changed: Iterable[fx.Node], *, trusting: bool = False) -> list[fx.Node]:
    """Derive the metadata of ``changed`` nodes, and of the nodes that depend on a change.

    Args:
        graph: its nodes' ``meta["val"]`` is set.
        changed: nodes that are new or were edited.
        trusting: whether an operator that returns the argument that it writes is assumed to accept its arguments.

    Returns:
        The nodes whose metadata was derived, in graph order.
    """
    stale, derived = set(changed), list[fx.Node]()
    if not stale:
        return derived
    mode = fake_mode_of(graph)
    for node in graph.nodes:
        if node not in stale or not _can_be_derived(node) or _is_trusted(node):
            continue
        old = node.meta.get("val")
        new = _of_returned_argument(node, old) if trusting else None
        if new is None:
            new = derive(node, mode)
        moved = old is None or difference(old, new) is not None
        node.meta["val"] = new
        node.meta.pop("tensor_meta", None)
        derived.append(node)
        if moved or _lies_elsewhere(old, new):
            stale.update(user for user in node.users if moved or shares_memory(user) or _lies_in(user, old))
    return derived


_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})  # noqa: SLF001 - the operator's name


def has_doubtful_strides(node: fx.Node) -> bool:
    """Whether ``meta["val"]`` of a view may have, for a dimension of one element, another stride than the device gives it.

    Torch computes these strides otherwise where tensors are fake: of `x.transpose(1, 2).view(2, 1, 64)` the second one is 16 there,
    and 64 on a device, for dense x [2, 4, 1, 16]. There it is the number of elements behind the dimension, times their stride.
    A dimension that `expand` adds has stride 0 on a device. `derive` gives those of the device, unless sizes are symbols.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return False
    if node.target not in _VIEWS and node.target is not torch.ops.aten.expand.default:
        return False
    sizes, strides = value.shape, value.stride()
    ones = [dim for dim, size in enumerate(sizes) if isinstance(size, int) and size == 1]
    if not ones or has_symbols(value):
        return False
    if node.target is torch.ops.aten.expand.default:
        return True
    return any(dim + 1 == len(sizes) or strides[dim] != sizes[dim + 1] * strides[dim + 1] for dim in ones)


def only_renamed(node: fx.Node, old_args: tuple[Any, ...], old_kwargs: Mapping[str, Any]) -> bool:
    """Whether a call differs only in its argument nodes, and these have the metadata of the old ones.

    Then the call's metadata does not change, unless its result lies in an argument's memory.
    """
    new, shape = pytree.tree_flatten((node.args, dict(node.kwargs)))
    old, old_shape = pytree.tree_flatten((old_args, dict(old_kwargs)))
    if shares_memory(node, [argument for argument in old if isinstance(argument, fx.Node)]):
        return False
    return shape == old_shape and all(map(alike, old, new))


def alike(old: object, new: object) -> bool:
    """Whether two arguments are equal, or nodes whose values have the same metadata."""
    if old is new:
        return True
    if not isinstance(old, fx.Node) or not isinstance(new, fx.Node):
        return type(old) is type(new) and old == new
    before, now = old.meta.get("val"), new.meta.get("val")
    return before is not None and now is not None and difference(before, now) is None
