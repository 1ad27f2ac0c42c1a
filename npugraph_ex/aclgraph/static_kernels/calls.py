"""Which operators a graph calls on which shapes, for given inputs; found on fake tensors, so that nothing is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.graph.launches import launches
from npugraph_ex.graph.memory.aliases import communicates
from npugraph_ex.graph.streams.labels import CUBE, LEVEL, VECTOR
from npugraph_ex.graph.streams.ops import ENTERS, EXITS, NAMESPACES

_OF_CANN = frozenset({"aten", "npu", "npu_inference"})
"""The namespaces whose operators CANN implements. Another's may do anything when it runs, count its calls say."""

_NOT_ALONE = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)
"""Operators that would move the random generator on, or whose shapes depend on values."""

Scope = tuple[tuple[str, str], ...]
"""Core limits and the deterministic level around a call, as `scope_enter` takes them."""


@dataclass(frozen=True)
class OperatorCall:
    """One operator on certain shapes.

    Attributes:
        target: the operator.
        args: its arguments, fake tensors among them.
        kwargs: likewise.
        scope: the core limits and the level it runs under.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    scope: Scope

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for two calls that CANN would describe alike."""
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        return (str(self.target), str(spec), self.scope, *map(_spelt, leaves))


def _spelt(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    return tuple(value.size()), tuple(value.stride()), value.dtype, value.device


def operator_calls(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[OperatorCall]:
    """The different calls of ``gm`` for inputs of these sizes, in graph order.

    Args:
        gm: the graph, after all passes.
        inputs: real ones, of which only the metadata is looked at.

    Returns:
        One call a signature, up to the first operator whose result has a shape that only running it would tell.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    walk = _CallCollector(gm, mode)
    with _torch_private.fake_execution(mode):
        fakes = [_fake(mode, value) for value in inputs]
        with contextlib.suppress(*_torch_private.UNKNOWN_TO_FAKE_TENSORS):
            walk.run(*fakes, enable_io_processing=False)
    return list(walk.calls.values())


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value


class _CallCollector(fx.Interpreter):
    """Runs a graph on fake tensors and takes down the calls."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.calls: dict[tuple[object, ...], OperatorCall] = {}
        self._mode = mode
        self._scopes: list[Scope] = []

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; scopes are followed, and what orders streams does nothing on fake tensors."""
        if n.op == "get_attr":
            return _fake(self._mode, super().run_node(n))
        if n.target in ENTERS:
            args, _ = self.fetch_args_kwargs_from_env(n)
            said = zip(*args[:2], strict=True)
            outer = self._scopes[-1] if self._scopes else ()
            own = tuple((key, value) for key, value in said if key in {CUBE, VECTOR, LEVEL})
            self._scopes.append((*outer, *own))
            return None
        if n.target in EXITS:
            self._scopes.pop()
            return None
        if isinstance(n.target, OpOverload) and n.target.namespace in NAMESPACES:
            return None  # a token
        if launches(n) and isinstance(n.target, OpOverload) and n.target.namespace in _OF_CANN:
            self._note(n.target, *self.fetch_args_kwargs_from_env(n))
        return super().run_node(n)

    def _note(self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if _NOT_ALONE & set(target.tags) or communicates(target) or not _on_device(args, kwargs):
            return
        call = OperatorCall(target, args, kwargs, self._scopes[-1] if self._scopes else ())
        self.calls.setdefault(call.signature, call)


def _on_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument lies on the device; a factory has none, and no shape that another kernel would serve."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "npu" for leaf in leaves)
