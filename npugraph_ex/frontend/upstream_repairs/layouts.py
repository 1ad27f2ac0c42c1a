"""Keeps the strides of tensors written in place, which AOT's functionalization loses.

AOT traces `v.add_(1)` as a new value `v + 1` that replaces the old one. Eager mode keeps the strides of `v`. If the new value
has other strides (`out=` of another layout, memory with gaps), results would have these, and `as_strided` would read other
elements. So the calls of a Dynamo graph that may write run under a mode that copies such a value into the old layout; the
passes turn that copy into a write of the old value's memory.

The new value of a view goes into the view's base at once. With other strides that is an error:
`x.view(6, 2, 4).transpose(0, 1).tril_()` cannot be viewed as `x` again. So the operator writes a clone of such a view, and the
clone is copied into the view.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from npugraph_ex import _torch_private
from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.graph.nested_regions import all_graphs
from npugraph_ex.graph.operators import named_arguments
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A tensor written in place gets other strides, so that `as_strided` and results see other elements.",
    threads=("pytorch#133512", "pytorch#186328"),
    test="tests/frontend/test_layouts.py",
)


class KeepLayouts(TorchDispatchMode):
    """During AOT's trace, tensors that an operator writes keep their strides under this mode."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator, then restore the strides of what it wrote."""
        del types
        named = kwargs or {}
        written = list(_written(func, args, named))
        clones = _clones_of_permuted(written) if func is not torch.ops.aten.copy_.default else {}
        if clones:
            return _through(clones, func, args, named, written)
        before = [_torch_private.functional_value(tensor) for tensor in written]
        result = func(*args, **named)
        for tensor, old in zip(written, before, strict=True):
            new = _torch_private.functional_value(tensor)
            if old is None or new is None or same_numbers(old.stride(), new.stride()):
                continue
            if same_numbers(old.size(), new.size()) and old.dtype == new.dtype:
                _torch_private.replace_functional_value(tensor, partial(torch.ops.aten.copy.default, old, new))
        return result


def _clones_of_permuted(written: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Clones of the tensors that are views with all of their elements in another order, such as `x.t()`; by identity."""
    views = {id(tensor): _torch_private.functional_view(tensor) for tensor in written}
    clones = {
        id(tensor): tensor.clone()
        for tensor in written
        if (view := views[id(tensor)]) is not None and not same_numbers(view.stride(), _contiguous_strides(view.shape))
    }
    return {
        id(tensor): clones[id(tensor)]
        for tensor in written
        if id(tensor) in clones and same_numbers(tensor.stride(), clones[id(tensor)].stride())
    }


def _contiguous_strides(shape: Sequence[Any]) -> list[Any]:
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * (max(size, 1) if isinstance(size, int) else size))
    return strides[: len(shape)]


def _through(
    clones: Mapping[int, torch.Tensor],
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    written: Sequence[torch.Tensor],
) -> Any:
    """Call an operator with clones, and copy them into the tensors that it writes: the copy keeps strides."""
    swapped = pytree.tree_map(lambda leaf: clones.get(id(leaf), leaf), (args, kwargs))
    result = func(*swapped[0], **swapped[1])
    for tensor in written:
        if id(tensor) in clones:
            tensor.copy_(clones[id(tensor)])
    return return_and_correct_aliasing(func, args, kwargs, result)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    """The tensors whose elements a call writes; not those whose metadata it changes, as `resize_` does."""
    if not isinstance(func, OpOverload) or torch.Tag.inplace_view in func.tags:
        return ()
    arguments = _torch_private.schema(func).arguments
    names = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    given = named_arguments(func, args, kwargs) if names else {}
    leaves = pytree.tree_leaves([given.get(name) for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def keep(gm: fx.GraphModule) -> None:
    """Run the calls of a Dynamo graph that may write in place under `KeepLayouts`; edits the graph and its subgraphs."""
    for graph in all_graphs(gm.graph):
        _keep(graph)
        if graph.owning_module is not None:
            graph.owning_module.recompile()


def _keep(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if not may_write(node):
            continue
        if node.op == "call_function":
            node.target = _keeping(node.target)
        elif hasattr(torch.Tensor, str(node.target)):
            node.op, node.target = "call_function", _keeping(getattr(torch.Tensor, str(node.target)))


_ASSIGN = frozenset(
    {operator.setitem} | {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")}
    | {getattr(operator, f"i{name}") for name in ("pow", "and", "or", "xor", "lshift", "rshift", "matmul")}
)  # fmt: skip


def name_of_call(node: fx.Node) -> str:
    """Of a node of Dynamo's graph: `add_` of a method, `mul.Tensor` of an operator, `relu` of a function; empty for others."""
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def may_write(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph may write an argument: `add_`, `out=`, `relu(x, True)`, `x[0] = y`, a mutating operator."""
    if node.op not in {"call_method", "call_function"}:
        return False
    name = name_of_call(node)
    if isinstance(node.target, OpOverload):
        return bool(_torch_private.schema(node.target).is_mutable)
    return (
        (name.endswith("_") and not name.endswith("__"))
        or node.target in _ASSIGN
        or node.kwargs.get("out") is not None
        or any(value is True for value in (*node.args, node.kwargs.get("inplace")))
    )


def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # so that the graph's code can be printed
    def keeping(*args: Any, **kwargs: Any) -> Any:
        with KeepLayouts():  # type: ignore[no-untyped-call]  # torch left its constructor untyped
            return function(*args, **kwargs)

    return keeping
