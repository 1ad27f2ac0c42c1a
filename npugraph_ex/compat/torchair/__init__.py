"""The names of TorchAir that this library has, for scripts that say `import torchair`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import npugraph_ex
from npugraph_ex.compat.torchair_names import instead

if TYPE_CHECKING:
    from npugraph_ex import CompilerConfig as CompilerConfig
    from npugraph_ex import get_compiler as get_compiler
    from npugraph_ex import get_npu_backend as get_npu_backend
    from npugraph_ex import inference as inference
    from npugraph_ex import logger as logger
    from npugraph_ex import ops as ops
    from npugraph_ex import register_replacement as register_replacement
    from npugraph_ex import scope as scope

__all__ = [
    "CompilerConfig",
    "get_compiler",
    "get_npu_backend",
    "inference",
    "logger",
    "ops",
    "register_replacement",
    "scope",
]


def __getattr__(name: str) -> object:
    """Pass the public names on; they load on first use, as they do in the façade."""
    if name not in __all__:
        known = ", ".join(__all__)
        raise AttributeError(f"torchair, as npugraph_ex provides it, has no {name!r}{instead(name)}; it has {known}")
    value: object = getattr(npugraph_ex, name)
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not, and none that only this file uses."""
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "annotations", "instead", "npugraph_ex"})
