"""The modes under which operators run while something is compiled: fake, real, or seen by nobody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.utils import _pytree as pytree


@contextmanager
def fake_execution(mode: FakeTensorMode | None) -> Iterator[None]:
    """Run operators as tracing does: under ``mode`` and with the Python dispatcher, which symbolic shapes need."""
    from torch._dispatch.python import enable_python_dispatcher

    with mode if mode is not None else nullcontext(), enable_python_dispatcher(), torch.no_grad():
        yield


def run_meta_kernel(mode: FakeTensorMode, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``operator`` returns for fake tensors of ``mode`` without symbolic sizes, by its meta kernel alone.

    The mode would ask its cache, decompositions and rules first, which takes many times longer and answers the same. It is
    asked where it knows more: where an operator is told the device or takes no tensor, and for writes, whose result is an
    argument.
    """
    devices = (leaf.fake_device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
    device = next(devices, None)
    if device is None or operator._schema.is_mutable or kwargs.get("device") is not None:
        return operator(*args, **kwargs)
    with in_kernel_invocation_manager(mode):
        results = operator(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, lambda result: fake_of_meta(mode, result, device), results)


def fake_of_meta(mode: FakeTensorMode, value: torch.Tensor, device: torch.device) -> FakeTensor:
    """A tensor on the meta device as a fake tensor on ``device``, in the same memory."""
    return FakeTensor(mode, value, device)


UNKNOWN_TO_FAKE_TENSORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What fake tensors raise where only running an operator would tell its result's shape."""


def active_fake_mode() -> FakeTensorMode | None:
    """The innermost fake mode that is in force."""
    from torch._guards import active_fake_mode as active

    return active()


@contextmanager
def unobserved_execution() -> Iterator[None]:
    """Run operators that the program did not call, hidden from the dispatch modes around the compiled function.

    AOT runs the first call under a mode that holds custom operators to their schema's aliasing. It may judge the
    program's operators; the ``.out`` forms that the library calls in their place return what they are given to write.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextmanager
def real_execution() -> Iterator[None]:
    """Compute real values inside a compilation, where torch.compile has a fake mode in force around its backend."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def in_one_fake_mode(inputs: Sequence[Any]) -> list[Any]:
    """The inputs as tensors of the fake mode that is in force, if one is; AOT refuses those of another."""
    from torch._guards import detect_fake_mode

    try:
        mode = detect_fake_mode()
    except AssertionError:
        mode = None  # several are in force; AOT says which
    if mode is None:
        return list(inputs)
    return [
        mode.from_tensor(value) if isinstance(value, FakeTensor) and value.fake_mode is not mode else value
        for value in inputs
    ]
