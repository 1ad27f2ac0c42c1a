"""Writes the registration of a replacement as lines of Python, for counterexamples."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def registration_code(
    search: Callable[..., Any], replace: Callable[..., Any], examples: Sequence[Any], given: Mapping[str, Any]
) -> str:
    """Lines that register the replacement again.

    A function at the top of an importable module is imported; the text of any other is copied, and what that text reads
    from its surroundings is for the reader to add.
    """
    functions = {"search_fn": search, "replace_fn": replace}
    if "extra_check" in given:
        functions["extra_check"] = given["extra_check"]
    texts = [_code_of(role, function) for role, function in functions.items()]
    arguments = [f"{role}={role}" for role in functions]
    arguments.insert(2, f"example_inputs=[{', '.join(map(_example, examples))}]")
    if given.get("scalar_workaround"):
        arguments.append(f"scalar_workaround={dict(given['scalar_workaround'])!r}")
    call = ",\n        ".join(arguments)
    return "\n".join(
        [
            "import torch",
            "from torch._subclasses.fake_tensor import FakeTensorMode",
            "",
            "import npugraph_ex",
            "",
            *texts,
            "with FakeTensorMode():",
            f"    npugraph_ex.register_replacement(\n        {call},\n    )",
        ]
    )


def _code_of(role: str, function: Any) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    home = sys.modules.get(module)
    if module != "__main__" and home is not None and getattr(home, name, None) is function:
        return f"from {module} import {name} as {role}"
    try:
        source = textwrap.dedent(inspect.getsource(function)).strip()
    except (OSError, TypeError):
        source = ""
    if source.startswith("def ") and name:
        return f"\n{source}\n\n{role} = {function.__name__}"
    return f"# {role} is {name or function!r} of {module or 'an unknown module'}: import it here."


def _example(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"torch.empty({tuple(value.shape)}, dtype={value.dtype}, device='npu')"
