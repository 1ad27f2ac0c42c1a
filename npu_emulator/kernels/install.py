"""Gives every operator of the dispatcher its kernel on the emulated device."""

from __future__ import annotations

import functools
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from npu_emulator.errors import KernelMissingError
from npu_emulator.kernels.composites import composite_kernels
from npu_emulator.kernels.copies import copy_kernels
from npu_emulator.kernels.corrections import CORRECTED
from npu_emulator.kernels.device_forms import as_on_the_device
from npu_emulator.kernels.device_only import DEVICE_ONLY
from npu_emulator.kernels.fallback import OnTheHost, falling_back
from npu_emulator.kernels.formats import NATIVE_CASTS, format_kernels
from npu_emulator.kernels.generic import Kernel
from npu_emulator.kernels.gradients import GRADIENTS
from npu_emulator.kernels.missing import Missing
from npu_emulator.kernels.origins import BY_THE_CPU, COMPOSED, DEVICE, FALLBACK, FORMULA, NONE, PACKAGE, RANDOM
from npu_emulator.kernels.packed_sequences import packing_kernels
from npu_emulator.kernels.random import DISTRIBUTIONS, RandomKernel, is_random, kernel_with
from npu_emulator.kernels.registry import overload_of
from npu_emulator.kernels.scaled_products import SCALED_PRODUCTS
from npu_emulator.kernels.workspaces import no_workspace, workspace_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch._ops import OpOverload

    from npu_emulator.kernels.registry import Registry
    from npu_emulator.launch import Launcher

__all__ = ["Installer"]

_TORCH_NPUS_OWN = frozenset(
    [
        "aten::empty.memory_format",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::new_empty_strided",
        "aten::empty_with_format",
        "aten::as_strided",
        "aten::as_strided_",
        "aten::view",
        "aten::view.dtype",
        "aten::_reshape_alias",
        "aten::unfold",
        "aten::view_as_real",
        "aten::view_as_complex",
        "aten::set_",
        "aten::set_.source_Storage",
        "aten::set_.source_Storage_storage_offset",
        "aten::set_.source_Tensor",
        "aten::resize_",
        "aten::resize_as_",
        "aten::is_pinned",
        "aten::record_stream",
        "aten::_has_compatible_shallow_copy_type",
        "aten::is_set_to",
        "aten::alias",
        "aten::detach",
        "aten::squeeze",
        "aten::scaled_dot_product_attention",
        "aten::squeeze.dim",
        "aten::unsqueeze",
    ]
)
"""Operators that allocate or describe memory and compute nothing: torch_npu's kernels for them need no CANN operator."""

_WITHOUT_GRADIENT = frozenset({"aten::one_hot"})
"""Operators without a gradient whose CANN kernel torch_npu calls at its autograd key, which comes before the key
overridden here. Out variants are treated in the same way."""

_NPU_WITHOUT_COMPUTE = (
    # They compose copies, events and host functions, or call the runtime.
    "print_npugraph_tensor",
    "save_npugraph_tensor",
    "super_kernel_scope",
    "get_storage_size",
    "get_npu_format",
    "npu_get",
    "empty_with_format",
    "unsafe_empty_with_format",
    "npu_change_data_ptr",
    "copy_memory_",
)


