"""The operators and shapes that a graph calls for given inputs. They are found on fake tensors, so nothing is computed."""

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
"""The namespaces whose operators CANN implements.

An operator of another namespace may do anything when it runs, for example count its calls.
"""

_NOT_ALONE = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)
"""Operators that would advance the random generator, or whose shapes depend on values."""

Scope = tuple[tuple[str, str], ...]
"""Core limits and the deterministic level around a call, as `scope_enter` takes them."""


@dataclass(frozen=True)
class OperatorCall:
    """One operator on specific shapes.

    Attributes:
        target: the operator.
        args: its arguments, fake tensors among them.
        kwargs: likewise.
        scope: the core limits and the deterministic level around it.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    scope: Scope

    @property
    def signature(self) -> tuple[object, ...]:
        """A value that is equal for two calls with the same description by CANN."""
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        return (str(self.target), str(spec), self.scope, *map(_described, leaves))


def _described(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    return tuple(value.size()), tuple(value.stride()), value.dtype, value.device


def operator_calls(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[OperatorCall]:
    """The different calls of ``gm`` for inputs of these sizes, in graph order.

    Args:
        gm: the graph, after all passes.
        inputs: real tensors, of which only the metadata is read.

    Returns:
        One call for each signature, up to the first operator whose result's shape depends on values.
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
    """Runs a graph on fake tensors and collects the calls."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.calls: dict[tuple[object, ...], OperatorCall] = {}
        self._mode = mode
        self._scopes: list[Scope] = []

    def run_node(self, n: fx.Node) -> Any:
        """Run one node. Scopes are tracked; events do nothing on fake tensors."""
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
    """Whether an argument is on the device. A factory has no such argument, and needs no kernel for its shape."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "npu" for leaf in leaves)
