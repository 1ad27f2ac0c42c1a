"""Tensors: their storage, its owners, and their value in functionalization."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly when they share a storage; works on fake tensors.

    ``data_ptr`` is not available on fake tensors, and storages themselves are not hashable by identity.
    """
    return int(tensor.untyped_storage()._cdata)


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    """Whether a size, a stride or the offset is a symbol; asking for them one by one takes ten times as long."""
    return bool(tensor._has_symbolic_sizes_strides)


def autograd_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that ``tensor`` is a view of, as autograd knows; None for one that is no view to it."""
    return tensor._base


def version(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor's memory, from autograd, which does not count in inference mode."""
    return tensor._version


def below_version_counting() -> AbstractContextManager[None]:
    """Within the block operators run without autograd, views and versions, as they do within a kernel that sees to these."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory that is read with the other sign; torch has public views of this kind for `conj` only."""
    return torch._neg_view(tensor)


def storage_handle(storage: torch.UntypedStorage) -> int:
    """The handle of a storage for `owners_of_storage`; valid as long as the storage object lives."""
    return int(storage._cdata)


def likeness(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many arguments, in C: whether they are such tensors.

    It compares type, dtype, shape, strides, device, `requires_grad` and the dispatch keys, so also conjugation, negation and
    inference tensors. False for one tensor passed twice. Dynamo's guards compare tensors by it. Here the sizes are always
    given, because torch 2.13 ends the process where they are left out.
    """
    guards: Any = torch._C._dynamo.guards.TensorGuards  # torch's stub knows neither the tensors nor a list for each
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


owners_of_storage: Callable[[int], int] = torch._C._storage_Use_Count
"""The number of owners of a storage, Python objects and tensors together.

Only this shows whether a caller still has a view of a result; reference counts of Python objects do not include views. Every
call uses it, so it is torch's own function without a wrapper.
"""


def functional_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The present value, in AOT's functionalization, of a tensor that is all of its memory; None for any other tensor.

    A view of a part is not needed: a write to it goes into its base, whose layout stays. A view with symbolic sizes counts as
    a part.
    """
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(tensor, FunctionalTensor):
        return None
    tensor.sync()
    value = torch._from_functional_tensor(tensor.elem)
    return value if torch._is_functional_tensor_base(tensor.elem) or _is_whole(value) else None


def functional_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The present value, in AOT's functionalization, of a tensor that is a view of another; None for any other tensor."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(tensor, FunctionalTensor) or torch._is_functional_tensor_base(tensor.elem):
        return None
    tensor.sync()
    value: torch.Tensor = torch._from_functional_tensor(tensor.elem)
    return value


def _is_whole(view: torch.Tensor) -> bool:
    """Whether a view is known to be all of its storage; arithmetic on symbolic sizes would be traced."""
    count, size = view.numel(), view.untyped_storage().nbytes()
    return isinstance(count, int) and isinstance(size, int) and count * view.element_size() == size


def replace_functional_value(tensor: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
    """Replace the `functional_value` of a tensor."""
    from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode

    assert isinstance(tensor, FunctionalTensor)  # noqa: S101 - for the type checker
    with disable_functional_mode():
        value = compute()
    tensor.replace_(value)
    tensor.commit_update()
    tensor.sync()
