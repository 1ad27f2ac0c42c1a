"""Operators that write arguments without a declaration in their schema, and return some of them.

The kernel's attribute `writes` names the written arguments. `returns_written` gives the positions of results that are these
arguments, in the order of `writes`. On hardware torch_npu returns the same tensors too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_leaves

from npu_emulator import requests
from npu_emulator.kernels.arguments import Bound
from npu_emulator.kernels.generic import Kernel, argument_of
from npu_emulator.kernels.metadata import Given, Likes
from npu_emulator.kernels.refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

    from npu_emulator.launch import Launcher

__all__ = ["UndeclaredWriter"]


class UndeclaredWriter(Kernel):
    """One such operator; its meta function allocates every result."""

    def __init__(self, op: OpOverload, launcher: Launcher, compute: Callable[..., Any]) -> None:
        """Prepare a kernel; `compute` has the attributes that the module describes."""
        super().__init__(op, launcher, compute)
        positions = {argument.name: position for position, argument in enumerate(op._schema.arguments)}
        self._places = [(positions[name], name) for name in compute.writes]
        self._given = dict(zip(getattr(compute, "returns_written", ()), self._places, strict=False))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the operator; return new tensors, and written arguments that are results."""
        args, kwargs = self.checked(args, kwargs)
        bound = Bound(args, kwargs, self._launcher.views.of)
        try:
            each: Any = self._metadata.outputs(bound.key, args, kwargs) if self._returns else ()
        except (RuntimeError, IndexError, AttributeError) as error:  # nothing else tells the results
            raise refusal(self.op, args, kwargs, error) from error
        single = each.single if type(each) is Likes else type(each) is Given
        each = each.each if type(each) is Likes else (each,) if single else each
        arguments = tree_leaves((args, kwargs))
        given = {i: arguments[like.leaf] for i, like in enumerate(each) if type(like) is Given}
        given |= {i: argument_of(args, kwargs, *place) for i, place in self._given.items()}
        made = [
            given[i] if i in given else requests.allocate(like.size, like.stride, like.dtype, f"npu:{bound.device}")
            for i, like in enumerate(each)
        ]
        new = [(i, self._launcher.views.of(made[i])) for i in range(len(made)) if i not in given]
        compute = self.compute

        def body() -> None:
            results = compute(*bound.args, **bound.kwargs)
            results = (results,) if single else results
            for i, target in new:
                if target.numel():
                    target.copy_(results[i])

        written = tree_leaves([argument_of(bound.args, bound.kwargs, *place) for place in self._places])
        written = [target for target in written if target is not None]
        targets = [*written, *(target for _, target in new)]
        self._launcher.launch(self.name, self._number, bound.device, body, bound.reads, targets)
        return made[0] if single else tuple(made) if made else None
