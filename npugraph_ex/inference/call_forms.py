"""What a session compares at each call: the form of the arguments, and the modes of the thread.

Public calls of torch only, each some 40 ns. A comparison of tuples in C then says whether a call is like an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from npugraph_ex import _torch_private
from npugraph_ex.errors import SessionError

Form = tuple[Any, ...]
"""Equal for two calls if, and only if, no compiled code could tell them apart but by the elements and addresses of tensors."""

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CONSTANTS = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def form_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Form:
    """The form of a call's arguments.

    Raises:
        SessionError: an argument is of a type that a session does not take.
    """
    form = tuple(map(_form, args))
    return (form, tuple([(name, _form(value)) for name, value in kwargs.items()])) if kwargs else form


def _form(value: Any) -> Form:
    kind = type(value)
    if kind in _PLAIN_TENSORS:
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


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that are no containers, in the order of their form."""
    return [*_leaves(args), *_leaves(list(kwargs.values()))]


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) in {tuple, list}:
            yield from _leaves(value)
        elif type(value) is dict:
            yield from _leaves(list(value.values()))
        else:
            yield value


_MODES = {
    "gradients enabled": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast on the NPU": partial(torch.is_autocast_enabled, "npu"),
    "autocast's dtype on the NPU": partial(torch.get_autocast_dtype, "npu"),
    "autocast on the CPU": partial(torch.is_autocast_enabled, "cpu"),
    "autocast's dtype on the CPU": partial(torch.get_autocast_dtype, "cpu"),
    "the default dtype": torch.get_default_dtype,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "the current device": torch.npu.current_device,
    "modes of Python in force": _torch_private.modes_around,
}
_QUESTIONS = tuple(_MODES.values())

Modes = list[Any]
"""The values of a thread's modes."""


def modes_now() -> Modes:
    """The modes of this thread."""
    return [question() for question in _QUESTIONS]


def differences(known: Modes, now: Modes) -> str:
    """The modes that differ, for messages."""
    return ", ".join(
        f"{name} ({old} then, {new} now)" for name, old, new in zip(_MODES, known, now, strict=True) if old != new
    )
