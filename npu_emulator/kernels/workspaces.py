"""The `.out` forms of other packages' operators, and the two operators that prepare a call with a workspace.

torch_npu captures inference attention as `X.out(..., workspace=, out=[...])` in a task group, so that its host arguments can
change between replays. Before that it calls `_X_get_max_workspace` and `_X_infer_output` for the memory. All three follow
from X itself, because the emulator needs no workspace.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from npu_emulator.kernels.arguments import Bound
from npu_emulator.kernels.formats import as_it_lies
from npu_emulator.kernels.metadata import on_meta
from npu_emulator.kernels.random import seeded
from npu_emulator.kernels.refusals import refusing
from npu_emulator.kernels.registry import CONSTRAINTS, DRAWS, WORK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

    from npu_emulator.launch import Launcher

__all__ = ["no_workspace", "workspace_kernels"]


def workspace_kernels(name: str, compute: Callable[..., Any], launcher: Launcher) -> dict[str, Callable[..., Any]]:
    """Return the further kernels of `namespace::operator`; none if it has no `.out` form.

    Another overload than the default one, `operator.lse`, has the form `operator.lse_out`.
    """
    namespace, _, operator = name.partition("::")
    operator, _, overload = operator.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    form = f"{overload}_out" if overload else "out"
    if packet is None or namespace == "aten" or not {overload or "default", form} <= {*packet.overloads()}:
        return {}
    own, out = getattr(packet, overload or "default"), getattr(packet, form)
    found: dict[str, Callable[..., Any]] = {f"{namespace}::{operator}.{form}": _OutKernel(own, out, compute, launcher)}
    if overload or "workspace" not in [argument.name for argument in out._schema.arguments]:
        return found
    helpers: dict[str, Callable[..., Any]] = {"get_max_workspace": no_workspace, "infer_output": _InferOutput(own)}
    for suffix, kernel in helpers.items():
        if hasattr(getattr(torch.ops, namespace), f"_{operator}_{suffix}"):
            found[f"{namespace}::_{operator}_{suffix}"] = kernel
    return found


class _OutKernel:
    """Computes the operator and stores its results in the tensors of `out`, or of several additional arguments."""

    def __init__(self, own: OpOverload, out: OpOverload, compute: Callable[..., Any], launcher: Launcher) -> None:
        self._name = str(out)
        known = {argument.name for argument in own._schema.arguments} | {"workspace"}
        self._outs = [argument.name for argument in out._schema.arguments if argument.name not in known]
        self._compute = refusing(own, compute)
        self._launcher = launcher
        self._number = launcher.number(self._name)

    def __call__(self, *args: Any, workspace: torch.Tensor | None = None, **kwargs: Any) -> Any:
        del workspace
        args, kwargs = as_it_lies(self._name, args, kwargs, writes=True)
        constraints = getattr(self._compute, CONSTRAINTS, None)
        if constraints is not None:
            constraints(*args, **kwargs)
        outs = tree_leaves([kwargs.pop(name) for name in self._outs])
        bound = Bound(args, kwargs, self._launcher.views.of)
        targets = [self._launcher.views.of(tensor) for tensor in outs]
        compute = self._compute
        if hasattr(compute, DRAWS):
            compute = seeded(self._launcher, compute, bound.device, args, kwargs)

        def body() -> None:
            for target, result in zip(targets, tree_leaves(compute(*bound.args, **bound.kwargs)), strict=True):
                if result.numel() != 0:
                    target.copy_(result)

        written = [target for target in targets if target.numel() != 0]
        told = getattr(self._compute, WORK, None)
        work = None if told is None else partial(told, *bound.args, **bound.kwargs)
        self._launcher.launch(self._name, self._number, bound.device, body, bound.reads, written, work=work)
        return tuple(outs) if len(outs) > 1 else outs[0]


class _InferOutput:
    """Allocates an operator's outputs from its query and value."""

    def __init__(self, op: OpOverload) -> None:
        self._op = op

    def __call__(self, query: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> Any:
        meta = {name: on_meta(argument) for name, argument in kwargs.items()}
        likes = self._op(on_meta(query), on_meta(value), on_meta(value), **meta)
        return tuple(
            torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=query.device) for like in likes
        )


def no_workspace(query: torch.Tensor, *ignored: object, **also_ignored: object) -> torch.Tensor:
    """Return the workspace of any call, which is empty, because kernels of the emulated device need none."""
    del ignored, also_ignored
    return torch.empty(0, dtype=torch.uint8, device=query.device)