class Installer:
    """Overrides torch_npu's kernels; keeps the registrations alive for the life of the process."""

    def __init__(self, launcher: Launcher) -> None:
        """Prepare to register kernels that launch through `launcher`."""
        self._launcher = launcher
        self._libraries: dict[str, torch.library.Library] = {}
        self.origins: dict[str, str] = {}
        """Where each registered kernel is from, by operator."""

    def install(self, registry: Registry) -> int:
        """Register all kernels and return their number; `registry` has the kernels of other packages."""
        # A package may offer operators of libraries that are not loaded, or of another version.
        brought = {name: kernel for name, kernel in registry.offered.items() if overload_of(name) is not None}
        with _unwarned():
            return self._install({**brought, **registry.added})

    def _install(self, brought: Mapping[str, Callable[..., Any]]) -> int:
        formats = format_kernels()
        count = self._install_aten()
        of_vendor = [*_registered("npu::"), *_registered("atb::")]
        for name in of_vendor:
            if name not in NATIVE_CASTS and not any(part in name for part in _NPU_WITHOUT_COMPUTE):
                cast = formats.get(name)
                self._register(name, cast or _without_formula(name), DEVICE if cast or "workspace" in name else NONE)
        for name, composed in composite_kernels().items():
            for key in ("PrivateUse1", "AutogradPrivateUse1"):
                self._register(name, composed, COMPOSED, key=key)
        for name, compute in {**GRADIENTS, **CORRECTED, **DEVICE_ONLY, **DISTRIBUTIONS, **SCALED_PRODUCTS}.items():
            self._add(name, compute, FORMULA)
        for name, compute in brought.items():
            self._add(name, compute)
        return count + len(brought)

    def _install_aten(self) -> int:
        special = {**copy_kernels(self._launcher), **packing_kernels()}
        above = {name for name in _registered("aten::", "AutogradPrivateUse1") if name.endswith((".out", "_out"))}
        above |= _WITHOUT_GRADIENT
        fallback_of = falling_back()
        count = 0
        for name in sorted(_aten_names()):
            if name in _TORCH_NPUS_OWN:
                continue
            op = overload_of(name)
            if op is None:
                continue
            own = special.get(name)
            kernel = self._by_the_cpu(name, op) if own is None else own
            fallback = fallback_of(name)
            origin = FALLBACK if fallback and own is None else DEVICE if own else _origin_of(kernel)
            kernel = as_on_the_device(name, kernel)
            self._register(name, OnTheHost(fallback, kernel, self._launcher) if fallback else kernel, origin)
            if name in above:
                self._register(name, _without_gradient(op), key="AutogradPrivateUse1")
            count += 1
        return count

    def _by_the_cpu(self, name: str, op: OpOverload) -> Kernel | Missing:
        """Return the kernel that computes on the CPU, or one that raises because the CPU has none (`mm.dtype`)."""
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):  # noqa: SLF001
            return Missing(name)
        return (RandomKernel if is_random(op) else Kernel)(op, self._launcher)

    def add(self, name: str, compute: Callable[..., Any]) -> None:
        """Register a kernel from its CPU function."""
        with _unwarned():
            self._add(name, compute)

    def _add(self, name: str, compute: Callable[..., Any], origin: str = PACKAGE) -> None:
        op = overload_of(name)
        if op is None:
            raise KernelMissingError(
                f"there is no operator {name}; import the library that defines it, then register its kernel"
            )
        self._register(name, as_on_the_device(name, kernel_with(op, self._launcher, compute)), origin)
        for form, kernel in workspace_kernels(name, compute, self._launcher).items():
            self._register(form, kernel, origin)
        out = overload_of(f"{name}.out")
        if out is not None and _is_out_form(out, op):
            self._register(f"{name}.out", kernel_with(out, self._launcher, _into(compute)), origin)

    def _register(self, name: str, kernel: Callable[..., Any], origin: str = "", *, key: str = "PrivateUse1") -> None:
        namespace, _, rest = name.partition("::")
        library = self._libraries.get(namespace)
        if library is None:
            library = self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
        library.impl(rest, kernel, key, allow_override=True)
        if origin:
            self.origins[name] = origin


def _origin_of(kernel: Callable[..., Any]) -> str:
    return NONE if isinstance(kernel, Missing) else RANDOM if isinstance(kernel, RandomKernel) else BY_THE_CPU


def _is_out_form(out: OpOverload, op: OpOverload) -> bool:
    """Tell whether `out` has the arguments of `op` plus one tensor for the result."""
    *same, last = out._schema.arguments
    plain = [argument.name for argument in same] == [argument.name for argument in op._schema.arguments]
    return op._overloadname == "default" and plain and last.is_out and str(last.type) == "Tensor"


def _into(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of an out variant, from that of the operator."""

    @functools.wraps(compute)
    def run(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = compute(*args, **kwargs)
        return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)

    return run


def _without_gradient(op: OpOverload) -> Callable[..., Any]:
    """Return the function for the autograd key. It goes on to the kernel; an out variant first rejects tensors that need gradients.

    It calls the operator once more, not the kernel: a fake tensor has its own key below that of autograd.
    """
    refuses = any(argument.is_out for argument in op._schema.arguments)

    def run(*args: Any, **kwargs: Any) -> Any:
        needed = (isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))
        if refuses and torch.is_grad_enabled() and any(needed):
            raise RuntimeError(
                f"{op.overloadpacket.__name__}(): functions with out=... arguments don't support automatic differentiation, "
                "but one of the arguments requires grad."
            )
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - no public name
            return op(*args, **kwargs)

    return run


@contextmanager
def _unwarned() -> Iterator[None]:
    """Override kernels inside the block without torch's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _without_formula(name: str) -> Callable[..., Any]:
    """Return the kernel of an operator without a formula; a workspace needs none."""
    return no_workspace if "workspace" in name else Missing(name)


def _registered(prefix: str, key: str = "PrivateUse1") -> list[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)  # noqa: SLF001 - no public list of kernels
    return [name for name in names if name.startswith(prefix)]


def _aten_names() -> Iterable[str]:
    """Every ATen operator with a kernel in torch_npu, or with a CPU kernel and no composition in torch.

    A composition is differentiated through its parts; with a kernel of its own it would lose its gradient.
    """
    listed = torch._C._dispatch_get_registrations_for_dispatch_key  # noqa: SLF001
    cpu = set(listed("CPU")) - set(listed("CompositeImplicitAutograd"))
    return {*_registered("aten::"), *_WITHOUT_GRADIENT, *(name for name in cpu if name.startswith("aten::"))}
