"""What a function is, as text that is equal in two processes exactly when the function computes the same there.

Source, constants and what it closes over; memory addresses never.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

_DEEPEST = 6
"""How many steps from the function outwards are followed; beyond, a value counts by its type."""


def fingerprint(value: object, depth: int = 0) -> str:
    """Spell ``value``: a function by its code and surroundings, a plain value by itself, an object by its attributes."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if depth >= _DEEPEST or isinstance(value, type):
        return _type_name(value if isinstance(value, type) else type(value))
    if isinstance(value, (list, tuple)):
        return f"[{','.join(fingerprint(item, depth + 1) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{','.join(sorted(fingerprint(item, depth + 1) for item in value))}}}"
    if isinstance(value, Mapping):
        items = [(fingerprint(key, depth + 1), fingerprint(item, depth + 1)) for key, item in value.items()]
        return f"{{{','.join(f'{key}:{item}' for key, item in sorted(items))}}}"
    return _of_callable_or_object(value, depth + 1)


def _of_callable_or_object(value: Any, depth: int) -> str:
    if isinstance(value, functools.partial):
        return f"partial({fingerprint(value.func, depth)},{fingerprint(value.args, depth)},{fingerprint(value.keywords, depth)})"
    if isinstance(value, MethodType):
        return f"{fingerprint(value.__self__, depth)}.{fingerprint(value.__func__, depth)}"
    if isinstance(value, FunctionType):
        return _of_function(value, depth)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if hasattr(value, "__qualname__"):  # a builtin, an operator
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    return f"{_type_name(type(value))}({fingerprint(dict(attributes), depth)})"


def _of_function(function: FunctionType, depth: int) -> str:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(fingerprint(cell.cell_contents, depth))
        except ValueError:  # not yet assigned
            cells.append("empty")
    kept = [fingerprint(part, depth) for part in (function.__defaults__, function.__kwdefaults__)]
    return f"{function.__module__}.{function.__qualname__}({code_digest(function.__code__)};{','.join(cells)};{';'.join(kept)})"


def code_digest(code: CodeType) -> str:
    """Spell a function's source, or its bytecode where there is none."""
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()
    except (OSError, TypeError):  # typed in, or built: the bytecode is all there is
        constants = [code_digest(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
        return hashlib.sha256(repr((code.co_code, constants, code.co_names)).encode()).hexdigest()


def _of_tensor(tensor: torch.Tensor) -> str:
    """A tensor by its layout and, where it has some, its content."""
    shape = f"tensor({tensor.dtype},{tuple(map(str, tensor.shape))},{tensor.device.type})"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return shape
    host = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{shape}:{hashlib.sha256(host.numpy().tobytes()).hexdigest()}"


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
