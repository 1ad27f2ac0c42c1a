"""Notices parameters, buffers and submodules that a program replaces, by torch's public hooks on their registration.

The hooks run when a module's attribute is set, and never in a call. They do not see what bypasses `nn.Module`: a weight that
gets other memory (`weight.data = ...`), a tensor in a plain attribute, a module's dictionaries written directly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules import module as registration
from torch.utils.hooks import RemovableHandle

from npugraph_ex import _torch_private


def watch(owner: object, forget: Callable[[], None], root: weakref.ref[nn.Module] | None) -> None:
    """Call ``forget`` whenever a program sets a parameter, buffer or submodule, as long as ``owner`` lives.

    Args:
        owner: its end removes the hooks.
        forget: what to call; it must not hold ``owner``.
        root: only modules within this one matter; None for all modules of the process.
    """

    def concerns(module: nn.Module) -> bool:
        whole = root() if root is not None else None
        return whole is None or any(module is part for part in whole.modules())

    def hook(module: nn.Module, name: str, value: object) -> None:
        del name, value
        # Dynamo traces the hook with a function that sets an attribute; the compiled function sets it, and then the hook runs.
        # Another thread may be compiling while this one sets an attribute.
        if not torch.compiler.is_dynamo_compiling() and concerns(module):
            forget()

    handles = [
        registration.register_module_parameter_registration_hook(hook),
        registration.register_module_buffer_registration_hook(hook),
        registration.register_module_module_registration_hook(hook),
    ]
    _remove([])
    weakref.finalize(owner, _remove, handles)


_late: list[RemovableHandle] = []
"""Of owners that died while this thread compiled."""


def _remove(handles: list[RemovableHandle]) -> None:
    """Remove hooks, but none while Dynamo traces: it guards on those that it met, and fails if one is gone."""
    _late.extend(handles)
    while _late and not _torch_private.compilation():
        _late.pop().remove()
