"""What a session compares at each call: the form of the arguments, and the modes of the thread.

Public calls of torch only, each some 40 ns. A comparison of tuples in C then says whether a call is like an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import copysign
from typing import Any

import torch

from npugraph_ex import _torch_private
from npugraph_ex._plurals import counted
from npugraph_ex.errors import SessionError

Form = tuple[Any, ...]
"""Equal for two calls if, and only if, no compiled code could tell them apart but by the elements and addresses of tensors."""

_CONTAINERS = (tuple, list, dict)
_CONSTANTS = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def form_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: type[torch.Tensor] = torch.Tensor) -> Form:
    """The form of a call's arguments.

    Raises:
        SessionError: an argument is of a type that a session does not take, or contains itself.
    """
    try:
        return _form_of(args, kwargs, tensor)
    except RecursionError:
        raise SessionError(
            "an argument contains itself, or is nested too deeply; a session takes lists, tuples and dicts that end in tensors "
            "and numbers"
        ) from None


def _form_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: type[torch.Tensor]) -> Form:
    form = tuple(
        [
            # As in `_form`, without the call: most arguments of most calls are such tensors.
            (
                tensor,
                value.dtype,
                value.shape,
                value.stride(),
                value.device,
                value.requires_grad,
                value.is_neg(),
                value.is_conj(),
                value.is_inference(),
            )
            if type(value) is tensor
            else _form(value)
            for value in args
        ]
    )
    return (form, tuple([(name, _form(value)) for name, value in kwargs.items()])) if kwargs else form


def is_flat(form: Form, kwargs: Mapping[str, Any]) -> bool:
    """Whether the positional arguments are the leaves."""
    return not kwargs and not any(part[0] in _CONTAINERS for part in form)


def _form(value: Any) -> Form:
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return (
            kind,
            value.dtype,
            value.shape,
            value.stride(),
            value.device,
            value.requires_grad,
            value.is_neg(),
            value.is_conj(),
            value.is_inference(),
        )
    if kind in _CONSTANTS:
        return kind, value
    if kind is float:
        return kind, value.hex()  # 0.0 and -0.0 are equal, and NaN is not equal to itself
    if kind is tuple or kind is list:
        return (kind, *map(_form, value))
    if kind is dict:
        return (kind, *[(_form(name), _form(item)) for name, item in value.items()])
    raise SessionError(
        f"a session takes plain tensors, numbers, strings, None, dtypes, devices, and lists, tuples and dicts of them; got a "
        f"{kind.__module__}.{kind.__qualname__}. Take it apart outside of the session, or hold it in the module"
    )


def differing_arguments(made: Form, given: Form) -> str:
    """Which positional arguments differ in kind, dtype, device or keys from those that a session was made with."""
    if len(made) != len(given):
        return f"{counted(len(given), 'positional argument')}, and the session was made with {len(made)}"
    return _differing(made, given, _kind_and_place)


def differing_sizes(made: Form, given: Form) -> str:
    """Which arguments that are tensors have other sizes than those that a session was made with."""
    return _differing(made, given, _sizes) if len(made) == len(given) else ""


def _differing(made: Form, given: Form, described: Callable[[Form], str]) -> str:
    pairs = [(described(one), described(other)) for one, other in zip(made, given, strict=True)]
    return "; ".join(
        f"argument {number} is {new}, and the session was made with {old}"
        for number, (old, new) in enumerate(pairs)
        if old != new
    )


def _kind_and_place(part: Form) -> str:
    kind = part[0].__name__
    kind = f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
    if part[0] is dict:
        return f"{kind} with the keys {', '.join(sorted(repr(key[1]) for key, _ in part[1:]))}"
    if not issubclass(part[0], torch.Tensor):
        return kind
    return f"{kind} of {str(part[1]).removeprefix('torch.')} on {part[4]}"


def _sizes(part: Form) -> str:
    if not issubclass(part[0], torch.Tensor):
        return ""
    return f"a {part[0].__name__} of the sizes {tuple(part[2])}"


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that are no containers, in the order of their form."""
    return [*_leaves(args), *_leaves(list(kwargs.values()))]


def negative_zeros(leaves: Sequence[Any]) -> str:
    """Which leaves are -0.0, as a text."""
    found = [str(at) for at, leaf in enumerate(leaves) if type(leaf) is float and leaf == 0 and copysign(1, leaf) < 0]
    return ", ".join(found) or "none"


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) in {tuple, list}:
            yield from _leaves(value)
        elif type(value) is dict:
            yield from _leaves(list(value.values()))
        else:
            yield value


_MODES = (
    "gradients enabled",
    "inference mode",
    "autocast on the NPU",
    "autocast on the CPU",
    "autocast's dtypes",
    "the default dtype",
    "deterministic algorithms",
    "the current device",
    "function modes of Python",
    "dispatch modes of Python",
    "levels of forward-mode derivatives",
)

Modes = tuple[Any, ...]
"""The values of a thread's modes."""


# Names of this module, because torch's own would be looked up twice at each call.
_gradients, _inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_autocast, _dtype_of_autocast = torch.is_autocast_enabled, torch.get_autocast_dtype
_dtype, _deterministic = torch.get_default_dtype, torch.are_deterministic_algorithms_enabled
_device = torch.accelerator.current_device_index
_function_modes, _dispatch_modes = _torch_private.function_modes, _torch_private.dispatch_modes
_dual_levels = _torch_private.dual_levels


def modes_now() -> Modes:
    """The modes of this thread."""
    on_npu, on_cpu = _autocast("npu"), _autocast("cpu")
    return (
        _gradients(),
        _inference(),
        on_npu,
        on_cpu,
        (_dtype_of_autocast("npu"), _dtype_of_autocast("cpu")) if on_npu or on_cpu else None,
        _dtype(),
        _deterministic(),
        _device(),
        _function_modes(),
        _dispatch_modes(),
        _dual_levels(),
    )


def differences(known: Modes, now: Modes) -> str:
    """The modes that differ, for messages."""
    return ", ".join(
        f"{name} ({old} then, {new} now)" for name, old, new in zip(_MODES, known, now, strict=True) if old != new
    )
