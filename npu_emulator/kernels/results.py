"""What a kernel computed goes to device memory: the bodies that run on a stream, and new outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from npu_emulator import requests
from npu_emulator.kernels.metadata import Like

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npu_emulator.kernels.arguments import Bound
    from npu_emulator.kernels.metadata import Likes

__all__ = ["PureBody", "allocate", "plain_afterwards", "store_results"]


class PureBody:
    """The body of a pure operator: compute on CPU tensors, store to device memory."""

    __slots__ = ("args", "compute", "kwargs", "likes", "targets")

    def __init__(
        self, compute: Callable[..., Any], bound: Bound, targets: Sequence[torch.Tensor], likes: Likes
    ) -> None:
        """Take what `compute` computes of the bound arguments to the targets."""
        self.compute = compute
        self.args = bound.args
        self.kwargs = bound.kwargs
        self.targets = targets
        self.likes = likes

    def __call__(self) -> None:
        """Run."""
        results = self.compute(*self.args, **self.kwargs)
        if isinstance(results, torch.Tensor):
            results = (results,)
        elif type(results) is not tuple:
            results = tree_leaves(results)
        if self.likes.confirmed:
            for target, result in zip(self.targets, results, strict=True):
                target.copy_(result)
        else:
            self.likes.confirmed = store_results(results, self.targets)


def plain_afterwards(compute: Callable[..., Any], bound: Bound, targets: list[torch.Tensor]) -> Callable[[], None]:
    """The body of a writer: where the CPU notes that what it wrote is to be conjugated, the memory is."""
    noted = [target.is_conj() for target in targets]

    def body() -> None:
        compute(*bound.args, **bound.kwargs)
        for target, before in zip(targets, noted, strict=True):
            if target.is_conj() != before:
                memory = target.conj()  # the same elements without the note
                memory.copy_(memory.conj().resolve_conj())

    return body


def store_results(results: Sequence[Any], targets: Sequence[torch.Tensor | None]) -> bool:
    """Write the CPU's results to device memory; tell whether each target got a result of its size.

    Some operators return fewer or smaller auxiliary outputs on the CPU than their meta kernel does (batch norm's saved
    statistics in evaluation, embedding_bag's indices); nothing reads those.
    """
    fits = len(results) == len(targets)
    for result, target in zip(results, targets, strict=False):
        if not isinstance(result, torch.Tensor) or target is None:
            fits = False
        elif result.size() == target.size():
            target.copy_(result)
        else:
            fits = False
            if target.numel() != 0 != result.numel():
                target.copy_(result)
    return fits


def allocate(like: Any, device: torch.device) -> Any:
    """Allocate one output; anything that is no `Like` as it is."""
    if not isinstance(like, Like):
        return like
    return requests.allocate(like.size, like.stride, like.dtype, device)
