"""The private parts of torch for opaque objects: values of a registered class that a graph takes as inputs.

vLLM registers one for the names of its layers. A graph then serves every layer, and the name comes with each call.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

from torch._library.fake_class_registry import FakeScriptObject, maybe_to_fake_obj
from torch._library.opaque_object import is_opaque_value_type

__all__ = ["fake_of_opaque", "opaque_value", "opaque_value_class"]


def opaque_value(value: Any) -> Any:
    """The object that an input of a graph stands for, if its class was registered with ``typ="value"``; else None."""
    found = value.real_obj if isinstance(value, FakeScriptObject) else value
    return found if is_opaque_value_type(type(found)) else None


def opaque_value_class(module: str, name: str) -> type:
    """The registered class of that name.

    Raises:
        LookupError: this process has not imported ``module``, or has not registered such a class.
    """
    try:
        found = attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        found = None
    if not isinstance(found, type) or not is_opaque_value_type(found):
        raise LookupError(f"the class {module}.{name} of opaque objects")
    return found


def fake_of_opaque(value: Any, mode: Any) -> Any:
    """What a graph holds for the object while it is traced, in a fake mode."""
    return maybe_to_fake_obj(mode, value)
