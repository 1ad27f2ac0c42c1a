"""Operators: their schemas, names and device kernels, and AOT's wrappers around operators that mutate."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch._ops import OpOverload


def schema(overload: OpOverload) -> torch.FunctionSchema:
    """The schema of an operator, the only source of its defaults, aliasing and writes in torch."""
    return overload._schema


def scoped_library(namespace: str) -> AbstractContextManager[torch.library.Library]:
    """A library whose operators exist until the end of the block."""
    return torch.library._scoped_library(namespace, "DEF")


def auto_functionalized_operators() -> tuple[object, ...]:
    """AOT's two wrappers around a custom operator that mutates; they write nothing themselves."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

    return (auto_functionalized, auto_functionalized_v2)


def has_device_kernel(operator: torch._ops.OpOverload) -> bool:
    """Whether the NPU's dispatch key has its own kernel for an operator, rather than a fallback to the CPU.

    The answer comes from the dispatcher, not from the device; torch has no public function for it. The kernels of torch's operators
    are those of torch_npu, which are compiled: one in Python, as the emulated device has, may stand for a fallback.
    """
    name = operator.name()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
        return False
    return operator.namespace != "aten" or _is_compiled(name)


@functools.cache
def _is_compiled(name: str) -> bool:
    """Whether one of the registrations for the NPU, overridden or not, was made in C++."""
    registered = [line for line in torch._C._dispatch_dump(name).splitlines() if line.startswith("PrivateUse1")]
    return any(re.search(r"registered at [^:]*\.py:", line) is None for line in registered)


def composition(operator: OpOverload) -> Callable[..., object] | None:
    """Torch's kernel that calls other operators, if the NPU runs that; of another library's operator it might do anything."""
    if operator.namespace != "aten" or has_device_kernel(operator):
        return None
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = next((key for key in _COMPOSED if has(operator.name(), key)), None)
    return None if found is None else partial(operator._op_dk, getattr(torch._C.DispatchKey, found))


def operators_without_kernel() -> set[str]:
    """The operators that the NPU cannot run: none of its own, none of the CPU that it falls back to, and no composition."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    named = torch._C._dispatch_get_all_op_names()
    # One of torch's own library has a kernel of autograd alone, which is whole; a custom operator's only calls the device's.
    own = "quantized_decomposed::"
    return {name for name in named if not name.startswith(own) and not any(has(name, key) for key in _RUNNING)}


_COMPOSED = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
"""The dispatch keys of kernels that call other operators, in the dispatcher's order."""
_RUNNING = ("PrivateUse1", "CPU", *_COMPOSED)
"""The dispatch keys whose kernels run a call with tensors on the NPU."""


def has_meta_kernel(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator has a meta function, which gives the metadata of its results."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Meta")


def call_unwrapped(wrapper: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run the meaning of an ``auto_functionalized`` wrapper: copy the mutated arguments, call the operator, return the copies."""
    from torch._higher_order_ops import auto_functionalize as module

    if wrapper is module.auto_functionalized_v2:
        return module.auto_functionalized_v2_dense(*args, **kwargs)  # type: ignore[arg-type]
    return module.auto_functionalized_dense(*args, **kwargs)  # type: ignore[arg-type]


def operator_name(overload: OpOverload) -> tuple[str, str, str]:
    """Namespace, name and overload, as in ``torch.ops.aten.add.Tensor``."""
    return overload.namespace, overload._opname, overload._overloadname
