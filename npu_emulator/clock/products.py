"""Counts the operations of matrix products in what a kernel computes, for kernels whose price no record tells.

A formula of attention, or of grouped products, calls torch's own products. Their operations, two for each multiplication
and addition, are those that the cube cores do: a device may skip masked parts, which a formula computes and masks.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from npu_emulator.launch import Launcher

__all__ = ["ProductCounter", "counted", "counting_products"]


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - no public name of a key


@cache
def _is_composed(name: str) -> bool:
    """Whether the CPU computes an operator by others, as `matmul`, which comes whole below autograd.

    Others may have a decomposition, too, which rounds otherwise than their kernel (`silu_backward`).
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 - no public question
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU")


class ProductCounter(TorchDispatchMode):
    """Counts the products inside the block. Each operator computes what it computes without it, to the bit."""

    def __init__(self) -> None:
        """Start at zero operations."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        count = flop_registry.get(func.overloadpacket)
        if count is None and _is_composed(func.name()):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # noqa: SLF001 - no public way to one kernel of an operator
        out = func(*args, **kwargs)
        if count is not None:
            self.operations += count(*args, **kwargs, out_val=out)
        return out


@contextmanager
def _added(products: dict[int, int], key: int) -> Iterator[None]:
    with ProductCounter() as counter:
        yield
    if counter.operations:
        products[key] = counter.operations


_NOT_COUNTED = nullcontext()


def counted(products: dict[int, int] | None, key: int) -> AbstractContextManager[None]:
    """Count the products of kernel number `key` inside the block, if there is a table for them."""
    return _NOT_COUNTED if products is None else _added(products, key)


@contextmanager
def counting_products(launcher: Launcher) -> Iterator[dict[int, int]]:
    """Count the products of each kernel that runs inside the block; yield them by the kernel's number."""
    before = launcher.products
    launcher.products = {} if before is None else before
    try:
        yield launcher.products
    finally:
        launcher.products = before
