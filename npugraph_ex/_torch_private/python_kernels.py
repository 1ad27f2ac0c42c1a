"""Operators' kernels in Python, which torch prefers while a program is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import OpOverload

_ABOVE_DEVICES = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def python_kernels(
    chosen: Mapping[OpOverload, Callable[..., Any] | None], keys: Sequence[DispatchKey] = _ABOVE_DEVICES
) -> Iterator[None]:
    """Within the block each operator has this kernel above those of devices; None lets the device's be traced."""
    before = {operator: dict(operator.py_kernels) for operator in chosen}
    try:
        for operator, kernel in chosen.items():
            for key in keys:
                operator.py_kernels.pop(key, None)
                if kernel is not None:
                    operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()  # noqa: SLF001 - what was chosen before
        yield
    finally:
        for operator, kernels in before.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()  # noqa: SLF001 - what was chosen before


def npu_kernels(chosen: Mapping[OpOverload, Callable[..., Any] | None]) -> AbstractContextManager[None]:
    """Within the block each operator has this kernel in place of torch_npu's while a program is traced; None lets it have that."""
    return python_kernels(chosen, (DispatchKey.AutogradPrivateUse1, DispatchKey.PrivateUse1))


def meta_functions(chosen: Mapping[OpOverload, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Within the block each operator has this meta function while a program is traced."""
    return python_kernels(chosen, (DispatchKey.Meta,))


def python_kernel(operator: OpOverload) -> Callable[..., Any]:
    """The operator's own kernel for autograd."""
    return operator.py_kernels[DispatchKey.Autograd]


def upsampled_sizes(sizes: Sequence[int], given: Sequence[int] | None, scales: Sequence[float] | None) -> Sequence[int]:
    """The sizes of positions that `interpolate` gives: those that are given, or the input's times the scales, rounded down."""
    return upsample_compute_output_size(sizes, given, scales)  # type: ignore[no-any-return]
